"""`norm_linear`: an RMSNorm, with or without the addition of a residual, fused into the only matmul that reads it.

For one or two tokens it is one launch: each program of the matmul norms the tokens itself. Only the pass
`fuse_norm_linear` inserts it.
"""

import torch
from torch import Tensor

from mla_compile.ops.adjacent import num_columns
from mla_compile.ops.dispatch import HALF, SOME, triton, unfused
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.linear.matmul import fused_linear_op, is_one_matrix, probe_weights
from mla_compile.ops.norm.rms_norm import add_rms_norm_op, rms_norm_op

MAX_TOKENS = 2
"""Most tokens that the Triton candidate takes."""

NORM_LINEAR = (
    triton(
        "few tokens: a program norms the tokens and computes a few output columns",
        "mla_compile.ops.linear.kernels.linear:norm_linear_gemv",
        constraints={
            "weights": ("one matrix",),
            "dtype": HALF,
            "tokens": range(1, MAX_TOKENS + 1),
            "k": SOME,
            "columns": range(1, 2**13 + 1),  # with more, too many programs repeat the norm
        },
    ),
    unfused("mla_compile.ops.linear.norm_linear:norm_then_product"),
)


@define_op(
    table=NORM_LINEAR,
    layouts={
        "x": "tokens, k",
        "residual": "tokens, k or None",
        "norm_weight": "k or None",
        "first": "n_first, k",
        "second": "n_second, k or None",
    },
    facts=lambda first, second: {
        "weights": "one matrix" if is_one_matrix(first, second) else "two",
        "columns": num_columns(first, second),
    },
    returns=("product", "total"),
)
def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    first: Tensor,
    second: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """`fused_linear` of `fused_rms_norm(x)`, or of `fused_add_rms_norm(x, residual)`.

    Whether the norm is rounded before the matmul depends on the candidate.

    Args:
        x, residual, norm_weight, eps: arguments of the norm; residual may be None.
        first, second: weights of `fused_linear`, in the dtype of `x`.
        batch_invariant: whether a token's bits must depend on its own `x` and `residual` and the weights only.

    Returns:
        product: `[tokens, n_first + n_second]`, contiguous.
        total: `x + residual`, rounded to their dtype; `[0, k]` without a residual.
    """
    if batch_invariant:
        probe_weights(x, first, second)
    tokens, k = x.shape
    total = empty(x, (0 if residual is None else tokens, k))
    return empty(x, (tokens, num_columns(first, second))), total


norm_linear_op = torch.ops.mla_compile.norm_linear.default


def norm_then_product(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    first: Tensor,
    second: Tensor | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` as a norm op followed by a linear op."""
    if residual is None:
        normed, total = rms_norm_op(x, norm_weight, eps), x.new_empty(0, x.shape[1])
    else:
        normed, total = add_rms_norm_op(x, residual, norm_weight, eps)
    return fused_linear_op(normed, first, second, batch_invariant), total
