"""Custom ops, and builders of the segments that they take. Importing this package registers the ops with torch."""

from mla_compile.ops import collectives, masked_decode, moe, norm_linear, norm_rope, norm_router, reductions  # noqa: F401
from mla_compile.ops.append import mla_append
from mla_compile.ops.attention import mla_attention
from mla_compile.ops.decode import mla_decode
from mla_compile.ops.prefill import mla_prefill
from mla_compile.ops.segments import decode_segment, prefill_segment

__all__ = [
    "decode_segment",
    "mla_append",
    "mla_attention",
    "mla_decode",
    "mla_prefill",
    "prefill_segment",
]
