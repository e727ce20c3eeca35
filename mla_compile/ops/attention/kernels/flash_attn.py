"""Prefill with FlashAttention 4, the package `flash-attn-4`.

It reads a row's keys in one order, whatever the chunks and the other rows are, so a token's bits do not depend on them.
No launch depends on lengths, so a CUDA graph may record it.
"""

import warnings

from flash_attn.cute.interface import flash_attn_varlen_func
from torch import Tensor

from mla_compile.ops.attention.kernels.keys import expanded_keys
from mla_compile.ops.attention.operands import PrefillOperands
from mla_compile.ops.attention.softmax import in_parts

# A warning about one of the package's own arguments, which a user cannot fix.
warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)

_GAP = 144
"""Keys of its widest tile. A row's last tile reads past the row's end: keys there weigh 0, but 0 x NaN is NaN."""


def prefill_flash_attn(operands: PrefillOperands) -> Tensor:
    """`mla_prefill` with FlashAttention."""
    q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, softmax_scale, _ = operands

    def attend(part: int, causal: bool) -> tuple[Tensor, Tensor]:
        keys = expanded_keys(kv_cache, key_slots[part], cu_seqlens_k[part], w_uk, w_uv, gap=_GAP)
        # If causal, the last query of a row sees the row's last key.
        out, lse = flash_attn_varlen_func(
            q,
            keys.key,
            keys.value,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=keys.cu_places,
            seqused_k=keys.lens,
            softmax_scale=softmax_scale,
            causal=causal,
            return_lse=True,
        )
        return out, lse.T

    return operands.joined(in_parts(attend, key_slots.shape[0]).to(q.dtype))
