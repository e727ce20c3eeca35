"""`x @ weight.T` of a few tokens, on tensor cores: the warps of a program share its rows of the weight along k.

Columns alone would be too few to fill the GPU. The weight comes to the cache while the kernel before still runs
(`early.py`). It may be in block FP8, `ops/fp8.py`: its values, exact in every dtype of x, are multiplied, and each
block's sum is scaled.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.early import prefetch_rows, starts_early, wait_for_kernel_before
from mla_compile.ops.kernels.fp8 import BLOCK
from mla_compile.ops.kernels.plan import MatmulTiles, block_tiles


@triton.jit(do_not_specialize=["tokens"])
def blocks_kernel(
    x,  # [tokens, K], rows x_stride apart, elements side by side
    weight,  # [columns, K], contiguous
    scale,  # float32 [ceil(columns / BLOCK), ceil(K / BLOCK)], contiguous; None: the weight is not FP8
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

    A block along k is a product of its own, `[BLOCK_C, BLOCK] @ [BLOCK, BLOCK_T]`, and the warps share the blocks.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    row_at = weight + tl.minimum(c, columns - 1).to(tl.int64) * K
    if EARLY:
        prefetch_rows(row_at, K)
    wait_for_kernel_before(EARLY)
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK
    token_at, in_tokens = x + t * x_stride, (t < tokens)[None, None, :]
    total = tl.zeros([BLOCKS, BLOCK_C, BLOCK_T], tl.float32)
    for start in range(0, K, BLOCK_K):
        b = start // BLOCK + tl.arange(0, BLOCKS)
        k = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        w = tl.load(row_at[None, :, None] + k[:, None, :], mask=(k < K)[:, None, :], other=0.0)
        h = tl.load(token_at[None, None, :] + k[:, :, None], mask=(k < K)[:, :, None] & in_tokens, other=0.0)
        if scale is None:
            total += tl.dot(w, h)
        else:
            scale_at = scale + tl.program_id(0) * BLOCK_C // BLOCK * ((K + BLOCK - 1) // BLOCK)
            s = tl.load(scale_at + b, mask=b * BLOCK < K, other=0.0)
            total += tl.dot(w.to(tl.float32).to(h.dtype), h) * s[:, None, None]
    at = out + (t * columns)[None, :] + c[:, None]
    result = tl.sum(total, 0).to(out.dtype.element_ty)
    tl.store(at, result, mask=(c < columns)[:, None] & (t < tokens)[None, :])


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None, tiles: MatmulTiles | None) -> Tensor:
    """`x @ weight.T`; tiles: a number of columns that divides 128, and whole blocks of k, or None for the plan's."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, k), columns = x.shape, weight.shape[0]
    tiles = tiles or block_tiles(tokens, k)
    out = x.new_empty(tokens, columns)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        blocks_kernel[(triton.cdiv(columns, tiles.columns), triton.cdiv(tokens, tiles.tokens))](
            *(x, weight, scale, out, x.stride(0), tokens, columns),
            K=k,
            EARLY=starts_early(x),
            launch_pdl=starts_early(x),
            **tiles.options(k),
        )
    return out
