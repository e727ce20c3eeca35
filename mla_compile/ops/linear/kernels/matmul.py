"""`x @ w` for a matrix of weights a group, with one order along k: a row's bits do not depend on the other rows.

In half precision a program takes all of k. In float32, on the plain cores, that would take few programs long: k is in
parts of a fixed length, which programs of their own may take. Parts are added in their order, whoever computed them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import device_of
from mla_compile.ops.linear.fp8 import each_matrix
from mla_compile.ops.linear.kernels.fp8 import dequantize_triton
from mla_compile.ops.linear.kernels.parts import add_parts
from mla_compile.ops.linear.operands import FP8LinearOperands
from mla_compile.ops.linear.tiles import ProductTiles, matmul_tiles, splits_matmul

PART = 256
"""Elements of k whose products float32 adds one after another; their sums are then added in order."""


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
    """The products of PART elements of k from `first` on, added in their order."""
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
        # Float32 on the plain cores: tensor cores would round it.
        result = tl.dot(rows, columns, result, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K * w_k_stride
    return result


@triton.jit(do_not_specialize=["tokens"])
def matmul_kernel(
    x,  # [tokens, groups, K], the last dimension contiguous
    w,  # [groups, K, n]
    out,  # [tokens, groups, n]; SPLIT: [parts, tokens, groups, n], float32
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
    """BLOCK_T tokens, BLOCK_C columns of one group, SPLIT: one part of k.

    Grid `[tiles of tokens * tiles of columns, groups, parts or 1]`. Programs of the same columns follow one another:
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

    The tiles, and whether parts of k go to programs of their own, are chosen by `tiles.py` unless given. Neither
    changes a bit: float32 adds its parts in their order either way, and half precision has but one.
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
    """What `fp8_linear` computes, of weights that are written dequantised: a row's bits are as in `matmul_triton`."""

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        columns = dequantize_triton(weight, scale, x.dtype).t()
        return matmul_triton(x[:, None], columns[None]).flatten(1)

    return each_matrix(product, operands)
