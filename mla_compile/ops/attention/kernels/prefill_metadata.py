"""Slots and positions of prompt chunks and of their keys, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.attention.kernels.chunks import rows_block

_MAX_AT_ONCE = 8192
"""The most comparisons of a program, places times rows."""


@triton.jit(do_not_specialize=["rows", "tokens", "keys", "parts"])
def prefill_metadata_kernel(
    lens,  # int64 [rows, 2], contiguous
    bounds,  # int64 [rows, 2 * parts], contiguous
    block_table,  # int32 [rows, columns], contiguous
    cu_seqlens_q,  # int32 [rows + 1]
    seq_lens,  # int32 [rows]
    slot_mapping,  # int64 [tokens]
    positions,  # int64 [tokens]
    key_slots,  # int64 [parts, keys]
    cu_seqlens_k,  # int32 [parts, rows + 1]
    rows,
    columns,
    tokens,
    keys,
    parts,
    PAGE_SIZE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid `[blocks of places, 1 + parts]`: the places are tokens first, then the keys of each part."""
    part = tl.program_id(1) - 1
    r = tl.arange(0, ROWS_BLOCK)
    is_row = r < rows
    q_lens = tl.load(lens + 2 * r, mask=is_row, other=0).to(tl.int32)
    ends = tl.load(lens + 2 * r + 1, mask=is_row, other=0).to(tl.int32)
    first, count, places, sums = ends - q_lens, q_lens, tokens, cu_seqlens_q
    if part >= 0:
        at = bounds + 2 * (r * parts + part)
        first = tl.load(at, mask=is_row, other=0).to(tl.int32)
        count = tl.load(at + 1, mask=is_row, other=0).to(tl.int32) - first
        places, sums = keys, cu_seqlens_k + part * (rows + 1)
    behind = tl.cumsum(count, 0)

    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.sum((behind[None, :] <= place[:, None]).to(tl.int32), 1)
    inside = row < rows
    shift = tl.sum(tl.where(r[None, :] == row[:, None], (first - behind + count)[None, :], 0), 1)
    position = (place + shift).to(tl.int64)
    # A padding row has no keys.
    owned = inside & (tl.load(bounds + 2 * (row + 1) * parts - 1, mask=inside, other=0) > 0)
    page = position // PAGE_SIZE
    at = block_table + row.to(tl.int64) * columns + page
    number = tl.load(at, mask=owned & (page < columns), other=-1).to(tl.int64)
    slot = tl.where(number >= 0, number * PAGE_SIZE + position % PAGE_SIZE, -1)
    mine = place < places
    if part < 0:
        tl.store(slot_mapping + place, slot, mask=mine)
        tl.store(positions + place, position, mask=mine)
    else:
        tl.store(key_slots + part.to(tl.int64) * keys + place, slot, mask=mine)
    if tl.program_id(0) == 0:
        tl.store(sums + r, behind - count, mask=is_row)
        tl.store(sums + rows, tl.sum(count, 0))
        if part < 0:
            tl.store(seq_lens + r, ends, mask=is_row)


def prefill_metadata_triton(
    lens: Tensor, bounds: Tensor, block_table: Tensor, tokens: int, keys: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`mla_prefill_metadata` on the GPU or in Triton's interpreter."""
    rows, parts = bounds.shape[0], bounds.shape[1] // 2
    cu_seqlens_q, seq_lens = block_table.new_empty(rows + 1), block_table.new_empty(rows)
    cu_seqlens_k = block_table.new_empty((parts, rows + 1))
    slot_mapping, positions = (lens.new_empty(tokens) for _ in range(2))
    key_slots = lens.new_empty((parts, keys))
    at_once = rows_block(rows)
    block = max(16, _MAX_AT_ONCE // at_once)
    prefill_metadata_kernel[(triton.cdiv(max(tokens, keys, 1), block), 1 + parts)](
        lens.contiguous(),
        bounds.contiguous(),
        block_table.contiguous(),
        cu_seqlens_q,
        seq_lens,
        slot_mapping,
        positions,
        key_slots,
        cu_seqlens_k,
        rows,
        block_table.shape[1],
        tokens,
        keys,
        parts,
        PAGE_SIZE=page_size,
        ROWS_BLOCK=at_once,
        BLOCK=block,
        num_warps=8,
    )
    return cu_seqlens_q, seq_lens, slot_mapping, positions, key_slots, cu_seqlens_k
