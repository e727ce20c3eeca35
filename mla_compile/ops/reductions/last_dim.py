"""Reductions along the last dimension: `batch_invariant_sum` and `row_argmax`.

The bits of `batch_invariant_sum` of a matrix row depend on that matrix row only. Inductor's order of addition depends
on the operations that it fuses with the sum and on the number of matrix rows that it expects, so a token gets different
bits in different graphs. The pass `make_batch_invariant` replaces its sums by this op.

`row_argmax` is `argmax` of few long matrix rows, such as the logits of a decode step. Inductor runs one program per
matrix row, which takes 27 us for 154,880 logits (H200), once per step and once more per drafted token.
"""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.batch_invariant import sum_by_row
from mla_compile.ops.dispatch import FLOATS, SOME, UNIT, by_token, reference, triton
from mla_compile.ops.dtypes import accumulate_dtype
from mla_compile.ops.library import define_op, empty
from mla_compile.torch_internals import statically_known_true

ROW_SUM = (
    triton(
        "one program per matrix row",
        "mla_compile.ops.reductions.kernels.row_sums:sum_triton",
        constraints={"dtype": FLOATS, "rows": SOME, "columns": SOME},
        batch_invariant=True,
    ),
    by_token("mla_compile.ops.reductions.last_dim:sum_torch", "by_halves"),
)


@define_op(table=ROW_SUM, layouts={"x": "rows, columns"})
def batch_invariant_sum(x: Tensor) -> Tensor:
    """`x.sum(dim=-1)` of float `x` `[rows, columns]`, in float32, or in float64 for float64: `[rows]`."""
    return empty(x, x.shape[:1], accumulate_dtype(x.dtype))


row_sum_op = torch.ops.mla_compile.batch_invariant_sum.default


def sum_torch(x: Tensor) -> Tensor:
    """`batch_invariant_sum` in plain torch."""
    return sum_by_row(x)


ROW_ARGMAX = (
    triton(
        "one program per split of a matrix row, then one per matrix row",
        "mla_compile.ops.reductions.kernels.row_argmax:argmax_triton",
        constraints={"dtype": FLOATS, "rows": SOME, "columns": range(1, 2**30), "x.stride(1)": UNIT},
    ),
    reference("mla_compile.ops.reductions.last_dim:argmax_torch"),
)


@define_op(
    table=ROW_ARGMAX,
    layouts={"x": "rows, columns"},
)
def row_argmax(x: Tensor) -> Tensor:
    """`x.argmax(dim=-1)`, int64 `[rows]`.

    The first of equal maxima wins; -0 equals 0. NaN is larger than any number.

    Args:
        x: `[rows, columns]`, float; any stride between matrix rows.
    """
    if statically_known_true(x.shape[1] < 1):
        raise MLAError("x", "at least one column", list(x.shape))
    return empty(x, x.shape[:1], torch.int64)


row_argmax_op = torch.ops.mla_compile.row_argmax.default


def argmax_torch(x: Tensor) -> Tensor:
    """`row_argmax` in plain torch: every device and dtype."""
    return x.argmax(dim=-1)
