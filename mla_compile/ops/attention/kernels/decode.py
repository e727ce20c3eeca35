"""Split-KV decode over the paged latents, in two launches: partial attention of each split of keys, then their sum.

A program holds up to `BLOCK_R` queries (a row's query tokens times its heads) and reads its share of the row's
keys. In both products keys are the matrix rows and queries the columns, `S^T = K Q^T` and `O^T += K_c^T P^T`: tensor
cores need 64 matrix rows, which keys always fill, but 16 or 20 heads do not.

The keys that a program reads follow from shapes and from its own row's length. So the grid can be captured, lengths may
change at replay, and a row's bits do not depend on the other rows.

`decode_triton_invariant` attends to the splits of `fixed_splits.py`. The tile does not depend on `q_len`, and one
compiled kernel serves all calls: no size that changes from call to call is a constant of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.latents import FP8
from mla_compile.ops.attention.kernels.fixed_splits import (
    decode_by_fixed_splits,
    first_key_of,
    splits_of,
    visible,
    with_unit_strides,
)
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
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.attention.tiles import (
    MIN_KEYS,
    SPLIT_BLOCK,
    SPLIT_UNIT,
    AttentionTiles,
    decode_tiles,
    num_fixed_splits,
    num_splits,
)
from mla_compile.ops.device import device_of


@triton.jit
def _pages(table, key, stop, PAGE_SIZE: tl.constexpr):
    """Page of each key, int64; 0 from `stop` on, where table entries are not read."""
    return tl.load(table + key // PAGE_SIZE, mask=key < stop, other=0).to(tl.int64)


@triton.jit
def _attend_split(
    q,
    qp,
    kv_cache,
    table,  # the row's
    start,
    stop,
    bounds,
    scale,
    out,
    lse,
    first_target,  # int64: the index of the row's first result
    r,  # [BLOCK_R]: the program's queries, within their row
    inside,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of a program's queries over the keys from `start` to `stop` of their row."""
    top = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([padded(RANK), BLOCK_R], tl.float32)
    key = start + tl.arange(0, BLOCK_N)
    page = _pages(table, key, stop, PAGE_SIZE)
    for first in range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        latent = kv_cache + (page * PAGE_SIZE + key % PAGE_SIZE)[:, None] * WIDTH
        # One tile ahead, so that the next iteration knows the latents' addresses.
        page = _pages(table, key + BLOCK_N, stop, PAGE_SIZE)
        top, total, acc = attend_latents(
            q, qp, latent, key < stop, key, bounds, scale, top, total, acc,
            RANK, ROPE,
        )  # fmt: skip
    store_split(out + first_target * RANK, lse + first_target, r, inside, inside, top, total, acc, RANK)


_VARYING = ("block_table", "seq_lens", "q_lens", "lse", "has_q_lens", "q_len", "columns", "table_stride")
"""The arguments that change from call to call: compiled code is not specialised on them."""


@triton.jit(do_not_specialize=_VARYING)
def split_kernel(
    q_latent,  # [rows * q_len, HEADS, RANK], any strides but the last
    q_pe,  # [rows * q_len, HEADS, ROPE], any strides but the last
    kv_cache,  # [pages, PAGE_SIZE, WIDTH], floats or FP8 latents
    block_table,  # int32 [rows, columns]
    seq_lens,  # int32 [rows]
    q_lens,  # int32 [rows], unread unless has_q_lens
    out,  # [splits, rows * q_len * HEADS, RANK], contiguous
    lse,  # float32 [splits, rows * q_len * HEADS]
    softmax_scale,
    has_q_lens,
    q_len,
    columns,
    q_strides,  # of tokens and heads
    pe_strides,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,  # of fixed splits, several per program; 0: each program has a share of its row
):
    """Attention of one block of queries over splits of a row's keys; grid `[rows * row blocks, programs]`."""
    R = q_len * HEADS
    r_blocks = tl.cdiv(R, BLOCK_R)
    row = tl.program_id(0) // r_blocks
    r = (tl.program_id(0) % r_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    program = tl.program_id(1)
    programs = tl.num_programs(1)

    token = r // HEADS
    bounds, keys = visible(seq_lens, q_lens, has_q_lens, row, token, q_len, columns * PAGE_SIZE)
    bounds = tl.where(r < R, bounds, 0)  # 0 for queries that only fill the block
    num_queries = (tl.num_programs(0) // r_blocks).to(tl.int64) * R  # of all rows
    if SPLIT_UNIT > 0:
        start, stop = first_key_of(program, SPLIT_UNIT), keys
        idle = start >= stop
    else:
        start, stop = split_of(keys, program, programs, BLOCK_N, MIN_KEYS)
        # The sum skips an empty split, so its `out` may stay unwritten.
        idle = (start >= stop) & (programs > 1)
        nothing = tl.full([BLOCK_R], -float("inf"), tl.float32)
        tl.store(lse + program * num_queries + row * R + r, nothing, mask=(r < R) & idle)
    if idle:
        return

    query_token = (row * q_len + token).to(tl.int64)
    q_at = q_latent + (query_token * q_strides[0] + (r % HEADS) * q_strides[1])
    pe_at = q_pe + (query_token * pe_strides[0] + (r % HEADS) * pe_strides[1])
    q, qp = load_queries(q_at, pe_at, r < R, RANK, ROPE)

    scale = softmax_scale * LOG2_E
    table = block_table + row.to(tl.int64) * table_stride
    if SPLIT_UNIT > 0:
        for split in range(program, splits_of(keys, SPLIT_UNIT), programs):
            start = first_key_of(split, SPLIT_UNIT)
            stop = tl.minimum(keys, first_key_of(split + 1, SPLIT_UNIT))
            _attend_split(
                q, qp, kv_cache, table, start, stop, bounds, scale, out, lse, split * num_queries + row * R, r, r < R,
                RANK, ROPE, WIDTH, PAGE_SIZE, BLOCK_R, BLOCK_N,
            )  # fmt: skip
    else:
        _attend_split(
            q, qp, kv_cache, table, start, stop, bounds, scale, out, lse, program * num_queries + row * R, r, r < R,
            RANK, ROPE, WIDTH, PAGE_SIZE, BLOCK_R, BLOCK_N,
        )  # fmt: skip


def _launch(
    operands: DecodeOperands,
    part_out: Tensor,
    part_lse: Tensor,
    *,
    tiles: AttentionTiles,
    programs: int,
    min_keys: int = MIN_KEYS,
    split_unit: int = 0,
) -> None:
    """Launch `split_kernel` with `programs` programs for each block of queries."""
    q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale = operands
    (_, heads, rank), (rows, columns), rope = q_latent.shape, block_table.shape, q_pe.shape[2]
    split_kernel[(rows * triton.cdiv(q_len * heads, tiles.queries), programs)](
        q_latent,
        q_pe,
        kv_cache,
        block_table,
        seq_lens,
        seq_lens if q_lens is None else q_lens,
        part_out,
        part_lse,
        softmax_scale,
        int(q_lens is not None),
        q_len,
        columns,
        q_latent.stride()[:2],
        q_pe.stride()[:2],
        block_table.stride(0),
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        WIDTH=kv_cache.shape[2],
        PAGE_SIZE=kv_cache.shape[1],
        BLOCK_R=tiles.queries,
        BLOCK_N=tiles.keys,
        MIN_KEYS=min_keys,
        SPLIT_UNIT=split_unit,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def decode_triton(
    operands: DecodeOperands,
    *,
    tiles: AttentionTiles | None = None,
    splits: int | None = None,
    min_keys: int = MIN_KEYS,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` on the GPU or in Triton's interpreter.

    `tiles`, `splits` and `min_keys` are chosen by `tiles.py` unless given. Nothing is read on the host.
    """
    operands = with_unit_strides(operands)
    q_latent, q_len = operands.q_latent, operands.q_len
    tokens, heads, rank = q_latent.shape
    rows, columns = operands.block_table.shape
    device = device_of(q_latent)
    fp8 = operands.kv_cache.dtype == FP8
    tiles = tiles or decode_tiles(q_len * heads, rank, q_latent.dtype, device, fp8=fp8)
    blocks = rows * triton.cdiv(q_len * heads, tiles.queries)
    splits = splits or num_splits(blocks, columns * operands.kv_cache.shape[1], device)

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((tokens, heads), dtype=torch.float32)
    part_out, part_lse = split_results(out, lse, splits)
    _launch(operands, part_out, part_lse, tiles=tiles, programs=splits, min_keys=min_keys)
    if splits > 1:
        combine(part_out, part_lse, out, lse)
    return out, lse


def decode_triton_invariant(
    operands: DecodeOperands,
    *,
    tiles: AttentionTiles | None = None,
    programs: int | None = None,
    split_unit: int = SPLIT_UNIT,
    split_block: int = SPLIT_BLOCK,
    at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Batch-invariant `decode_triton`: a token's bits depend on its own query and keys only.

    programs: for each block of queries, chosen by `tiles.py` unless given; it changes no bit. `tiles` do. For the
    other arguments see `decode_by_fixed_splits`.
    """
    heads, rank = operands.q_latent.shape[1:]
    max_keys = operands.block_table.shape[1] * operands.kv_cache.shape[1]
    device = device_of(operands.q_latent)
    fp8 = operands.kv_cache.dtype == FP8
    tiles = tiles or decode_tiles(heads, rank, operands.q_latent.dtype, device, fp8=fp8)

    def launch(part: DecodeOperands, part_out: Tensor, part_lse: Tensor) -> None:
        blocks = part.seq_lens.shape[0] * triton.cdiv(part.q_len * heads, tiles.queries)
        splits = num_fixed_splits(max_keys, split_unit)
        _launch(
            part,
            part_out,
            part_lse,
            tiles=tiles,
            programs=programs or min(splits, num_splits(blocks, max_keys, device)),
            split_unit=split_unit,
        )

    return decode_by_fixed_splits(
        launch,
        operands._replace(q_latent=_aligned(operands.q_latent), q_pe=_aligned(operands.q_pe)),
        split_unit=split_unit,
        split_block=split_block,
        at_once=at_once,
    )


def _aligned(x: Tensor) -> Tensor:
    """Queries at multiples of 16 elements, copied if necessary, so that one compiled kernel serves all calls."""
    steps = x.data_ptr() // x.element_size(), *x.stride()[:2]
    aligned = x.stride(-1) == 1 and not any(step % 16 for step in steps)
    return x if aligned else x.clone(memory_format=torch.contiguous_format)
