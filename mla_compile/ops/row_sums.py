"""Sums along the last dimension whose bits depend on nothing but the row: `batch_invariant_sum`.

Inductor adds a row up in an order that follows from what it has fused with the sum and from how many rows it expects,
so that one token gets other bits in another graph. `make_batch_invariant` puts this op in place.
"""

import torch
from torch import Tensor

from mla_compile.ops.by_row import sum_by_row
from mla_compile.ops.implementations import FLOATS, SOME, by_token, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import accumulate_dtype

ROW_SUM = (
    triton(
        "a program for each row",
        "mla_compile.ops.kernels.row_sums:sum_triton",
        takes={"dtype": FLOATS, "rows": SOME, "columns": SOME},
        batch_invariant=True,
    ),
    by_token("mla_compile.ops.row_sums:sum_torch", "by_halves"),
)


@define_op(table=ROW_SUM, layouts={"x": "rows, columns"})
def batch_invariant_sum(x: Tensor) -> Tensor:
    """The sum of each row of `x` `[rows, columns]`, float: `[rows]`, in float32, of float64 in float64.

    Raises:
        MLAError: x has another number of dimensions or is not float.
    """
    return empty(x, x.shape[:1], accumulate_dtype(x.dtype))


row_sum_op = torch.ops.mla_compile.batch_invariant_sum.default


def sum_torch(x: Tensor) -> Tensor:
    """`batch_invariant_sum` in plain torch."""
    return sum_by_row(x)
