"""Sums along the last dimension whose bits depend on nothing but the row: `batch_invariant_sum` and an RMSNorm.

Inductor adds a row up in an order that follows from what it has fused with the sum and from how many rows it expects,
so that one token gets other bits in another graph. `make_batch_invariant` puts these in place.
"""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.implementations import FLOATS, SOME, Implementation, Taken, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import accumulate_dtype
from mla_compile.torch_internals import statically_known_true

_TAKES: dict[str, Taken] = {"dtype": FLOATS, "rows": SOME, "columns": SOME}


def _by_halves(function: str) -> Implementation:
    return Implementation(
        "by_halves", "plain torch, any device: elementwise sums of halves", function, batch_invariant=True
    )


ROW_SUM = (
    triton(
        "a program for each row",
        "mla_compile.ops.kernels.row_sums:sum_triton",
        takes=_TAKES,
        batch_invariant=True,
    ),
    _by_halves("mla_compile.ops.row_sums:sum_by_halves"),
)
RMS_NORM = (
    triton(
        "a program for each row",
        "mla_compile.ops.kernels.row_sums:rms_norm_triton",
        takes=_TAKES,
        batch_invariant=True,
    ),
    _by_halves("mla_compile.ops.row_sums:rms_norm_by_halves"),
)


def _facts(x: Tensor) -> dict[str, object]:
    return {"dtype": x.dtype, "rows": x.shape[0], "columns": x.shape[1]}


@define_op(table=ROW_SUM, facts=_facts)
def batch_invariant_sum(x: Tensor) -> Tensor:
    """The sum of each row of `x` `[rows, columns]`, float: `[rows]`, in float32, of float64 in float64.

    Raises:
        MLAError: x has another number of dimensions or is not float.
    """
    validate.Layouts().floats(x=(x, "rows, columns"))
    return empty(x, x.shape[:1], accumulate_dtype(x.dtype))


@define_op(table=RMS_NORM, facts=_facts)
def batch_invariant_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`weight * (x / sqrt(mean(x ** 2) + eps))` of each row of `x` `[rows, columns]`, in the dtype of `x`.

    Computed in float32 at least, and rounded before the weight `[columns]` multiplies, as DeepSeek's models do. None
    for no weight.

    Raises:
        MLAError: x or weight is not so, named.
    """
    validate.Layouts().floats(x=(x, "rows, columns"))
    if weight is not None:
        if weight.dim() != 1 or statically_known_true(weight.shape[0] != x.shape[1]):
            raise MLAError("weight", f"[{x.shape[1]}]", list(weight.shape))
        if weight.dtype != x.dtype:
            raise MLAError("weight", f"the dtype of x, {x.dtype}", weight.dtype)
    return empty(x, x.shape)


row_sum_op = torch.ops.mla_compile.batch_invariant_sum.default
rms_norm_op = torch.ops.mla_compile.batch_invariant_rms_norm.default


def sum_by_halves(x: Tensor) -> Tensor:
    """`batch_invariant_sum` in plain torch: elementwise sums alone, whose bits know no neighbours."""
    columns = x.shape[1]
    x = x.to(accumulate_dtype(x.dtype))
    width = 1 << max(0, columns - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, width - columns))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]


def rms_norm_by_halves(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`batch_invariant_rms_norm` in plain torch."""
    wide = x.to(accumulate_dtype(x.dtype))
    mean = sum_by_halves(wide * wide) / max(1, x.shape[1])
    normed = (wide * torch.rsqrt(mean + eps)[:, None]).to(x.dtype)
    return normed if weight is None else weight * normed
