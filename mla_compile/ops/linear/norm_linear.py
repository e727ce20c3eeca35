"""`norm_linear`: an RMSNorm, with what is added before it, and the product that alone reads it.

For one or two tokens that is one launch: each program of the product norms the tokens by itself. No model calls it: the
pass `fuse_norm_linear` puts it in.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mla_compile.ops.adjacent import num_columns
from mla_compile.ops.dispatch import FLOAT8, FLOATS, HALF, SOME, UNIT, triton, unfused
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.fp8_linear import check_fp8_linear, fp8_linear_op
from mla_compile.ops.linear.matmul import check_linear, fused_linear_op, is_one_matrix
from mla_compile.ops.linear.operands import NormLinearOperands
from mla_compile.ops.norm.rms_norm import add_rms_norm_op, rms_norm_op

MOST_TOKENS = 2
"""For which the op has a kernel."""

_GEMV = triton(
    "few tokens: a program reads a few rows of the weight, and norms the tokens by itself",
    "mla_compile.ops.linear.kernels.linear:norm_linear_gemv",
    name="gemv",
    constraints={
        "weights": ("one matrix",),
        "dtype": HALF,
        "tokens": range(1, MOST_TOKENS + 1),
        "k": SOME,
        "columns": range(1, 2**13 + 1),  # more are programs enough that norms add up
    },
)
NORM_LINEAR = (
    _GEMV,
    replace(
        _GEMV,
        name="fp8_gemv",
        constraints={**_GEMV.constraints, "weights": ("one FP8 matrix",), "dtype": FLOATS, "tokens": UNIT},
        min_capability=FLOAT8,
    ),
    unfused("mla_compile.ops.linear.norm_linear:norm_then_product"),
)


def _weights(
    first: Tensor, first_scale: Tensor | None, second: Tensor | None, second_scale: Tensor | None
) -> str:
    if first_scale is None:
        return "one matrix" if is_one_matrix(first, second) else "two"
    if second is None or second_scale is None:
        return "one FP8 matrix"
    return "one FP8 matrix" if fp8.is_one_matrix(first, first_scale, second, second_scale) else "two"


@define_op(
    table=NORM_LINEAR,
    layouts={"x": "tokens, k", "residual": "tokens, k or None", "norm_weight": "k or None"},
    facts=lambda first, first_scale, second, second_scale: {
        "weights": _weights(first, first_scale, second, second_scale),
        "columns": num_columns(first, second),
    },
    returns=("product", "total"),
)
def norm_linear(operands: NormLinearOperands, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
    """`fused_linear` or `fp8_linear` of `fused_rms_norm(x)`, or of `fused_add_rms_norm(x, residual)`.

    The norm may be rounded in between, or not.

    Args:
        x, residual, norm_weight, eps: of the norm; no residual: nothing is added.
        first, first_scale, second, second_scale: weights; without scales they have the dtype of `x`.
        batch_invariant: whether a token's bits may depend on its row of `x` and `residual` and the weights alone.

    Returns:
        product: `[tokens, n_first + n_second]`, contiguous.
        total: `x + residual`, rounded to their dtype; `[0, k]` without a residual.
    """
    x, residual, _, _, first, first_scale, second, second_scale = operands
    if first_scale is None:
        check_linear(x, first, second, batch_invariant)
    else:
        check_fp8_linear(x, first, first_scale, second, second_scale)
    tokens, k = x.shape
    total = empty(x, (0 if residual is None else tokens, k))
    return empty(x, (tokens, num_columns(first, second))), total


norm_linear_op = torch.ops.mla_compile.norm_linear.default


def norm_then_product(operands: NormLinearOperands, batch_invariant: bool) -> tuple[Tensor, Tensor]:
    """`norm_linear`, one after the other."""
    x, residual, norm_weight, eps, first, first_scale, second, second_scale = operands
    if residual is None:
        normed, total = rms_norm_op(x, norm_weight, eps), x.new_empty(0, x.shape[1])
    else:
        normed, total = add_rms_norm_op(x, residual, norm_weight, eps)
    if first_scale is None:
        return fused_linear_op(normed, first, second, batch_invariant), total
    return fp8_linear_op(normed, first, first_scale, second, second_scale, batch_invariant), total
