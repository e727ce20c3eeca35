"""`fp8_linear`: a matmul by block-FP8 weights, which stay FP8 in memory."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.adjacent import num_columns
from mla_compile.ops.batch_invariant import product_by_row
from mla_compile.ops.dispatch import (
    FLOAT8,
    FLOATS,
    HALF,
    SOME,
    UNIT,
    Candidate,
    at_least,
    by_token,
    reference,
    triton,
)
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.operands import FP8LinearOperands
from mla_compile.ops.linear.tiles import MAX_SHARING

MIN_QUANTISED = 129
"""Fewest tokens that `fp8_activations` quantises. Fewer take no longer by weights that are converted in registers."""

_SIZES = {"k": SOME, "columns": SOME}
_IN_ORDER = triton(
    "FP8 values are multiplied block by block, in one order, and scaled afterwards",
    "mla_compile.ops.linear.kernels.fp8_linear:linear_in_order",
    name="blocks_in_order",
    constraints={"dtype": HALF, "tokens": SOME, **_SIZES},
    min_capability=FLOAT8,
    batch_invariant=True,
)
BY_FP8 = Candidate(
    "fp8_activations",
    "many tokens, which are quantised first: cuBLAS multiplies FP8 by FP8",
    "mla_compile.ops.linear.kernels.fp8_by_fp8:linear_fp8_activations",
    ("cuda",),
    min_capability=(9, 0),
    max_capability=(9, 0),
    packages=("triton",),
    constraints={
        "dtype": (torch.bfloat16,),
        "tokens": at_least(MIN_QUANTISED),
        "k": range(fp8.BLOCK, 2**31, fp8.BLOCK),
        "columns": range(16, 2**31, 16),
        "fp8_activations": (True,),
    },
)
# The limits on tokens are those up to which each candidate was the fastest on an H200. One candidate serves
# batch-invariant calls of all numbers of tokens.
FP8_LINEAR = (
    triton(
        "one token: a program computes a few output columns, on CUDA cores",
        "mla_compile.ops.linear.kernels.fp8_linear:linear_gemv",
        constraints={"dtype": FLOATS, "tokens": UNIT, **_SIZES},
        min_capability=FLOAT8,
    ),
    triton(
        "few tokens: FP8 values are multiplied block by block, and scaled afterwards",
        "mla_compile.ops.linear.kernels.fp8_linear:linear_blocks",
        name="blocks",
        constraints={"dtype": HALF, "tokens": range(2, MAX_SHARING + 1), **_SIZES},
        min_capability=FLOAT8,
    ),
    BY_FP8,
    triton(
        "many tokens: the weight is dequantised first, and cuBLAS multiplies",
        "mla_compile.ops.linear.kernels.fp8_linear:linear_dequantized",
        name="dequantized",
        constraints={"dtype": HALF, "tokens": at_least(129), **_SIZES},
        min_capability=FLOAT8,
    ),
    # Also serves 33 to 128 tokens by default. Newer GPUs may add in another order for few tokens.
    replace(_IN_ORDER, max_capability=(9, 0)),
    replace(
        _IN_ORDER,
        name="dequantized_in_order",
        description="the weight is dequantised first, and multiplied in one order",
        function="mla_compile.ops.linear.kernels.matmul:linear_fp8_in_order",
        constraints={**_IN_ORDER.constraints, "dtype": FLOATS},
    ),
    reference("mla_compile.ops.linear.fp8_linear:linear_torch"),
    by_token("mla_compile.ops.linear.fp8_linear:linear_by_row", "by_row"),
)


@define_op(
    table=FP8_LINEAR,
    operands=FP8LinearOperands,
    layouts={"x": "tokens, k"},
    facts=lambda first, second, fp8_activations=False: {
        "columns": num_columns(first, second),
        "fp8_activations": fp8_activations,
    },
)
def fp8_linear(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    fp8_activations: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """`x @ w.T`, w being the dequantised weight (`ops/linear/fp8.py`), or `[x @ first.T | x @ second.T]`.

    Products are added in float32 at least.

    Args:
        x: `[tokens, k]`, float; any stride between tokens.
        first: float8_e4m3fn `[n_first, k]`, contiguous; `first_scale`: float32 `[ceil(n_first / 128), ceil(k / 128)]`,
            one scale per block of 128 x 128.
        second, second_scale: the same for a second weight, whose columns follow; both or none.
        fp8_activations: whether many tokens may be quantised to FP8, each with a scale for 128 columns; else `x` keeps
            its dtype.
        batch_invariant: whether a token's bits must depend on that token and the weights only.

    Returns:
        `[tokens, n_first + n_second]`, contiguous, in the dtype of `x`.
    """
    sizes = validate.Layouts()
    sizes.check("x", x, "tokens, k")  # the op's layouts have checked its dtype
    sizes.check("first", first, "n_first, k", like=x)
    fp8.check("first", first, "first_scale", first_scale)
    if second is not None:
        sizes.check("second", second, "n_second, k", like=x)
        fp8.check("second", second, "second_scale", second_scale)
    return empty(x, (x.shape[0], num_columns(first, second)))


fp8_linear_op = torch.ops.mla_compile.fp8_linear.default


def linear_torch(operands: FP8LinearOperands) -> Tensor:
    """`fp8_linear` in plain torch: every device and dtype."""

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, fp8.dequantize(weight, scale).to(x.dtype))

    return fp8.each_matrix(product, operands)


def linear_by_row(operands: FP8LinearOperands) -> Tensor:
    """`fp8_linear` with one matmul per token and weight."""
    x, first, first_scale, second, second_scale, _ = operands

    def product(weight: Tensor, scale: Tensor) -> Tensor:
        columns = fp8.dequantize(weight, scale).to(x.dtype).t().unsqueeze(0)
        return product_by_row(x.unsqueeze(1), columns).squeeze(1)

    if second is None or second_scale is None:
        return product(first, first_scale)
    return torch.cat([product(first, first_scale), product(second, second_scale)], dim=1)
