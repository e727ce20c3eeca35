"""`x @ weight.T` by a weight in block FP8, `ops/fp8.py`: half of the bytes are read, and converted in registers.

One token is multiplied on the plain cores (`gemv.py`), a few on tensor cores, block by block (`blocks.py`). Both
multiply the values of FP8, which are exact in every dtype of x, and scale a sum. More tokens are multiplied by tiles
that lie within a block along k, so that a row of a tile has one scale, by which its weights are multiplied first. Of
many tokens the conversion, which every tile of tokens repeats, takes longer than to write the weight dequantised once.
"""

from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.fp8 import each_matrix
from mla_compile.ops.kernels import blocks, gemv
from mla_compile.ops.kernels.early import starts_early, wait_for_kernel_before
from mla_compile.ops.kernels.fp8 import BLOCK, dequantize_triton, dequantized
from mla_compile.ops.kernels.plan import MatmulTiles, device_of, fp8_tiles


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
        w = dequantized(w, s[:, None], h.dtype)
        # Float32 on the plain cores: tensor cores would round it.
        result = tl.dot(h, tl.trans(w), result, input_precision="ieee")
    at = out + (t * columns)[:, None] + c[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (c < columns)[None, :])


def linear_gemv(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    *,
    tiles: gemv.Tiles | None = None,
) -> Tensor:
    """What `fp8_linear` computes of one token.

    tiles: chosen by `gemv.fp8_tiles` unless given.
    """
    product = partial(gemv.multiply, x, tiles=tiles or gemv.fp8_tiles(x.shape[1]))
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
    """What `fp8_linear` computes of a few tokens in half precision."""
    product = partial(blocks.multiply, x, tiles=tiles)
    return each_matrix(product, first, first_scale, second, second_scale)


def linear_tiles(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    *,
    tiles: MatmulTiles | None = None,
) -> Tensor:
    """What `fp8_linear` computes.

    tiles: chosen by `plan.py` unless given.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, k = x.shape

    def product(weight: Tensor, scale: Tensor) -> Tensor:
        columns = weight.shape[0]
        chosen = tiles or fp8_tiles(tokens, columns, x.dtype, device_of(x))
        out = x.new_empty(tokens, columns)
        with torch.cuda.device_of(x):  # Triton launches on the current device
            tiles_kernel[(triton.cdiv(tokens, chosen.tokens) * triton.cdiv(columns, chosen.columns),)](
                *(x, weight, scale, out, x.stride(0), tokens, columns),
                K=k,
                EARLY=starts_early(x),
                launch_pdl=starts_early(x),
                **chosen.options(k),
            )
        return out

    return each_matrix(product, first, first_scale, second, second_scale)


def linear_in_order(
    x: Tensor, first: Tensor, first_scale: Tensor, second: Tensor | None, second_scale: Tensor | None
) -> Tensor:
    """What `fp8_linear` computes in half precision, with the same bits of a token in every number of tokens."""
    return each_matrix(partial(blocks.multiply_in_order, x), first, first_scale, second, second_scale)


def linear_dequantized(
    x: Tensor, first: Tensor, first_scale: Tensor, second: Tensor | None, second_scale: Tensor | None
) -> Tensor:
    """What `fp8_linear` computes: the weight is written dequantised, and cuBLAS multiplies."""

    def product(weight: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, dequantize_triton(weight, scale, x.dtype))

    return each_matrix(product, first, first_scale, second, second_scale)
