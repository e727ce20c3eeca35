"""A matrix for each head, by one or two tokens, on the plain cores: a program reads a few columns of one of them.

As in `gemv.py` weights come to the cache while the kernel before still runs.
"""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.early import early_options, prefetch, wait_for_kernel_before
from mla_compile.ops.kernels.plan import power_of_two


@triton.jit
def by_head_kernel(
    x,  # [TOKENS, heads, K], elements of k side by side
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
    """BLOCK_N columns of a head; grid `[blocks of columns, heads]`.

    BLOCK_K: K rounded up to a power of two. ALONG_K: whether elements of k lie side by side.
    """
    head = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    of_head = w + head * w_strides[0]
    if EARLY:  # the head's columns come to the cache
        LINE: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
        if ALONG_K:
            line = tl.minimum(LINE * tl.arange(0, BLOCK_K // LINE), K - 1)
            prefetch(of_head + tl.minimum(n, N - 1)[:, None] * w_strides[2] + line[None, :] * w_strides[1])
        else:
            line = tl.min(n, 0) + LINE * tl.arange(0, (BLOCK_N + LINE - 1) // LINE)
            row_of_k = of_head + tl.minimum(k, K - 1)[:, None] * w_strides[1]
            prefetch(row_of_k + tl.minimum(line, N - 1)[None, :] * w_strides[2])
    wait_for_kernel_before(EARLY)
    inside = (k < K)[:, None] & (n < N)[None, :]
    weight = tl.load(
        of_head + k[:, None] * w_strides[1] + n[None, :] * w_strides[2], mask=inside, other=0.0
    ).to(tl.float32)
    for t in tl.static_range(TOKENS):
        h = tl.load(x + t * x_strides[0] + head * x_strides[1] + k, mask=k < K, other=0.0).to(tl.float32)
        result = tl.sum(h[:, None] * weight, 0).to(out.dtype.element_ty)
        tl.store(out + (t * tl.num_programs(1) + head) * N + n, result, mask=n < N)


def multiply_by_head_triton(x: Tensor, w: Tensor) -> Tensor:
    """What `matmul_by_head` computes of one or two tokens."""
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
