"""`x @ w` for one matrix per group, with one order along k: a token's bits do not depend on the other tokens.

In half precision a program computes all of k. Float32 runs on CUDA cores, where few programs would take long, so k is
divided into splits of fixed length, which may have their own programs. Partial sums are added in order either way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import device_of
from mla_compile.ops.linear.fp8 import each_matrix
from mla_compile.ops.linear.kernels.fp8 import dequantize_triton
from mla_compile.ops.linear.kernels.split_k import add_parts
from mla_compile.ops.linear.operands import FP8LinearOperands
from mla_compile.ops.linear.tiles import ProductTiles, matmul_tiles, splits_matmul

PART = 256
"""Elements of k per split in float32. Products are added in order within a split, then splits in order."""


@triton.jit
def _partial_sum(
    x_at,  # pointers [BLOCK_T, BLOCK_K]
    w_at,  # pointers [BLOCK_K, BLOCK_C]
    in_x,
    in_w,
    first,
    w_k_stride,
    K: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum over PART elements of k from `first` on, added in order."""
    x_at += first
    w_at += tl.cast(first, tl.int64) * w_k_stride
    result = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, PART, BLOCK_K):
        x_mask, w_mask = in_x, in_w
        if K % PART != 0 or PART % BLOCK_K != 0:
            inside = first + start + tl.arange(0, BLOCK_K) < K
            x_mask, w_mask = in_x & inside[None, :], in_w & inside[:, None]
        rows = tl.load(x_at, mask=x_mask, other=0.0)
        columns = tl.load(w_at, mask=w_mask, other=0.0)
        # "ieee": float32 uses CUDA cores, as tensor cores would round it.
        result = tl.dot(rows, columns, result, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K * w_k_stride
    return result


@triton.jit(do_not_specialize=["tokens"])
def matmul_kernel(
    x,  # [tokens, groups, K], the last dimension contiguous
    w,  # [groups, K, n]
    out,  # [tokens, groups, n]; with SPLIT float32 [splits, tokens, groups, n]
    tokens,
    groups,
    n,
    x_strides,
    w_strides,
    K: tl.constexpr,
    PART: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of BLOCK_T tokens and BLOCK_C columns of one group, over all of k or one split with SPLIT.

    Grid `[tiles of tokens * tiles of columns, groups, splits or 1]`. Programs of the same columns are consecutive, so
    all but the first find the weights in the cache.
    """
    token_tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    program = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    t = (program % token_tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    c = (program // token_tiles * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + group * x_strides[1] + (t * x_strides[0])[:, None] + k[None, :]
    w_at = w + group * w_strides[0] + (c * w_strides[2])[None, :] + (k * w_strides[1])[:, None]
    in_x, in_w = (t < tokens)[:, None], (c < n)[None, :]
    result = _partial_sum(
        x_at, w_at, in_x, in_w, part * PART, w_strides[1], K, PART, BLOCK_T, BLOCK_C, BLOCK_K
    )
    if not SPLIT:
        for first in range(PART, K, PART):
            result += _partial_sum(
                x_at, w_at, in_x, in_w, first, w_strides[1], K, PART, BLOCK_T, BLOCK_C, BLOCK_K
            )
    at = out + (((part.to(tl.int64) * tokens + t) * groups + group) * n)[:, None] + c[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=in_x & in_w)


def matmul_triton(
    x: Tensor, w: Tensor, *, tiles: ProductTiles | None = None, split: bool | None = None
) -> Tensor:
    """`batch_invariant_matmul` on the GPU or in Triton's interpreter.

    tiles, split (whether each split of k has its own programs): by default from `tiles.py`. Neither changes bits:
        float32 adds its splits in order either way, and half precision has one split.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    (tokens, groups, k), n = x.shape, w.shape[2]
    device = device_of(x)
    tiles = tiles or matmul_tiles(tokens, groups * n, x.dtype, device)
    part = min(k, PART) if x.dtype == torch.float32 else k
    parts = triton.cdiv(k, part)
    programs = triton.cdiv(tokens, tiles.tokens) * triton.cdiv(n, tiles.columns)
    if split is None:
        split = splits_matmul(programs * groups, device)
    split &= parts > 1
    out = x.new_empty(tokens, groups, n)
    written = x.new_empty(parts, tokens, groups, n) if split else out
    matmul_kernel[(programs, groups, parts if split else 1)](
        x,
        w,
        written,
        tokens,
        groups,
        n,
        x.stride(),
        w.stride(),
        K=k,
        PART=part,
        SPLIT=split,
        **tiles.options(part),
    )
    return add_parts(written, out) if split else out


def linear_fp8_in_order(operands: FP8LinearOperands) -> Tensor:
    """Batch-invariant `fp8_linear` that writes the dequantised weight; a token's bits are those of `matmul_triton`."""

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        columns = dequantize_triton(weight, scale, x.dtype).t()
        return matmul_triton(x[:, None], columns[None]).flatten(1)

    return each_matrix(product, operands)
