"""Argmax along the last dimension in two launches: over each part of a matrix row, then over the parts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.reductions.kernels.keys import column_of, join_keys, keys_of_parts


@triton.jit(do_not_specialize=["parts"])
def join_kernel(
    keys,  # int64 [rows, parts]
    columns,  # int64 [rows]
    parts,
):
    """The column in the largest key of each matrix row; grid `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(columns + row, column_of(join_keys(keys + row * parts, parts)))


def argmax_triton(x: Tensor) -> Tensor:
    """`row_argmax` on the GPU or in Triton's interpreter."""
    keys, _ = keys_of_parts(x)
    rows, parts = keys.shape
    out = x.new_empty(rows, dtype=torch.int64)
    join_kernel[(rows,)](keys, out, parts, num_warps=1)
    return out
