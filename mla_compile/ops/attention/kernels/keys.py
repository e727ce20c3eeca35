"""Keys and values of prompt chunks, expanded per head from the paged latents, for the prefill kernels."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.latents import rope_width
from mla_compile.ops.attention.kernels.chunks import rows_block
from mla_compile.ops.attention.kernels.latents import load_latents, padded
from mla_compile.ops.linear.kernels.matmul import matmul_triton


@triton.jit(do_not_specialize=["key_slots", "cu_seqlens_k", "places", "rows"])
def gather_kernel(
    kv_cache,  # [slots, WIDTH], contiguous; floats or FP8 latents
    key_slots,  # int64 [keys], contiguous; -1 for padding
    cu_seqlens_k,  # int32 [rows + 1]
    latents,  # [places, RANK], contiguous
    rotated,  # [places, heads, ROPE], any strides but the last
    cu_places,  # int32 [rows + 1], written; lens: int32 [rows], written
    lens,
    places,
    rows,
    heads,
    rotated_strides,  # of places and heads
    GAP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy latents out of their pages, and the rotated keys to every head; zeros for places without a key."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (n < places)[:, None]
    r = tl.arange(0, ROWS_BLOCK)
    ends = tl.load(cu_seqlens_k + 1 + r, mask=r < rows, other=2**30) + r * GAP
    row = tl.sum((n[:, None] >= ends[None, :] + GAP).to(tl.int32), 1)
    end = tl.load(cu_seqlens_k + 1 + row, mask=row < rows, other=0) + row * GAP
    if tl.program_id(0) == 0:
        start = tl.load(cu_seqlens_k + r, mask=r <= rows, other=0)
        tl.store(cu_places + r, start + r * GAP, mask=r <= rows)
        tl.store(lens + r, ends - r * GAP - start, mask=r < rows)
    slot = tl.load(key_slots + n - row * GAP, mask=n < end, other=-1)
    token = kv_cache + slot[:, None] * WIDTH
    latent, found = load_latents(token, slot >= 0, latents.dtype.element_ty, RANK, ROPE)
    place = n.to(tl.int64)[:, None]
    c = tl.arange(0, padded(RANK))[None, :]
    tl.store(latents + place * RANK + c, latent, mask=inside & (c < RANK))
    p = tl.arange(0, padded(ROPE))[None, :]
    for head in range(heads):
        tl.store(
            rotated + place * rotated_strides[0] + head * rotated_strides[1] + p,
            found,
            mask=inside & (p < ROPE),
        )


class ExpandedKeys(NamedTuple):
    """key `[places, heads, qk_nope_head_dim + qk_rope_head_dim]`; value `[places, heads, v_head_dim]`; cu_places: the
    prefix sum of the rows' places, int32 `[rows + 1]`; lens: the number of keys of each row, int32 `[rows]`."""

    key: Tensor
    value: Tensor
    cu_places: Tensor
    lens: Tensor


def expanded_keys(
    kv_cache: Tensor, key_slots: Tensor, cu_seqlens_k: Tensor, w_uk: Tensor, w_uv: Tensor, *, gap: int = 0
) -> ExpandedKeys:
    """Keys and values of a part (see `PrefillSegment`), with `gap` places of zeros after every row's.

    In half precision cuBLAS computes the products, and writes the one with `w_uk` into the keys, next to their rotary
    part. In float32 the bits of cuBLAS would depend on the number of keys.
    """
    (heads, nope, rank), rows = w_uk.shape, cu_seqlens_k.shape[0] - 1
    places, rope = key_slots.shape[0] + rows * gap, rope_width(kv_cache, rank)
    latents = w_uk.new_empty((places, rank))
    key = w_uk.new_empty((places, heads, nope + rope))
    cu_places, lens = torch.empty_like(cu_seqlens_k), cu_seqlens_k.new_empty(rows)
    gather_kernel[(triton.cdiv(places, 16),)](
        kv_cache,
        key_slots,
        cu_seqlens_k,
        latents,
        key[..., nope:],
        cu_places,
        lens,
        places,
        rows,
        heads,
        key.stride()[:2],
        GAP=gap,
        RANK=rank,
        ROPE=rope,
        WIDTH=kv_cache.shape[2],
        ROWS_BLOCK=rows_block(rows),
        BLOCK=16,
    )
    if latents.dtype == torch.float32:
        of_place = latents.unsqueeze(1).expand(-1, heads, -1)
        key[..., :nope] = matmul_triton(of_place, w_uk.mT)
        value = matmul_triton(of_place, w_uv)
    else:
        value = w_uk.new_empty((places, heads, w_uv.shape[2]))
        of_head = latents.expand(heads, -1, -1)
        torch.bmm(of_head, w_uk.mT, out=key[..., :nope].transpose(0, 1))
        torch.bmm(of_head, w_uv, out=value.transpose(0, 1))
    return ExpandedKeys(key, value, cu_places, lens)
