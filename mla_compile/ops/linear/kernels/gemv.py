"""`x @ weight.T` for one or two tokens on CUDA cores: a program computes a few columns over all of k.

Tensor cores would not help: reading the weight takes the time, and their pipeline waits for whole tiles. The weight is
prefetched to the L2 cache while the previous kernel still runs (`dependent_launch.py`). It may be block FP8
(`ops/linear/fp8.py`).
"""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, prefetch_rows, wait_for_kernel_before
from mla_compile.ops.linear.kernels.fp8 import BLOCK
from mla_compile.ops.linear.kernels.gemv_units import load_units, unit_places, unit_sums, unit_zeros

Tiles = tuple[int, int, int]
"""Output columns of a program, elements of k per iteration (8 or more per thread), and warps."""


@triton.jit
def gemv_kernel(
    x,  # [TOKENS, K], strides (x_stride, 1)
    weight,  # [columns, K], contiguous
    scale,  # float32 [ceil(columns / BLOCK), ceil(K / BLOCK)]; None if the weight is not FP8
    out,  # [TOKENS, columns]
    x_stride,
    columns,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
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
    for start in range(0, K, BLOCK_K):
        k = unit_places(start, BLOCK_K)
        w = load_units(row_at, k, K, BLOCK_K)
        sums += unit_sums(w, load_units(x, k, K, BLOCK_K), scale_at, start, K, BLOCK_K)
        if TOKENS == 2:
            sums_of_second += unit_sums(
                w, load_units(x + x_stride, k, K, BLOCK_K), scale_at, start, K, BLOCK_K
            )
    tl.store(out + c, tl.sum(sums, 1).to(out.dtype.element_ty), mask=c < columns)
    if TOKENS == 2:
        second = tl.sum(sums_of_second, 1).to(out.dtype.element_ty)
        tl.store(out + columns + c, second, mask=c < columns)


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None, tiles: Tiles) -> Tensor:
    """`x @ weight.T` of one or two tokens. tiles: for FP8 the number of columns must divide 128."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, k), columns = x.shape, weight.shape[0]
    block_c, block_k, warps = tiles
    out = x.new_empty(tokens, columns)
    gemv_kernel[(triton.cdiv(columns, block_c),)](
        *(x, weight, scale, out, x.stride(0), columns),
        K=k,
        TOKENS=tokens,
        BLOCK_C=block_c,
        BLOCK_K=block_k,
        num_warps=warps,
        **early_options(x),
    )
    return out


def half_tiles(k: int) -> Tiles:
    """Tiles for half-precision weights: the fastest for GLM-4.7-Flash on an H200."""
    return (4, 1024, 4) if k <= 1024 else (2, 2048, 2)


def fp8_tiles(k: int) -> Tiles:
    """Tiles for FP8 weights: the fastest on an H200, for GLM-4.7-Flash up to k = 2048, for DeepSeek-V3 above."""
    if k <= 2048:
        return 4, 1024 if k <= 1024 else 2048, 4
    return (1, 512, 2) if k < 8192 else (2, 2048, 4)
