"""Absorbed attention of each token over selected latents: `decode.py` with a list of slots in place of a block table.

A program holds query heads of one token and reads its share of the token's slots. Where the slots end is read from the
list itself, so that short rows read and compute what they have, and the grid can be captured.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.latents import FP8
from mla_compile.ops.attention.kernels.latents import padded
from mla_compile.ops.attention.kernels.softmax import (
    LOG2_E,
    attend_latents,
    combine,
    load_queries,
    split_of,
    split_results,
    store_split,
)
from mla_compile.ops.attention.tiles import MIN_KEYS, AttentionTiles, decode_tiles, num_splits
from mla_compile.ops.device import device_of


@triton.jit
def sparse_kernel(
    q_latent,  # [tokens, HEADS, RANK], any strides but the last
    q_pe,  # [tokens, HEADS, ROPE], any strides but the last
    kv_cache,  # [slots, WIDTH], contiguous; floats or FP8 latents
    selected,  # int32 [tokens, TOPK], contiguous
    out,  # [splits, tokens * HEADS, RANK], contiguous
    lse,  # float32 [splits, tokens * HEADS]
    softmax_scale,
    q_strides,  # of tokens and heads
    pe_strides,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
):
    """Attention of one block of a token's heads over one split of its slots; grid `[tokens * blocks, splits]`."""
    BLOCKS: tl.constexpr = (HEADS + BLOCK_R - 1) // BLOCK_R
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = (tl.program_id(0) % BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    split, splits = tl.program_id(1), tl.num_programs(1)
    inside = head < HEADS
    target = (split.to(tl.int64) * (tl.num_programs(0) // BLOCKS) + token) * HEADS + head

    selected += token * TOPK
    place = tl.arange(0, padded(TOPK))
    slots = tl.load(selected + place, mask=place < TOPK, other=-1)
    keys = tl.max(tl.where(slots >= 0, place + 1, 0), 0)
    start, stop = split_of(keys, split, splits, BLOCK_N, MIN_KEYS)
    # The sum skips an empty split, so its `out` may stay unwritten.
    idle = (start >= stop) & (splits > 1)
    tl.store(lse + target, tl.full([BLOCK_R], -float("inf"), tl.float32), mask=inside & idle)
    if idle:
        return

    at = head.to(tl.int64)
    q_at = q_latent + token * q_strides[0] + at * q_strides[1]
    pe_at = q_pe + token * pe_strides[0] + at * pe_strides[1]
    q, qp = load_queries(q_at, pe_at, inside, RANK, ROPE)
    scale = softmax_scale * LOG2_E
    bounds = tl.where(inside, 1, 0)
    top = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([padded(RANK), BLOCK_R], tl.float32)
    key = start + tl.arange(0, BLOCK_N)
    slot = tl.load(selected + key, mask=key < stop, other=-1)
    for first in range(start, stop, BLOCK_N):
        live = slot >= 0
        latent = kv_cache + tl.maximum(slot, 0).to(tl.int64)[:, None] * WIDTH
        # One tile ahead, so that the next iteration knows the latents' addresses.
        key = first + BLOCK_N + tl.arange(0, BLOCK_N)
        slot = tl.load(selected + key, mask=key < stop, other=-1)
        top, total, acc = attend_latents(
            q, qp, latent, live, tl.where(live, 0, 1), bounds, scale, top, total, acc,
            RANK, ROPE,
        )  # fmt: skip
    store_split(out, lse, target, inside, inside, top, total, acc, RANK)


def sparse_triton(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    selected: Tensor,
    softmax_scale: float,
    *,
    tiles: AttentionTiles | None = None,
    splits: int | None = None,
    min_keys: int = MIN_KEYS,
) -> Tensor:
    """`mla_sparse_attention` on the GPU or in Triton's interpreter.

    `tiles`, `splits` and `min_keys` are chosen by `tiles.py` unless given. Nothing is read on the host.
    """
    (tokens, heads, rank), topk = q_latent.shape, selected.shape[1]
    q_latent, q_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe))
    device = device_of(q_latent)
    tiles = tiles or decode_tiles(heads, rank, q_latent.dtype, device, fp8=kv_cache.dtype == FP8)
    blocks = tokens * triton.cdiv(heads, tiles.queries)
    splits = splits or num_splits(blocks, topk, device)

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((tokens, heads), dtype=torch.float32)
    part_out, part_lse = split_results(out, lse, splits)
    sparse_kernel[(blocks, splits)](
        q_latent,
        q_pe,
        kv_cache.contiguous(),
        selected.contiguous(),
        part_out,
        part_lse,
        softmax_scale,
        q_latent.stride()[:2],
        q_pe.stride()[:2],
        HEADS=heads,
        RANK=rank,
        ROPE=q_pe.shape[2],
        WIDTH=kv_cache.shape[2],
        TOPK=topk,
        BLOCK_R=tiles.queries,
        BLOCK_N=tiles.keys,
        MIN_KEYS=min_keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        combine(part_out, part_lse, out, lse)
    return out
