"""Reductions along the last dimension: `batch_invariant_sum` and `row_argmax`.

The bits of the sum depend on nothing but the row. Inductor adds a row up in an order that follows from what it has
fused with the sum and from how many rows it expects, so that one token gets other bits in another graph.
`make_batch_invariant` puts this op in place.

`row_argmax` is `argmax` of few long rows, such as the logits of a decode step. Inductor makes that one program a row. A
GPU reads 154,880 logits so in 27 us (H200), in each step once, and once more for each drafted token.
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
        "a program for each row",
        "mla_compile.ops.reductions.kernels.row_sums:sum_triton",
        constraints={"dtype": FLOATS, "rows": SOME, "columns": SOME},
        batch_invariant=True,
    ),
    by_token("mla_compile.ops.reductions.last_dim:sum_torch", "by_halves"),
)


@define_op(table=ROW_SUM, layouts={"x": "rows, columns"})
def batch_invariant_sum(x: Tensor) -> Tensor:
    """The sum of each row of `x` `[rows, columns]`, float: `[rows]`, in float32, of float64 in float64."""
    return empty(x, x.shape[:1], accumulate_dtype(x.dtype))


row_sum_op = torch.ops.mla_compile.batch_invariant_sum.default


def sum_torch(x: Tensor) -> Tensor:
    """`batch_invariant_sum` in plain torch."""
    return sum_by_row(x)


ROW_ARGMAX = (
    triton(
        "a program for each part of a row, then one for each row",
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
    """`x.argmax(dim=-1)`: the column of the largest number of each row, int64 `[rows]`.

    Of equal ones it is the first; -0 equals 0. NaN is larger than any number.

    Args:
        x: `[rows, columns]`, float; rows may lie apart.
    """
    if statically_known_true(x.shape[1] < 1):
        raise MLAError("x", "at least one column", list(x.shape))
    return empty(x, x.shape[:1], torch.int64)


row_argmax_op = torch.ops.mla_compile.row_argmax.default


def argmax_torch(x: Tensor) -> Tensor:
    """`row_argmax` in plain torch: every device and dtype."""
    return x.argmax(dim=-1)
