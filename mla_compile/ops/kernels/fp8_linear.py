"""`x @ weight.T` by a weight in block FP8, `ops/fp8.py`: half of the bytes are read, and converted in registers.

One token is multiplied on the plain cores, as in `gemv.py`; a few on tensor cores, block by block. Both multiply the
values of FP8, which are exact in every dtype of x, and scale a sum. More tokens are multiplied by tiles that lie within
a block along k, so that a row of a tile has one scale, by which its weights are multiplied first. Of many tokens the
conversion, which every tile of tokens repeats, takes longer than to write the weight dequantised once.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.fp8 import each_matrix
from mla_compile.ops.kernels.early import prefetch, starts_early, wait_for_kernel_before
from mla_compile.ops.kernels.fp8 import BLOCK, dequantize_triton, dequantized
from mla_compile.ops.kernels.plan import MatmulTiles, device_of, fp8_block_tiles, fp8_tiles
from mla_compile.ops.kernels.rows import load_units, unit_places, unit_sums

LINES = tl.constexpr(32)
"""Cache lines of a row that are requested at once."""


@triton.jit
def _ask_for(row_at, K: tl.constexpr):
    """Have whole rows of a weight, `[rows]`, brought to the cache."""
    for start in tl.static_range(0, K, BLOCK * LINES):
        line = start + BLOCK * tl.arange(0, LINES)
        prefetch(row_at[:, None] + tl.minimum(line, K - 1)[None, :])


@triton.jit
def gemv_kernel(
    x,  # [K]
    weight,  # float8 [columns, K], contiguous
    scale,  # float32 [ceil(columns / BLOCK), ceil(K / BLOCK)], contiguous
    out,  # [columns]
    columns,
    K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_C columns, of one block, of the result; grid `[blocks of columns]`."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row_at = weight + tl.minimum(c, columns - 1).to(tl.int64) * K
    if EARLY:
        _ask_for(row_at, K)
    wait_for_kernel_before(EARLY)
    scale_at = scale + tl.program_id(0) * BLOCK_C // BLOCK * ((K + BLOCK - 1) // BLOCK)
    UNIT: tl.constexpr = 16
    total = tl.zeros([BLOCK_C, BLOCK_K // UNIT], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = unit_places(start, BLOCK_K, UNIT)
        w = load_units(row_at, k, K, BLOCK_K)
        total += unit_sums(w, load_units(x, k, K, BLOCK_K), scale_at, start, K, BLOCK_K, UNIT)
    tl.store(out + c, tl.sum(total, 1).to(out.dtype.element_ty), mask=c < columns)


@triton.jit(do_not_specialize=["tokens"])
def blocks_kernel(
    x,  # [tokens, K], rows x_stride apart
    weight,  # float8 [columns, K], contiguous
    scale,  # float32 [ceil(columns / BLOCK), ceil(K / BLOCK)], contiguous
    out,  # [tokens, columns]
    x_stride,
    tokens,
    columns,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_T tokens, BLOCK_C columns, of one block; grid `[tiles of columns, tiles of tokens]`.

    A block along k is a product of its own, `[BLOCK_C, BLOCK] @ [BLOCK, BLOCK_T]` of FP8's exact values, and the warps
    share the blocks: columns alone would be too few to fill the GPU. The scale multiplies a block's sum.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    row_at = weight + tl.minimum(c, columns - 1).to(tl.int64) * K
    if EARLY:
        _ask_for(row_at, K)
    wait_for_kernel_before(EARLY)
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK
    scale_at = scale + tl.program_id(0) * BLOCK_C // BLOCK * ((K + BLOCK - 1) // BLOCK)
    token_at, in_tokens = x + t * x_stride, (t < tokens)[None, None, :]
    total = tl.zeros([BLOCKS, BLOCK_C, BLOCK_T], tl.float32)
    for start in range(0, K, BLOCK_K):
        b = start // BLOCK + tl.arange(0, BLOCKS)
        k = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        w = tl.load(row_at[None, :, None] + k[:, None, :], mask=(k < K)[:, None, :], other=0.0)
        h = tl.load(token_at[None, None, :] + k[:, :, None], mask=(k < K)[:, :, None] & in_tokens, other=0.0)
        s = tl.load(scale_at + b, mask=b * BLOCK < K, other=0.0)
        total += tl.dot(w.to(tl.float32).to(h.dtype), h) * s[:, None, None]
    at = out + (t * columns)[None, :] + c[:, None]
    result = tl.sum(total, 0).to(out.dtype.element_ty)
    tl.store(at, result, mask=(c < columns)[:, None] & (t < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def tiles_kernel(
    x,  # [tokens, K], rows x_stride apart
    weight,  # float8 [columns, K], contiguous
    scale,  # float32 [ceil(columns / BLOCK), ceil(K / BLOCK)], contiguous
    out,  # [tokens, columns]
    x_stride,
    tokens,
    columns,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_T tokens, BLOCK_C columns; BLOCK_K divides BLOCK. Grid `[tiles of tokens * tiles of columns]`.

    Programs of the same columns follow one another: all but the first find the weights in the cache.
    """
    wait_for_kernel_before(EARLY)
    token_tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    program = tl.program_id(0)
    t = (program % token_tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    c = (program // token_tiles * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (t * x_stride)[:, None] + k[None, :]
    w_at = weight + (c * K)[:, None] + k[None, :]
    scale_at = scale + c // BLOCK * ((K + BLOCK - 1) // BLOCK)
    in_x, in_w = (t < tokens)[:, None], (c < columns)[:, None]
    result = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, K, BLOCK_K):
        x_mask, w_mask = in_x, in_w
        if K % BLOCK_K != 0:
            inside = (start + k < K)[None, :]
            x_mask, w_mask = in_x & inside, in_w & inside
        h = tl.load(x_at + start, mask=x_mask, other=0.0)
        w = tl.load(w_at + start, mask=w_mask, other=0.0)
        s = tl.load(scale_at + start // BLOCK, mask=c < columns, other=0.0)
        w = dequantized(w, s[:, None], h.dtype, IN_ORDER)
        # Float32 on the plain cores: tensor cores would round it.
        result = tl.dot(h, tl.trans(w), result, input_precision="ieee")
    at = out + (t * columns)[:, None] + c[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (c < columns)[None, :])


def _launch(
    kernel: Any,
    grid: tuple[int, ...],
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    sizes: tuple[int, ...],
    options: dict[str, int],
) -> Tensor:
    """The product by one weight, by a kernel of this file; sizes: its arguments behind the result."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernel[grid](
            *(x, weight, scale, out, *sizes),
            K=x.shape[1],
            EARLY=starts_early(x),
            launch_pdl=starts_early(x),
            **options,
        )
    return out


def linear_gemv(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    *,
    tiles: tuple[int, int, int] | None = None,
) -> Tensor:
    """What `fp8_linear` computes of one token.

    tiles: columns, a power of two up to 128, and elements of k, one of 128 or more, that a program reads at a time, and
        its warps. Unless given, those that were quickest for products of GLM-4.7-Flash on an H200.
    """
    x = x.contiguous()
    k = x.shape[1]

    def product(weight: Tensor, scale: Tensor) -> Tensor:
        columns = weight.shape[0]
        block_c, block_k, warps = tiles or (
            (4, 512, 2) if k < 1024 else (2, 1024, 4) if k <= 4096 else (1, 1024, 2)
        )
        grid = (triton.cdiv(columns, block_c),)
        options = {"BLOCK_C": block_c, "BLOCK_K": block_k, "num_warps": warps}
        return _launch(gemv_kernel, grid, x, weight, scale, (columns,), options)

    return each_matrix(product, first, first_scale, second, second_scale)


def linear_blocks(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    *,
    tiles: MatmulTiles | None = None,
) -> Tensor:
    """What `fp8_linear` computes of a few tokens in half precision.

    tiles: up to 128 columns, and whole blocks of k; chosen by `plan.py` unless given.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, k = x.shape
    chosen = tiles or fp8_block_tiles(tokens, k)

    def product(weight: Tensor, scale: Tensor) -> Tensor:
        columns = weight.shape[0]
        grid = (triton.cdiv(columns, chosen.columns), triton.cdiv(tokens, chosen.tokens))
        sizes = (x.stride(0), tokens, columns)
        return _launch(blocks_kernel, grid, x, weight, scale, sizes, chosen.options(k))

    return each_matrix(product, first, first_scale, second, second_scale)


def linear_tiles(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    *,
    tiles: MatmulTiles | None = None,
    in_order: bool = False,
) -> Tensor:
    """What `fp8_linear` computes.

    tiles: chosen by `plan.py` unless given.
    in_order: a token has the same bits in every number of tokens, whatever the tiles: those that `matmul_triton` gives
        it with the weight dequantised.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, k = x.shape

    def product(weight: Tensor, scale: Tensor) -> Tensor:
        columns = weight.shape[0]
        chosen = tiles or fp8_tiles(tokens, columns, x.dtype, device_of(x))
        grid = (triton.cdiv(tokens, chosen.tokens) * triton.cdiv(columns, chosen.columns),)
        options = chosen.options(k) | {"IN_ORDER": in_order}
        return _launch(tiles_kernel, grid, x, weight, scale, (x.stride(0), tokens, columns), options)

    return each_matrix(product, first, first_scale, second, second_scale)


def linear_tiles_in_order(
    x: Tensor, first: Tensor, first_scale: Tensor, second: Tensor | None, second_scale: Tensor | None
) -> Tensor:
    """`linear_tiles` with the same bits of a token in every number of tokens."""
    return linear_tiles(x, first, first_scale, second, second_scale, in_order=True)


def linear_dequantized(
    x: Tensor, first: Tensor, first_scale: Tensor, second: Tensor | None, second_scale: Tensor | None
) -> Tensor:
    """What `fp8_linear` computes: the weight is written dequantised, and cuBLAS multiplies."""

    def product(weight: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, dequantize_triton(weight, scale, x.dtype))

    return each_matrix(product, first, first_scale, second, second_scale)
