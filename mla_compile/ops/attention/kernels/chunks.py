"""Ragged prompt chunks: the queries of a prefill kernel's program, computed on the device."""

import triton
import triton.language as tl

from mla_compile.ops.device import power_of_two


def rows_block(rows: int) -> int:
    """The rows that a program looks through, a power of two above `rows`.

    It is the same for up to 127 rows, so that a step with more prompts than any before compiles no kernel.
    """
    return power_of_two(max(rows, 127) + 1)


@triton.jit
def block_of(
    cu_seqlens_q,  # int32 [rows + 1]
    rows,
    block,
    QUERIES: tl.constexpr,  # of a token: its heads, or 1 if a program has one head
    ROWS_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The row of a block of BLOCK_M queries, `rows` or more for a surplus block, and its first query in that row's
    chunk. Blocks do not span chunks."""
    r = tl.arange(0, ROWS_BLOCK)
    q_lens = tl.load(cu_seqlens_q + 1 + r, mask=r < rows, other=0) - tl.load(
        cu_seqlens_q + r, mask=r < rows, other=0
    )
    blocks = tl.where(r < rows, (q_lens * QUERIES + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(blocks, 0)
    row = tl.sum((ends <= block).to(tl.int32), 0)
    # The last block of a chunk has the most keys, so it starts first.
    return row, (tl.sum(tl.where(r == row, ends, 0), 0) - 1 - block) * BLOCK_M
