"""`norm_linear`: an RMSNorm, with or without the addition of a residual, fused into the only matmul that reads it.

For one or two tokens it is one launch: each program of the matmul norms the tokens itself. Only the pass
`fuse_norm_linear` inserts it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mla_compile.ops.adjacent import num_columns
from mla_compile.ops.dispatch import FLOAT8, FLOATS, HALF, SOME, UNIT, triton, unfused
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.fp8_linear import check_fp8_linear, fp8_linear_op
from mla_compile.ops.linear.matmul import LINEAR, fused_linear_op, is_one_matrix, probe_weights
from mla_compile.ops.linear.operands import NormLinearOperands
from mla_compile.ops.norm.rms_norm import add_rms_norm_op, rms_norm_op
from mla_compile.ops.validate import Layouts

MAX_TOKENS = 2
"""Most tokens that the Triton candidates take."""

_GEMV = triton(
    "few tokens: a program norms the tokens and computes a few output columns",
    "mla_compile.ops.linear.kernels.linear:norm_linear_gemv",
    name="gemv",
    constraints={
        "weights": ("one matrix",),
        "dtype": HALF,
        "tokens": range(1, MAX_TOKENS + 1),
        "k": SOME,
        "columns": range(1, 2**13 + 1),  # with more, too many programs repeat the norm
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

    Whether the norm is rounded before the matmul depends on the candidate.

    Args:
        x, residual, norm_weight, eps: arguments of the norm; residual may be None.
        first, first_scale, second, second_scale: weights; without scales they have the dtype of `x`.
        fp8_activations: of `fp8_linear`.
        batch_invariant: whether a token's bits must depend on its own `x` and `residual` and the weights only.

    Returns:
        product: `[tokens, n_first + n_second]`, contiguous.
        total: `x + residual`, rounded to their dtype; `[0, k]` without a residual.
    """
    x, residual, _, _, first, first_scale, second, second_scale, _ = operands
    if first_scale is None:
        Layouts().tensors(LINEAR, operands._asdict())
        if batch_invariant:
            probe_weights(x, first, second)
    else:
        check_fp8_linear(x, first, first_scale, second, second_scale)
    tokens, k = x.shape
    total = empty(x, (0 if residual is None else tokens, k))
    return empty(x, (tokens, num_columns(first, second))), total


norm_linear_op = torch.ops.mla_compile.norm_linear.default


def norm_then_product(operands: NormLinearOperands, batch_invariant: bool) -> tuple[Tensor, Tensor]:
    """`norm_linear` as a norm op followed by a linear op."""
    x, residual, norm_weight, eps, first, first_scale, second, second_scale, fp8_activations = operands
    if residual is None:
        normed, total = rms_norm_op(x, norm_weight, eps), x.new_empty(0, x.shape[1])
    else:
        normed, total = add_rms_norm_op(x, residual, norm_weight, eps)
    if first_scale is None:
        return fused_linear_op(normed, first, second, batch_invariant), total
    flags = fp8_activations, batch_invariant
    return fp8_linear_op(normed, first, first_scale, second, second_scale, *flags), total
