"""MLA attention and MTP speculative decoding, native to `torch.compile`."""

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment
from mla_compile.engine import Completion, Engine, Grammar, generate
from mla_compile.errors import MLAError
from mla_compile.explanation import Explanation, explain
from mla_compile.models import load_model, load_tokenizer
from mla_compile.ops import mla_append, mla_attention, mla_decode, mla_prefill
from mla_compile.ops.segments import decode_segment, prefill_segment
from mla_compile.packing import PackedBatch, pack_batch
from mla_compile.speculate import SamplingParams, ShadowCheckError, shadow_check

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "DecodeSegment",
    "Engine",
    "Explanation",
    "Grammar",
    "MLABatch",
    "MLAError",
    "PackedBatch",
    "PrefillSegment",
    "SamplingParams",
    "ShadowCheckError",
    "decode_segment",
    "explain",
    "generate",
    "load_model",
    "load_tokenizer",
    "mla_append",
    "mla_attention",
    "mla_decode",
    "mla_prefill",
    "pack_batch",
    "prefill_segment",
    "shadow_check",
]
