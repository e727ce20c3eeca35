"""Lengths, slots and positions of decode rows in one launch, one row per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import power_of_two


@triton.jit
def decode_metadata_kernel(
    num_cached,  # int32 [rows]
    block_table,  # int32 [rows, columns], contiguous
    q_lens,  # int32 [rows], or None
    seq_lens,  # int32 [rows]
    valid,  # int32 [rows]
    slot_mapping,  # int64 [rows, q_len]
    positions,  # int64 [rows, q_len]
    columns,
    q_len,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row `program_id(0)` of every result of `mla_decode_metadata`; grid `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    cached = tl.load(num_cached + row)
    count = q_len if q_lens is None else tl.load(q_lens + row)
    end = cached + count
    tl.store(seq_lens + row, tl.where(count > 0, end, 0))
    tl.store(valid + row, count)

    token = tl.arange(0, BLOCK)
    mine = token < q_len
    position = cached.to(tl.int64) + token
    page = position // PAGE_SIZE  # rounds towards 0, but negative positions are not inside
    inside = mine & (position >= 0) & (page < columns) & (position < end)
    number = tl.load(block_table + row * columns + page, mask=inside, other=0).to(tl.int64)
    slot = tl.where(inside, number * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slot_mapping + row * q_len + token, slot, mask=mine)
    tl.store(positions + row * q_len + token, position, mask=mine)


def decode_metadata_triton(
    num_cached: Tensor, block_table: Tensor, q_lens: Tensor | None, q_len: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mla_decode_metadata` on the GPU or in Triton's interpreter."""
    rows = num_cached.shape[0]
    seq_lens, valid = (num_cached.new_empty(rows) for _ in range(2))
    slot_mapping, positions = (num_cached.new_empty(rows * q_len, dtype=torch.int64) for _ in range(2))
    decode_metadata_kernel[(rows,)](
        num_cached.contiguous(),
        block_table.contiguous(),
        None if q_lens is None else q_lens.contiguous(),
        seq_lens,
        valid,
        slot_mapping,
        positions,
        block_table.shape[1],
        q_len,
        PAGE_SIZE=page_size,
        BLOCK=power_of_two(q_len),
        num_warps=1,
    )
    return seq_lens, valid, slot_mapping, positions
