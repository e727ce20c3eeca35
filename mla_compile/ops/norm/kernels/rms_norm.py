"""RMSNorm with one program per token, with or without the addition of a residual before."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.device import aligned_rows, power_of_two, row_warps


@triton.jit
def rms_norm_kernel(
    x,  # [tokens, COLUMNS], strides (x_stride, 1)
    residual,  # [tokens, COLUMNS], strides (residual_stride, 1); or None
    weight,  # [COLUMNS] or None
    normed,  # [tokens, COLUMNS], contiguous
    total,  # [tokens, COLUMNS], contiguous: x + residual; unwritten without a residual
    x_stride,
    residual_stride,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid `[tokens]`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    dtype = normed.dtype.element_ty
    wait_for_kernel_before(EARLY)
    factor = 1.0
    if weight is not None:  # loaded before the reduction
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(dtype)
        tl.store(total + row * COLUMNS + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / COLUMNS + eps)
    # Rounded before the weight multiplies, as in the models.
    out = (value * scale).to(dtype).to(tl.float32) * factor
    tl.store(normed + row * COLUMNS + column, out.to(dtype), mask=inside)


def rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`fused_rms_norm` on the GPU or in Triton's interpreter."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`fused_add_rms_norm` on the GPU or in Triton's interpreter."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The norm and `x + residual`; without a residual, both are the norm."""
    x, x_stride = aligned_rows(x)
    residual, residual_stride = (None, 0) if residual is None else aligned_rows(residual)
    tokens, columns = x.shape
    normed = x.new_empty(tokens, columns)
    total = normed if residual is None else torch.empty_like(normed)
    block = power_of_two(columns)
    rms_norm_kernel[(tokens,)](
        x,
        residual,
        None if weight is None else weight.contiguous(),
        normed,
        total,
        x_stride,
        residual_stride,
        eps,
        COLUMNS=columns,
        BLOCK=block,
        num_warps=row_warps(block),
        **early_options(x),
    )
    return normed, total
