"""`mla_sparse_attention`: absorbed attention of each token over latents of its own choice."""

from dataclasses import replace

import torch
from torch import Tensor

from mla_compile.latents import FP8
from mla_compile.ops import validate
from mla_compile.ops.attention.softmax import product, softmax_weighted
from mla_compile.ops.attention.tiles import KV_LORA_RANKS, ROPE_HEAD_DIMS
from mla_compile.ops.dispatch import FLOATS, SOME, Candidate, reference, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import read_latents

_FLASH_MLA = Candidate(
    name="flash_mla",
    description="FlashMLA's sparse kernel for Hopper",
    function="mla_compile.ops.attention.kernels.flash_mla_sparse:sparse_flash_mla",
    device_types=("cuda",),
    min_capability=(9, 0),
    max_capability=(9, 0),
    packages=("flash_mla", "triton"),
    constraints={
        "dtype": (torch.bfloat16,),
        "kv_cache.dtype": (torch.bfloat16,),
        "tokens": SOME,
        "heads": (64, 128),
        "topk": range(128, 8193, 128),
        "kv_lora_rank": range(512, 513),
        "qk_rope_head_dim": range(64, 65),
    },
)
SPARSE = (
    _FLASH_MLA,
    replace(
        _FLASH_MLA,
        name="flash_mla_fp8",
        description="FlashMLA's sparse kernel for Hopper and FP8 latents",
        function="mla_compile.ops.attention.kernels.flash_mla_sparse:sparse_flash_mla_fp8",
        constraints={**_FLASH_MLA.constraints, "kv_cache.dtype": (FP8,), "topk": range(64, 8193, 64)},
    ),
    triton(
        "split-KV kernel over lists of slots",
        "mla_compile.ops.attention.kernels.sparse:sparse_triton",
        constraints={
            "dtype": FLOATS,
            "tokens": SOME,
            "heads": SOME,
            "topk": range(1, 8193),  # a program reads the whole list
            "kv_lora_rank": KV_LORA_RANKS,
            "qk_rope_head_dim": ROPE_HEAD_DIMS,
        },
    ),
    reference("mla_compile.ops.attention.sparse:sparse_torch"),
)


# As in `mla_decode`, absorbing leaves heads outermost: a fixed layout would copy every query.
@define_op(
    table=SPARSE,
    layouts={
        "q_latent": "tokens, heads, kv_lora_rank",
        "q_pe": "tokens, heads, qk_rope_head_dim",
        "kv_cache": validate.LATENTS,
        "selected": "int32 tokens, topk",
    },
    layout=torch.Tag.flexible_layout,
)
def mla_sparse_attention(
    q_latent: Tensor, q_pe: Tensor, kv_cache: Tensor, selected: Tensor, *, softmax_scale: float
) -> Tensor:
    """Attention in the latent space, of each token over the latents that are selected for it.

    `softmax_i((q_latent . kv_c_i + q_pe . k_pe_i) * softmax_scale) @ kv_c`, over the token's slots i. Decode rows,
    drafts and prompt chunks are alike: a token needs no row.

    Args:
        q_latent: `q_nope @ w_uk`, `[tokens, heads, kv_lora_rank]`, float.
        q_pe: `[tokens, heads, qk_rope_head_dim]`, same dtype.
        kv_cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous, same dtype, or with
            FP8 latents (`mla_append`); it already holds the new tokens' latents.
        selected: int32 `[tokens, topk]`: distinct slots, `page * page_size + offset`; -1, anywhere, is no slot.
        softmax_scale: multiplies the scores.

    Returns:
        `[tokens, heads, kv_lora_rank]` in the dtype of `q_latent`; 0 for a token without a slot.

    Raises:
        MLAError: an argument is invalid. Slots are range-checked on the CPU only.
    """
    validate.slots("selected", selected, kv_cache)
    return empty(q_latent, q_latent.shape)


sparse_op = torch.ops.mla_compile.mla_sparse_attention.default

_WORKSPACE = 2**25
"""Elements of the latents that are gathered at a time."""


def sparse_torch(
    q_latent: Tensor, q_pe: Tensor, kv_cache: Tensor, selected: Tensor, softmax_scale: float
) -> Tensor:
    """`mla_sparse_attention` in plain torch, for every device and dtype; kernels must agree with it."""
    (tokens, heads, rank), topk = q_latent.shape, selected.shape[1]
    if tokens * heads * topk * kv_cache.numel() == 0:
        return torch.zeros_like(q_latent, memory_format=torch.contiguous_format)
    flat = kv_cache.reshape(-1, kv_cache.shape[2])
    step = max(1, _WORKSPACE // (topk * flat.shape[1]))
    outs = []
    for first in range(0, tokens, step):
        slots = selected[first : first + step]
        is_slot = slots >= 0
        latents = read_latents(flat, slots.clamp(min=0).flatten(), rank, q_latent.dtype)
        latents = latents.unflatten(0, slots.shape)
        latents.masked_fill_(~is_slot[..., None], 0)  # 0 x NaN is NaN
        query = torch.cat([q_latent[first : first + step], q_pe[first : first + step]], dim=-1)
        scores = product(query, latents.mT).mul_(softmax_scale)
        scores.masked_fill_(~is_slot[:, None], -torch.inf)
        outs.append(softmax_weighted(scores, latents[..., :rank])[0].to(q_latent.dtype))
    return torch.cat(outs)
