"""The custom ops and the builders of their segments. Importing this package registers the ops with torch."""

from mla_compile.ops.attention import masked_decode, norm_rope  # noqa: F401
from mla_compile.ops.attention.append import mla_append
from mla_compile.ops.attention.decode import mla_decode
from mla_compile.ops.attention.mla_attention import mla_attention
from mla_compile.ops.attention.mla_select_keys import mla_select_keys
from mla_compile.ops.attention.prefill import mla_prefill
from mla_compile.ops.attention.segments import decode_segment, prefill_segment
from mla_compile.ops.collectives import collectives as _collectives  # noqa: F401
from mla_compile.ops.experts import moe, norm_router  # noqa: F401
from mla_compile.ops.linear import fp8_linear, norm_linear  # noqa: F401
from mla_compile.ops.reductions import last_dim  # noqa: F401
from mla_compile.ops.sampling import sample  # noqa: F401

__all__ = [
    "decode_segment",
    "mla_append",
    "mla_attention",
    "mla_decode",
    "mla_prefill",
    "mla_select_keys",
    "prefill_segment",
]
