"""MLA attention and MTP speculative decoding, native to `torch.compile`."""

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment, decode_segment, prefill_segment
from mla_compile.errors import MLAError
from mla_compile.ops import mla_append, mla_attention, mla_decode, mla_prefill

__version__ = "0.1.0"

__all__ = [
    "DecodeSegment",
    "MLABatch",
    "MLAError",
    "PrefillSegment",
    "decode_segment",
    "mla_append",
    "mla_attention",
    "mla_decode",
    "mla_prefill",
    "prefill_segment",
]
