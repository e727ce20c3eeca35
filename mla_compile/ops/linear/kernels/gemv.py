"""`x @ weight.T` for one or two tokens on CUDA cores: a program computes a few columns over all of k.

Tensor cores would not help: reading the weight takes the time, and their pipeline waits for whole tiles. The weight is
prefetched to the L2 cache while the previous kernel still runs (`dependent_launch.py`). It may be block FP8
(`ops/linear/fp8.py`).

The kernel can add a residual to the tokens and norm them first. Every program reads whole tokens, so each sums their
squares along with the products, and divides the result by the root mean square at the end.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, prefetch_rows, wait_for_kernel_before
from mla_compile.ops.linear.kernels.fp8 import BLOCK
from mla_compile.ops.linear.kernels.gemv_units import load_units, unit_places, unit_sums, unit_zeros

Tiles = tuple[int, int, int]
"""Output columns of a program, elements of k per iteration (8 or more per thread), and warps."""


@triton.jit
def _units_of_token(x, residual, norm_weight, total, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A token's elements at offsets k times the norm's weight, float32 `[units, UNIT]`, and its squares' sum per unit.

    The first program writes the sum of token and residual to `total`.
    """
    h = load_units(x, k, K, BLOCK_K).to(tl.float32)
    if residual is not None:
        rounded = (h + load_units(residual, k, K, BLOCK_K).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + k, rounded, mask=(k < K) & (tl.program_id(0) == 0))
        h = rounded.to(tl.float32)
    squares = tl.sum(h * h, 1)
    if norm_weight is not None:
        h *= load_units(norm_weight, k, K, BLOCK_K).to(tl.float32)
    return h, squares


@triton.jit
def _store(at, sums, squares, inside, eps, K: tl.constexpr, NORM: tl.constexpr):
    """Write a token's columns, with NORM divided by the token's root mean square."""
    result = tl.sum(sums, 1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    tl.store(at, result.to(at.dtype.element_ty), mask=inside)


@triton.jit
def gemv_kernel(
    x,  # [TOKENS, K], strides (x_stride, 1)
    residual,  # [TOKENS, K], strides (residual_stride, 1); or None
    norm_weight,  # [K] or None
    weight,  # [columns, K], contiguous
    scale,  # float32 [ceil(columns / BLOCK), ceil(K / BLOCK)]; None if the weight is not FP8
    out,  # [TOKENS, columns]
    total,  # [TOKENS, K], x + residual; unwritten without a residual
    x_stride,
    residual_stride,
    columns,
    eps,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_C columns of the result, for FP8 within one block; grid `[tiles of columns]`."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row_at = weight + tl.minimum(c, columns - 1).to(tl.int64) * K
    if EARLY:
        prefetch_rows(row_at, K)
    wait_for_kernel_before(EARLY)
    scale_at = scale
    if scale is not None:
        scale_at += tl.program_id(0) * BLOCK_C // BLOCK * ((K + BLOCK - 1) // BLOCK)
    sums = unit_zeros(BLOCK_C, BLOCK_K)
    sums_of_second = unit_zeros(BLOCK_C, BLOCK_K)
    squares = tl.sum(unit_zeros(1, BLOCK_K), 0)
    squares_of_second = squares
    for start in range(0, K, BLOCK_K):
        k = unit_places(start, BLOCK_K)
        w = load_units(row_at, k, K, BLOCK_K)
        h, own = _units_of_token(x, residual, norm_weight, total, k, K, BLOCK_K)
        sums += unit_sums(w, h, scale_at, start, K, BLOCK_K)
        squares += own
        if TOKENS == 2:
            added = residual
            if residual is not None:
                added += residual_stride
            h, own = _units_of_token(x + x_stride, added, norm_weight, total + K, k, K, BLOCK_K)
            sums_of_second += unit_sums(w, h, scale_at, start, K, BLOCK_K)
            squares_of_second += own
    _store(out + c, sums, squares, c < columns, eps, K, NORM)
    if TOKENS == 2:
        _store(out + columns + c, sums_of_second, squares_of_second, c < columns, eps, K, NORM)


class Norm(NamedTuple):
    """The norm before the matmul."""

    residual: Tensor | None
    weight: Tensor | None
    eps: float


def multiply(
    x: Tensor, weight: Tensor, scale: Tensor | None, tiles: Tiles, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """`x @ weight.T` of one or two tokens or of their norm, and x + residual, which is empty without a residual.

    tiles: for FP8 the number of columns must divide 128.
    """
    residual, norm_weight, eps = norm or (None, None, 0.0)
    x = x if x.stride(1) == 1 else x.contiguous()
    residual, norm_weight = (
        given if given is None or given.stride(-1) == 1 else given.contiguous()
        for given in (residual, norm_weight)
    )
    (tokens, k), columns = x.shape, weight.shape[0]
    block_c, block_k, warps = tiles
    out = x.new_empty(tokens, columns)
    total = x.new_empty(tokens if residual is not None else 0, k)
    gemv_kernel[(triton.cdiv(columns, block_c),)](
        *(x, residual, norm_weight, weight, scale, out, total),
        *(x.stride(0), 0 if residual is None else residual.stride(0), columns, eps),
        K=k,
        TOKENS=tokens,
        NORM=norm is not None,
        BLOCK_C=block_c,
        BLOCK_K=block_k,
        num_warps=warps,
        **early_options(x),
    )
    return out, total


def half_tiles(k: int) -> Tiles:
    """Tiles for half-precision weights: the fastest for GLM-4.7-Flash on an H200."""
    return (4, 1024, 4) if k <= 1024 else (2, 2048, 2)


def fp8_tiles(k: int) -> Tiles:
    """Tiles for FP8 weights: the fastest on an H200, for GLM-4.7-Flash up to k = 2048, for DeepSeek-V3 above."""
    if k <= 2048:
        return 4, 1024 if k <= 1024 else 2048, 4
    return (1, 512, 2) if k < 8192 else (2, 2048, 4)
