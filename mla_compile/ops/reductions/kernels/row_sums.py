"""Sums along the last dimension, with one program per matrix row, in one order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import aligned_rows, power_of_two, row_warps

_BLOCK = 2048
"""Columns per iteration."""


@triton.jit
def sum_kernel(x, out, stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """`out = x.sum(dim=-1)`; the strides of `x` are `(stride, 1)`. Grid `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


def sum_triton(x: Tensor) -> Tensor:
    """`batch_invariant_sum` on the GPU or in Triton's interpreter."""
    x, stride = aligned_rows(x)
    rows, columns = x.shape
    out = x.new_empty(rows, dtype=torch.float32)
    block = min(_BLOCK, power_of_two(columns))
    sum_kernel[(rows,)](x, out, stride, COLUMNS=columns, BLOCK=block, num_warps=row_warps(block))
    return out
