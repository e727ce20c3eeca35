"""`mla_masked_decode`: absorbed attention over dense latents under an arbitrary mask."""

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.attention.softmax import product
from mla_compile.ops.attention.tiles import KV_LORA_RANKS, ROPE_HEAD_DIMS
from mla_compile.ops.dispatch import FLOATS, SOME, UNIT, reference, triton
from mla_compile.ops.dtypes import accumulate_dtype
from mla_compile.ops.library import define_op, empty

MASKED_DECODE = (
    triton(
        "split-KV kernel that skips the tiles that the mask hides",
        "mla_compile.ops.attention.kernels.masked_decode:masked_decode_triton",
        constraints={
            "dtype": FLOATS,
            "queries": SOME,
            "keys": SOME,
            "kv_lora_rank": KV_LORA_RANKS,
            "qk_rope_head_dim": ROPE_HEAD_DIMS,
            "kv_c.stride(2)": UNIT,
            "k_pe.stride(2)": UNIT,
        },
    ),
    reference("mla_compile.ops.attention.masked_decode:masked_decode_torch"),
)


@define_op(
    table=MASKED_DECODE,
    layouts={
        "q_latent": "rows, heads, q_len, kv_lora_rank",
        "q_pe": "rows, heads, q_len, qk_rope_head_dim",
        "kv_c": "rows or 1, keys, kv_lora_rank",
        "k_pe": "rows or 1, keys, qk_rope_head_dim",
    },
    facts=lambda q_latent: {"queries": q_latent.shape[:-1].numel()},
)
def mla_masked_decode(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    mask: Tensor | None = None,
    *,
    softmax_scale: float,
) -> Tensor:
    """`scaled_dot_product_attention` in the latent space: `mla_decode` for dense keys under a mask.

    `softmax((q_latent . kv_c + q_pe . k_pe) * softmax_scale + mask) @ kv_c`; for half types scores are in float32.

    Args:
        q_latent: `q_nope @ w_uk`, `[rows, heads, q_len, kv_lora_rank]`, float.
        q_pe: `[rows, heads, q_len, qk_rope_head_dim]`, same dtype.
        kv_c: `[rows, keys, kv_lora_rank]`, or with 1 row that all share; same dtype, any strides.
        k_pe: `[rows, keys, qk_rope_head_dim]`, or with 1 row that all share; same dtype, any strides.
        mask: bool, True for a key that is seen, or float, added to the scaled scores. Its shape broadcasts to
            `[rows, heads, q_len, keys]`, any strides. None means that all keys are seen.
        softmax_scale: multiplies the scores.

    Returns:
        `[rows, heads, q_len, kv_lora_rank]`, contiguous, in the dtype of `q_latent`; 0 for a query that sees no key.
        On a GPU most latents that no query sees are not read.
    """
    if mask is not None:
        validate.mask(mask, (*q_latent.shape[:3], kv_c.shape[1]), q_latent)
    return empty(q_latent, q_latent.shape)


masked_decode_op = torch.ops.mla_compile.mla_masked_decode.default


def masked_decode_torch(
    q_latent: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, mask: Tensor | None, softmax_scale: float
) -> Tensor:
    """`mla_masked_decode` in plain torch, for every device and dtype; the kernel must agree with it."""
    rows, heads, q_len, rank = q_latent.shape
    keys = kv_c.shape[1]
    if keys == 0:
        return q_latent.new_zeros(q_latent.shape)
    # Queries that share latents form one dimension, so that the latents are read once.
    batch = 1 if kv_c.shape[0] == k_pe.shape[0] == 1 else rows
    count = rows * heads * q_len // max(batch, 1)
    kv_c, k_pe = (x if x.is_cuda else x.to(accumulate_dtype(x.dtype)) for x in (kv_c, k_pe))
    kv_c, k_pe = kv_c.expand(batch, -1, -1), k_pe.expand(batch, -1, -1)
    scores = product(q_latent.reshape(batch, count, rank), kv_c.mT)
    scores += product(q_pe.reshape(batch, count, q_pe.shape[3]), k_pe.mT)
    scores *= softmax_scale
    if mask is not None:
        added = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
        scores.view(rows, heads, q_len, keys).add_(added)
    unseen = scores.amax(dim=-1, keepdim=True) == -torch.inf
    # `softmax_weighted` would be several times slower on a CPU, where `exp` is slow far below 0.
    out = product(scores.softmax(dim=-1), kv_c).masked_fill_(unseen, 0)
    return out.to(q_latent.dtype).view(rows, heads, q_len, rank)
