"""Custom ops, and builders of the segments that they take. Importing this package registers the ops with torch."""

from mla_compile.ops.append import mla_append
from mla_compile.ops.attention import mla_attention
from mla_compile.ops.collectives import all_gather, all_reduce
from mla_compile.ops.decode import mla_decode
from mla_compile.ops.fp8_linear import fp8_linear
from mla_compile.ops.masked_decode import mla_masked_decode
from mla_compile.ops.matmul import batch_invariant_matmul, fused_linear, matmul_by_head
from mla_compile.ops.metadata import mla_decode_metadata, mla_prefill_metadata
from mla_compile.ops.moe import moe_experts
from mla_compile.ops.norm_linear import norm_linear
from mla_compile.ops.norm_rope import mla_norm_rope_append, mla_rotate_queries
from mla_compile.ops.norm_router import norm_router
from mla_compile.ops.prefill import mla_prefill
from mla_compile.ops.reductions import batch_invariant_sum, row_argmax
from mla_compile.ops.rms_norm import all_reduce_add_rms_norm, fused_add_rms_norm, fused_rms_norm
from mla_compile.ops.routing import moe_router
from mla_compile.ops.segments import decode_segment, prefill_segment

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "batch_invariant_matmul",
    "batch_invariant_sum",
    "decode_segment",
    "fp8_linear",
    "fused_add_rms_norm",
    "fused_linear",
    "fused_rms_norm",
    "matmul_by_head",
    "mla_append",
    "mla_attention",
    "mla_decode",
    "mla_decode_metadata",
    "mla_masked_decode",
    "mla_norm_rope_append",
    "mla_prefill",
    "mla_prefill_metadata",
    "mla_rotate_queries",
    "moe_experts",
    "moe_router",
    "norm_linear",
    "norm_router",
    "prefill_segment",
    "row_argmax",
]
