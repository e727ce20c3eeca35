"""Speculative decoding: the state, the step, the drafters, sampling."""

from mla_compile.sampling_params import SamplingParams as SamplingParams
from mla_compile.speculate.chunks import PackedChunks as PackedChunks
from mla_compile.speculate.chunks import PromptChunk as PromptChunk
from mla_compile.speculate.chunks import PromptChunks as PromptChunks
from mla_compile.speculate.drafter import Drafter as Drafter
from mla_compile.speculate.drafter import DrafterKind as DrafterKind
from mla_compile.speculate.drafter import DrafterSettings as DrafterSettings
from mla_compile.speculate.drafter import Verified as Verified
from mla_compile.speculate.state import DecodeState as DecodeState
from mla_compile.speculate.step import SpeculativeDecoder as SpeculativeDecoder
from mla_compile.speculate.target import ServedModel as ServedModel
