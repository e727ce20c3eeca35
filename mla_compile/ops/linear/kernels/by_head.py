"""Matmul by one matrix per head: a program computes a few columns of one head.

One or two tokens use CUDA cores. More use tensor cores, and so do all batch-invariant matmuls. As in `gemv.py`, weights
are prefetched to the L2 cache while the previous kernel still runs.
"""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, prefetch, wait_for_kernel_before
from mla_compile.ops.device import power_of_two
from mla_compile.ops.linear.tiles import ProductTiles, by_head_tiles


@triton.jit
def _prefetch(
    of_head,
    n,
    w_strides,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALONG_K: tl.constexpr,
):
    """Prefetch the BLOCK_N columns n of a head's matrix to L2. BLOCK_K: K rounded up to a power of two."""
    LINE: tl.constexpr = 1024 // of_head.dtype.element_ty.primitive_bitwidth
    if ALONG_K:
        line = tl.minimum(LINE * tl.arange(0, BLOCK_K // LINE), K - 1)
        prefetch(of_head + tl.minimum(n, N - 1)[:, None] * w_strides[2] + line[None, :] * w_strides[1])
    else:
        k = tl.minimum(tl.arange(0, BLOCK_K), K - 1)
        line = tl.min(n, 0) + LINE * tl.arange(0, (BLOCK_N + LINE - 1) // LINE)
        prefetch(of_head + k[:, None] * w_strides[1] + tl.minimum(line, N - 1)[None, :] * w_strides[2])


@triton.jit
def by_head_kernel(
    x,  # [TOKENS, heads, K], last stride 1
    w,  # [heads, K, N], one of the last two strides 1
    out,  # [TOKENS, heads, N], contiguous
    x_strides,
    w_strides,
    K: tl.constexpr,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALONG_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_N columns of a head; grid `[blocks of columns, heads]`. ALONG_K: whether the stride of w along k is 1."""
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    of_head = w + head * w_strides[0]
    if EARLY:
        _prefetch(of_head, n, w_strides, K, N, BLOCK_K, BLOCK_N, ALONG_K)
    wait_for_kernel_before(EARLY)
    inside = (k < K)[:, None] & (n < N)[None, :]
    weight = tl.load(
        of_head + k[:, None] * w_strides[1] + n[None, :] * w_strides[2], mask=inside, other=0.0
    ).to(tl.float32)
    for t in tl.static_range(TOKENS):
        h = tl.load(x + t * x_strides[0] + head * x_strides[1] + k, mask=k < K, other=0.0).to(tl.float32)
        result = tl.sum(h[:, None] * weight, 0).to(out.dtype.element_ty)
        tl.store(out + (t * tl.num_programs(1) + head) * N + n, result, mask=n < N)


@triton.jit(do_not_specialize=["tokens"])
def by_head_tiles_kernel(
    x,  # as in `by_head_kernel`
    w,
    out,
    tokens,
    x_strides,
    w_strides,
    K: tl.constexpr,
    N: tl.constexpr,
    WIDE_K: tl.constexpr,  # K rounded up to a power of two
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALONG_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A tile of BLOCK_T tokens and BLOCK_C columns of a head; grid `[tiles of columns, heads, tiles of tokens]`."""
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    of_head = w + head * w_strides[0]
    if EARLY:
        _prefetch(of_head, n, w_strides, K, N, WIDE_K, BLOCK_C, ALONG_K)
    wait_for_kernel_before(EARLY)
    of_tokens = x + t * x_strides[0] + head * x_strides[1]
    result = tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_w, in_x = (n < N)[:, None] & (k < K)[None, :], (k < K)[:, None] & (t < tokens)[None, :]
        weight = tl.load(
            of_head + n[:, None] * w_strides[2] + k[None, :] * w_strides[1], mask=in_w, other=0.0
        )
        h = tl.load(of_tokens[None, :] + k[:, None], mask=in_x, other=0.0)
        result = tl.dot(weight, h, result)
    at = out + ((t * tl.num_programs(1) + head) * N)[None, :] + n[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=(n < N)[:, None] & (t < tokens)[None, :])


def multiply_by_head_triton(x: Tensor, w: Tensor) -> Tensor:
    """`matmul_by_head` for one or two tokens."""
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, k = x.shape
    n = w.shape[2]
    along_k = w.stride(1) == 1
    block_n, warps = (4, 1) if along_k else (32, 2)
    out = x.new_empty(tokens, heads, n)
    by_head_kernel[(triton.cdiv(n, block_n), heads)](
        *(x, w, out, x.stride(), w.stride()),
        K=k,
        N=n,
        TOKENS=tokens,
        BLOCK_K=max(64, power_of_two(k)),
        BLOCK_N=block_n,
        ALONG_K=along_k,
        num_warps=warps,
        **early_options(x),
    )
    return out


def multiply_by_head_tiles(x: Tensor, w: Tensor, *, tiles: ProductTiles | None = None) -> Tensor:
    """`matmul_by_head` for a few tokens in half precision, or batch-invariant for any number of them.

    tiles: by default from `tiles.py`.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, k = x.shape
    n = w.shape[2]
    tiles = tiles or by_head_tiles(tokens, k)
    out = x.new_empty(tokens, heads, n)
    by_head_tiles_kernel[(triton.cdiv(n, tiles.columns), heads, triton.cdiv(tokens, tiles.tokens))](
        *(x, w, out, tokens, x.stride(), w.stride()),
        K=k,
        N=n,
        WIDE_K=max(64, power_of_two(k)),
        ALONG_K=w.stride(1) == 1,
        **early_options(x),
        **tiles.options(k),
    )
    return out
