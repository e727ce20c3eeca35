"""RMSNorm in one launch, alone or fused with the operations before it.

`fused_add_rms_norm` adds a residual first; `all_reduce_add_rms_norm` also sums over the ranks of a model before that.
A token's bits depend on that token only. The passes `fuse_rms_norm` and `fuse_all_reduce` insert these ops.
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
        "one program per token",
        "mla_compile.ops.norm.kernels.rms_norm:rms_norm_triton",
        constraints={"dtype": FLOATS, "tokens": SOME, "columns": range(1, 2**14 + 1)},
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
        "one program per token, which reads the memory of all GPUs",
        "mla_compile.ops.collectives.kernels.collectives:all_reduce_add_rms_norm_triton",
        constraints=SMALL | {"columns": range(1, SLOT_COLUMNS + 1)},
    ),
    # Batch-invariant calls use two ops for any number of tokens: the kernel takes only few, and its threads may add in
    # another order.
    unfused("mla_compile.ops.norm.rms_norm:all_reduce_then_norm"),
)

_ADD_NORM = {"x": "tokens, columns", "residual": "tokens, columns", "weight": "columns or None"}


@define_op(table=RMS_NORM, layouts={"x": "tokens, columns", "weight": "columns or None"})
def fused_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`weight * (x / sqrt(mean(x ** 2) + eps))` over the last dimension (arXiv 1910.07467), in the dtype of `x`.

    Computed in float32 at least, and rounded before the multiplication by the weight, as in DeepSeek's models.

    Args:
        x: `[tokens, columns]`, float; any stride between tokens.
        weight: `[columns]`, or None for no weight.
    """
    return empty(x, x.shape)


@define_op(table=ADD_RMS_NORM, layouts=_ADD_NORM, returns=("normed", "total"))
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`fused_rms_norm` of `x + residual`, rounded to their dtype, and that sum."""
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
    """`fused_add_rms_norm` of `all_reduce(x)`, rounded to the dtype of `x`. batch_invariant: see `all_reduce`."""
    return empty(x, x.shape), empty(x, x.shape)


rms_norm_op = torch.ops.mla_compile.fused_rms_norm.default
add_rms_norm_op = torch.ops.mla_compile.fused_add_rms_norm.default
all_reduce_add_rms_norm_op = torch.ops.mla_compile.all_reduce_add_rms_norm.default


def rms_norm_torch(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`fused_rms_norm` in plain torch."""
    wide = x.contiguous().to(accumulate_dtype(x.dtype))  # contiguous, so results are too
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
    """`all_reduce_add_rms_norm` as two ops."""
    reduced = torch.ops.mla_compile.all_reduce.default(x, batch_invariant)
    normed, total = add_rms_norm_op(reduced, residual, weight, eps)
    return normed, total
