"""Sums along rows, each by one program in one order, and the RMSNorm that needs one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.plan import aligned_rows, power_of_two

_BLOCK = 2048
"""Columns that a program holds at once."""


@triton.jit
def sum_kernel(x, out, stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid `[rows]`; rows of `x` are `stride` apart."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit
def rms_norm_kernel(
    x, weight, out, stride, eps, HAS_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid `[rows]`; rows of `x` are `stride` apart, those of `out` are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        total += value * value
    scale = tl.rsqrt(tl.sum(total, 0) / COLUMNS + eps)
    dtype = out.dtype.element_ty
    for start in range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        # Rounded before the weight multiplies, as in the models.
        normed = (value * scale).to(dtype)
        if HAS_WEIGHT:
            factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            normed = (normed.to(tl.float32) * factor).to(dtype)
        tl.store(out + row * COLUMNS + column, normed, mask=inside)


def sum_triton(x: Tensor) -> Tensor:
    """What `batch_invariant_sum` computes, on the GPU or in Triton's interpreter."""
    x, stride = aligned_rows(x)
    rows, columns = x.shape
    out = x.new_empty(rows, dtype=torch.float32)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        sum_kernel[(rows,)](x, out, stride, COLUMNS=columns, **_tile(columns))
    return out


def rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """What `batch_invariant_rms_norm` computes, with its arguments."""
    x, stride = aligned_rows(x)
    rows, columns = x.shape
    out = x.new_empty(rows, columns)
    with torch.cuda.device_of(x):
        rms_norm_kernel[(rows,)](
            x,
            out if weight is None else weight.contiguous(),
            out,
            stride,
            eps,
            HAS_WEIGHT=weight is not None,
            COLUMNS=columns,
            **_tile(columns),
        )
    return out


def _tile(columns: int) -> dict[str, int]:
    """By the columns alone: warps decide in which order a tile is added up."""
    block = min(_BLOCK, power_of_two(columns))
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}
