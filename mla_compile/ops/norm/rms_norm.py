"""`fused_rms_norm`, `fused_add_rms_norm`, `all_reduce_add_rms_norm`: an RMSNorm, and what comes before, in one launch.

That is the addition of a residual, and the sum over processes that share a model. A row's bits depend on nothing but
the row. No model calls them: the passes `fuse_rms_norm` and `fuse_all_reduce` put them in.
"""

from dataclasses import replace

import torch
from torch import Tensor

from mla_compile.ops.batch_invariant import sum_by_row
from mla_compile.ops.collectives.peers import SLOT_COLUMNS, SMALL, facts_of
from mla_compile.ops.dispatch import FLOATS, SOME, by_token, triton, unfused
from mla_compile.ops.dtypes import accumulate_dtype
from mla_compile.ops.library import define_op, empty

RMS_NORM = (
    triton(
        "a program for each row",
        "mla_compile.ops.norm.kernels.rms_norm:rms_norm_triton",
        constraints={"dtype": FLOATS, "rows": SOME, "columns": range(1, 2**14 + 1)},
        batch_invariant=True,
    ),
    by_token("mla_compile.ops.norm.rms_norm:rms_norm_torch", "by_halves"),
)
ADD_RMS_NORM = (
    replace(RMS_NORM[0], function="mla_compile.ops.norm.kernels.rms_norm:add_rms_norm_triton"),
    by_token("mla_compile.ops.norm.rms_norm:add_rms_norm_torch", "by_halves"),
)
ALL_REDUCE_ADD_RMS_NORM = (
    triton(
        "a program for each row, which reads its parts from the GPUs' memory",
        "mla_compile.ops.collectives.kernels.collectives:all_reduce_add_rms_norm_triton",
        constraints=SMALL | {"columns": range(1, SLOT_COLUMNS + 1)},
    ),
    # Asked for the same bits, not the kernel: which thread adds up what may be another in it, and many tokens are more
    # than it takes.
    unfused("mla_compile.ops.norm.rms_norm:all_reduce_then_norm"),
)

_ADD_NORM = {"x": "rows, columns", "residual": "rows, columns", "weight": "columns or None"}


@define_op(table=RMS_NORM, layouts={"x": "rows, columns", "weight": "columns or None"})
def fused_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`weight * (x / sqrt(mean(x ** 2) + eps))` of each row of `x` `[rows, columns]` (arXiv 1910.07467), in its dtype.

    Computed in float32 at least, and rounded before the weight `[columns]` multiplies, as DeepSeek's models do. None
    for no weight. Rows may lie apart.
    """
    return empty(x, x.shape)


@define_op(table=ADD_RMS_NORM, layouts=_ADD_NORM, returns=("normed", "total"))
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`fused_rms_norm` of the sum `x + residual`, which is rounded to their dtype, and that sum."""
    return empty(x, x.shape), empty(x, x.shape)


@define_op(
    table=ALL_REDUCE_ADD_RMS_NORM,
    layouts=_ADD_NORM,
    facts=lambda x: facts_of(x) | {"programs": x.shape[0]},
    returns=("normed", "total"),
)
def all_reduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """`fused_add_rms_norm` of the sum of all processes' `x` (`all_reduce`), which is rounded to its dtype.

    batch_invariant: as that of `all_reduce`.
    """
    return empty(x, x.shape), empty(x, x.shape)


rms_norm_op = torch.ops.mla_compile.fused_rms_norm.default
add_rms_norm_op = torch.ops.mla_compile.fused_add_rms_norm.default
all_reduce_add_rms_norm_op = torch.ops.mla_compile.all_reduce_add_rms_norm.default


def rms_norm_torch(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`fused_rms_norm` in plain torch."""
    wide = x.contiguous().to(accumulate_dtype(x.dtype))  # so what follows from it is contiguous too
    mean = sum_by_row(wide * wide) / max(1, x.shape[1])
    normed = (wide * torch.rsqrt(mean + eps)[:, None]).to(x.dtype)
    return normed if weight is None else weight * normed


def add_rms_norm_torch(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`fused_add_rms_norm` in plain torch."""
    total = (x + residual).contiguous()
    return rms_norm_torch(total, weight, eps), total


def all_reduce_then_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """`all_reduce_add_rms_norm`, one after the other."""
    reduced = torch.ops.mla_compile.all_reduce.default(x, batch_invariant)
    normed, total = add_rms_norm_op(reduced, residual, weight, eps)
    return normed, total
