"""`x @ weight.T` of one or two tokens, on the plain cores: a program reads a few rows of the weight, whole.

Tensor cores have nothing to do here, and what feeds them waits for whole tiles of weights. The weight comes to the
cache while the kernel before still runs (`early.py`). It may be in block FP8, `ops/fp8.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.early import prefetch_rows, starts_early, wait_for_kernel_before
from mla_compile.ops.kernels.fp8 import BLOCK
from mla_compile.ops.kernels.rows import load_units, unit_places, unit_sums, unit_zeros
from mla_compile.ops.side_by_side import one_matrix

Tiles = tuple[int, int, int]
"""Rows of the weight and elements of k, 8 or more a thread, that a program reads at a time, and its warps."""


@triton.jit
def gemv_kernel(
    x,  # [TOKENS, K], rows x_stride apart, elements side by side
    weight,  # [columns, K], contiguous
    scale,  # float32 [ceil(columns / BLOCK), ceil(K / BLOCK)]; None: the weight is not FP8
    out,  # [TOKENS, columns]
    x_stride,
    columns,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_C columns of the result, of FP8 all of one block; grid `[blocks of columns]`."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row_at = weight + tl.minimum(c, columns - 1).to(tl.int64) * K
    if EARLY:
        prefetch_rows(row_at, K)
    wait_for_kernel_before(EARLY)
    scale_at = scale
    if scale is not None:
        scale_at += tl.program_id(0) * BLOCK_C // BLOCK * ((K + BLOCK - 1) // BLOCK)
    total = unit_zeros(BLOCK_C, BLOCK_K)
    of_second = unit_zeros(BLOCK_C, BLOCK_K)
    for start in range(0, K, BLOCK_K):
        k = unit_places(start, BLOCK_K)
        w = load_units(row_at, k, K, BLOCK_K)
        total += unit_sums(w, load_units(x, k, K, BLOCK_K), scale_at, start, K, BLOCK_K)
        if TOKENS == 2:
            of_second += unit_sums(w, load_units(x + x_stride, k, K, BLOCK_K), scale_at, start, K, BLOCK_K)
    tl.store(out + c, tl.sum(total, 1).to(out.dtype.element_ty), mask=c < columns)
    if TOKENS == 2:
        tl.store(out + columns + c, tl.sum(of_second, 1).to(out.dtype.element_ty), mask=c < columns)


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None, tiles: Tiles) -> Tensor:
    """`x @ weight.T` of one or two tokens; of FP8 with a number of rows in `tiles` that divides 128."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, k), columns = x.shape, weight.shape[0]
    block_c, block_k, warps = tiles
    out = x.new_empty(tokens, columns)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        gemv_kernel[(triton.cdiv(columns, block_c),)](
            *(x, weight, scale, out, x.stride(0), columns),
            K=k,
            TOKENS=tokens,
            BLOCK_C=block_c,
            BLOCK_K=block_k,
            EARLY=starts_early(x),
            num_warps=warps,
            launch_pdl=starts_early(x),
        )
    return out


def linear_gemv(
    x: Tensor, first: Tensor, second: Tensor | None = None, *, tiles: Tiles | None = None
) -> Tensor:
    """What `fused_linear` computes of one or two tokens, by weights that are one matrix in memory.

    tiles: of an H200's choices these won.
    """
    tokens, k = x.shape
    return multiply(
        x, one_matrix(first, second), None, tiles or (4 if tokens > 1 or k <= 2048 else 2, 1024, 4)
    )
