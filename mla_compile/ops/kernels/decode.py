"""Split-KV decode over the paged latents, in two launches: partial attention of each split of keys, then their sum.

A program holds up to `BLOCK_R` query rows (a row's query tokens times its heads) and walks over its share of the
row's keys. Keys are the rows of both products and queries the columns, `S^T = K Q^T` and `O^T += K_c^T P^T`: tensor
cores want 64 rows, which keys always fill and 16 or 20 heads never do.

Which keys a program reads follows from shapes and from its own row's length, so the grid can be captured, lengths
may change at replay, and a row's bits do not depend on its neighbours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.plan import (
    MIN_KEYS,
    DecodeTiles,
    decode_tiles,
    device_of,
    num_splits,
    power_of_two,
)
from mla_compile.ops.kernels.softmax import (
    LOG2_E,
    attend_latents,
    combine,
    split_of,
    split_results,
    store_split,
)


@triton.jit
def _pages(table, key, stop, PAGE_SIZE: tl.constexpr):
    """Page of each key, int64; 0 from `stop` on, where table entries are never followed."""
    return tl.load(table + key // PAGE_SIZE, mask=key < stop, other=0).to(tl.int64)


@triton.jit
def split_kernel(
    q_latent,  # [rows * Q_LEN, HEADS, RANK], any strides but the last
    q_pe,  # [rows * Q_LEN, HEADS, ROPE], likewise
    kv_cache,  # [pages, PAGE_SIZE, RANK + ROPE]
    block_table,  # int32 [rows, columns]
    seq_lens,  # int32 [rows]
    q_lens,  # int32 [rows], unread unless HAS_Q_LENS
    out,  # [splits, rows * Q_LEN * HEADS, RANK], contiguous
    lse,  # float32 [splits, rows * Q_LEN * HEADS]
    softmax_scale,
    columns,
    q_token_stride,
    q_head_stride,
    pe_token_stride,
    pe_head_stride,
    table_stride,
    HAS_Q_LENS: tl.constexpr,
    Q_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_BLOCK: tl.constexpr,  # RANK and ROPE rounded up to powers of two
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
):
    """Attention of one block of query rows over one split of a row's keys; grid `[rows * row blocks, splits]`."""
    R: tl.constexpr = Q_LEN * HEADS
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    row = tl.program_id(0) // R_BLOCKS
    r = (tl.program_id(0) % R_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(1)
    splits = tl.num_programs(1)

    length = tl.load(seq_lens + row)
    valid = Q_LEN
    if HAS_Q_LENS:
        valid = tl.load(q_lens + row)
    token = r // HEADS
    # `visible_keys`, for each query row; none for the rows that only fill the block.
    stored = tl.minimum(length, columns * PAGE_SIZE)
    bounds = tl.where((token < valid) & (r < R), tl.minimum(length - (valid - 1 - token), stored), 0)
    stop = tl.where(valid > 0, stored, 0)

    start, stop = split_of(stop, split, splits, BLOCK_N, MIN_KEYS)

    target = split.to(tl.int64) * (tl.num_programs(0) // R_BLOCKS) * R + row * R + r
    if (start >= stop) & (splits > 1):  # The sum skips an empty split, so its `out` may stay unwritten.
        tl.store(lse + target, tl.full([BLOCK_R], -float("inf"), tl.float32), mask=r < R)
        return

    c = tl.arange(0, RANK_BLOCK)
    p = tl.arange(0, ROPE_BLOCK)
    query_token = (row * Q_LEN + token).to(tl.int64)
    q_at = query_token * q_token_stride + (r % HEADS) * q_head_stride
    pe_at = query_token * pe_token_stride + (r % HEADS) * pe_head_stride
    q = tl.load(q_latent + q_at[:, None] + c[None, :], mask=(r < R)[:, None] & (c < RANK)[None, :], other=0.0)
    qp = tl.load(q_pe + pe_at[:, None] + p[None, :], mask=(r < R)[:, None] & (p < ROPE)[None, :], other=0.0)
    q = tl.trans(q)
    qp = tl.trans(qp)

    scale = softmax_scale * LOG2_E
    top = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([RANK_BLOCK, BLOCK_R], tl.float32)
    table = block_table + row.to(tl.int64) * table_stride
    key = start + tl.arange(0, BLOCK_N)
    page = _pages(table, key, stop, PAGE_SIZE)
    for first in range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        latent = kv_cache + (page * PAGE_SIZE + key % PAGE_SIZE)[:, None] * (RANK + ROPE)
        # One tile ahead, so that the latents' addresses are known when their turn comes.
        page = _pages(table, key + BLOCK_N, stop, PAGE_SIZE)
        top, total, acc = attend_latents(
            q, qp, latent, key < stop, key, bounds, scale, top, total, acc,
            RANK, ROPE, RANK_BLOCK, ROPE_BLOCK,
        )  # fmt: skip
    store_split(out, lse, target, r < R, top, total, acc, RANK, RANK_BLOCK)


def decode_triton(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    softmax_scale: float,
    *,
    tiles: DecodeTiles | None = None,
    splits: int | None = None,
    min_keys: int = MIN_KEYS,
) -> tuple[Tensor, Tensor]:
    """What `mla_decode` computes, with its arguments, on the GPU or in Triton's interpreter.

    `tiles`, `splits` and `min_keys` are chosen by `plan.py` unless given. Nothing is read on the host.
    """
    tokens, heads, rank = q_latent.shape
    rows, columns = block_table.shape
    rope, page_size = q_pe.shape[2], kv_cache.shape[1]
    query_rows = q_len * heads
    q_latent, q_pe, block_table = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe, block_table)
    )

    device = device_of(q_latent)
    tiles = tiles or decode_tiles(query_rows, rank, q_latent.dtype, device)
    blocks = rows * triton.cdiv(query_rows, tiles.rows)
    splits = splits or num_splits(blocks, columns * page_size, device)

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((tokens, heads), dtype=torch.float32)
    part_out, part_lse = split_results(out, lse, splits)
    with torch.cuda.device_of(q_latent):  # Triton launches on the current device
        split_kernel[(blocks, splits)](
            q_latent,
            q_pe,
            kv_cache,
            block_table,
            seq_lens.contiguous(),
            seq_lens if q_lens is None else q_lens.contiguous(),
            part_out,
            part_lse,
            softmax_scale,
            columns,
            *q_latent.stride()[:2],
            *q_pe.stride()[:2],
            block_table.stride(0),
            HAS_Q_LENS=q_lens is not None,
            Q_LEN=q_len,
            HEADS=heads,
            RANK=rank,
            ROPE=rope,
            RANK_BLOCK=power_of_two(rank),
            ROPE_BLOCK=power_of_two(rope),
            PAGE_SIZE=page_size,
            BLOCK_R=tiles.rows,
            BLOCK_N=tiles.keys,
            MIN_KEYS=min_keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if splits > 1:
            combine(part_out, part_lse, out, lse)
    return out, lse
