"""`x @ weight.T` on tensor cores, block by block along k, for weights in half precision and in block FP8.

For few tokens, tiles of columns alone are too few programs to fill the GPU, so the warps of a program split k. The
weight is prefetched to the L2 cache while the previous kernel still runs (`dependent_launch.py`). FP8 values, which are
exact in every dtype of x, are multiplied, and the sum of each block is scaled (`ops/linear/fp8.py`).

The order of addition depends on k only. A split takes every second or fourth block along k, in order, and the partial
sums of the splits are added in order. Batch-invariant matmuls of many tokens have a kernel with the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, prefetch_rows, wait_for_kernel_before
from mla_compile.ops.device import device_of
from mla_compile.ops.linear.kernels.fp8 import BLOCK, values
from mla_compile.ops.linear.kernels.split_k import add_parts
from mla_compile.ops.linear.tiles import (
    MAX_SHARING,
    ProductTiles,
    block_parts,
    block_tiles,
    has_one_order,
    many_block_tiles,
)


@triton.jit
def _sum_of(parts):
    """The sum of the partial sums of 1, 2 or 4 splits, `[PARTS, ...]`, in order."""
    PARTS: tl.constexpr = parts.shape[0]
    ROWS: tl.constexpr = parts.shape[1]
    COLUMNS: tl.constexpr = parts.shape[2]
    parts = tl.permute(parts, 1, 2, 0)
    if PARTS == 1:
        return tl.reshape(parts, [ROWS, COLUMNS])
    elif PARTS == 2:
        first, second = tl.split(parts)
        return first + second
    else:
        even, odd = tl.split(tl.reshape(parts, [ROWS, COLUMNS, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first + second + third + fourth


@triton.jit(do_not_specialize=["tokens"])
def blocks_kernel(
    x,  # [tokens, K], strides (x_stride, 1)
    weight,  # [columns, K], contiguous
    scale,  # float32 [ceil(columns / BLOCK), ceil(K / BLOCK)], contiguous; None if the weight is not FP8
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
    """A tile of BLOCK_T tokens and BLOCK_C columns, within one block; grid `[tiles of columns, tiles of tokens]`.

    Each block along k is one dot, `[BLOCK_C, BLOCK] @ [BLOCK, BLOCK_T]`. An iteration takes BLOCK_K / BLOCK of them,
    one per warp. IN_ORDER: see `values`.
    """
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    row_at = weight + tl.minimum(c, columns - 1).to(tl.int64) * K
    if EARLY:
        prefetch_rows(row_at, K)
    wait_for_kernel_before(EARLY)
    PARTS: tl.constexpr = BLOCK_K // BLOCK
    token_at, in_tokens = x + t * x_stride, (t < tokens)[None, None, :]
    total = tl.zeros([PARTS, BLOCK_C, BLOCK_T], tl.float32)
    for start in range(0, K, BLOCK_K):
        b = start // BLOCK + tl.arange(0, PARTS)
        k = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        w = tl.load(row_at[None, :, None] + k[:, None, :], mask=(k < K)[:, None, :], other=0.0)
        h = tl.load(token_at[None, None, :] + k[:, :, None], mask=(k < K)[:, :, None] & in_tokens, other=0.0)
        if scale is None:
            total = tl.dot(w, h, total)
        else:
            scale_at = scale + tl.program_id(0) * BLOCK_C // BLOCK * ((K + BLOCK - 1) // BLOCK)
            s = tl.load(scale_at + b, mask=b * BLOCK < K, other=0.0)
            total = tl.fma(tl.dot(values(w, h.dtype, IN_ORDER), h), s[:, None, None], total)
    at = out + (t * columns)[None, :] + c[:, None]
    result = _sum_of(total).to(out.dtype.element_ty)
    tl.store(at, result, mask=(c < columns)[:, None] & (t < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def many_blocks_kernel(
    x,  # as in `blocks_kernel`
    weight,
    scale,
    out,  # [tokens, columns]; with SPLIT float32 [PARTS, tokens, columns]
    x_stride,
    tokens,
    columns,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """`blocks_kernel` with PARTS splits along k, for many tokens. A program computes all splits, or one with SPLIT.

    Grid `[tiles of tokens * tiles of columns, PARTS or 1]`. Programs of the same columns are consecutive, so all but
    the first find the weights in the cache.
    """
    tl.static_assert(BLOCK_K == BLOCK)
    token_tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    program = tl.program_id(0)
    t = (program % token_tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    c = program // token_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.minimum(c, columns - 1)
    x_at, w_at, in_tokens = x + t * x_stride, weight + row.to(tl.int64) * K, t < tokens
    scale_at = scale
    if scale is not None:
        scale_at += row // BLOCK * ((K + BLOCK - 1) // BLOCK)
    result = tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
    at_first = tl.program_id(1)
    for part in range(at_first, at_first + 1 if SPLIT else PARTS):
        total = tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
        for start in range(part * BLOCK, K, PARTS * BLOCK):
            k = start + tl.arange(0, BLOCK)
            inside = (k < K)[None, :]
            w = tl.load(w_at[:, None] + k[None, :], mask=inside, other=0.0)
            h = tl.load(x_at[:, None] + k[None, :], mask=in_tokens[:, None] & inside, other=0.0)
            if scale is None:
                total = tl.dot(w, tl.trans(h), total)
            else:
                s = tl.load(scale_at + start // BLOCK)
                total = tl.fma(tl.dot(values(w, h.dtype, IN_ORDER), tl.trans(h)), s[:, None], total)
        result = tl.where(part == at_first, total, result + total)
    at = out + ((at_first.to(tl.int64) * tokens + t) * columns)[None, :] + c[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=(c < columns)[:, None] & in_tokens[None, :])


def multiply(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    tiles: ProductTiles | None = None,
    *,
    in_order: bool = False,
) -> Tensor:
    """`x @ weight.T` for a few tokens.

    tiles: by default from `tiles.py`. The columns must divide 128, and the depth be 1, 2 or 4 blocks of k.
    in_order: whether a token gets the bits of `multiply_in_order`.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, k), columns = x.shape, weight.shape[0]
    tiles = tiles or block_tiles(tokens, k, device_of(x))
    out = x.new_empty(tokens, columns)
    blocks_kernel[(triton.cdiv(columns, tiles.columns), triton.cdiv(tokens, tiles.tokens))](
        *(x, weight, scale, out, x.stride(0), tokens, columns),
        K=k,
        IN_ORDER=in_order,
        **early_options(x),
        **tiles.options(k),
    )
    return out


def multiply_in_order(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    *,
    tiles: ProductTiles | None = None,
    split: bool | None = None,
) -> Tensor:
    """Batch-invariant `x @ weight.T` for x in half precision.

    tiles, split (whether each split along k has its own programs): by default from `tiles.py`; neither changes bits. If
        one is given, `many_blocks_kernel` runs for few tokens too.
    """
    (tokens, k), columns = x.shape, weight.shape[0]
    if tokens <= MAX_SHARING and tiles is None and split is None:
        return multiply(x, weight, scale, in_order=True)
    x = x if x.stride(1) == 1 else x.contiguous()
    device, parts = device_of(x), block_parts(k)
    chosen, wanted = many_block_tiles(tokens, columns, parts, device)
    tiles, split = tiles or chosen, wanted if split is None else split
    programs = triton.cdiv(tokens, tiles.tokens) * triton.cdiv(columns, tiles.columns)
    out = x.new_empty(tokens, columns)
    written = x.new_empty(parts, tokens, columns, dtype=torch.float32) if split else out
    many_blocks_kernel[(programs, parts if split else 1)](
        *(x, weight, scale, written, x.stride(0), tokens, columns),
        K=k,
        PARTS=parts,
        SPLIT=split,
        IN_ORDER=not has_one_order(tiles.tokens, tiles.columns, device),
        **tiles.options(k),
    )
    return add_parts(written, out) if split else out
