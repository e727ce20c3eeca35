"""Speculative decoding: the state, the step, what drafts, sampling."""

from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate.chunks import PackedChunks, PromptChunk, PromptChunks
from mla_compile.speculate.drafter import Drafter, DrafterKind, DrafterSettings, Verified
from mla_compile.speculate.state import DecodeState
from mla_compile.speculate.step import SpeculativeDecoder, Step
from mla_compile.speculate.target import ServedModel

__all__ = [
    "DecodeState",
    "Drafter",
    "DrafterKind",
    "DrafterSettings",
    "PackedChunks",
    "PromptChunk",
    "PromptChunks",
    "SamplingParams",
    "ServedModel",
    "SpeculativeDecoder",
    "Step",
    "Verified",
]
