"""`x @ weight.T` of one or two tokens, on the plain cores: a program reads a few rows of the weight, whole.

Tensor cores have nothing to do here, and what feeds them waits for whole tiles of weights. Products of GLM-4.7-Flash
take an H200 3.0 to 6.7 us this way, and 5.0 to 11 by cuBLAS. Its weights come to the cache while the kernel before it
still runs (`early.py`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.early import prefetch, starts_early, wait_for_kernel_before

LINES = tl.constexpr(32)
"""Cache lines of a row that are requested at once: as many for each of BLOCK_C rows as the threads that ask."""


@triton.jit
def gemv_kernel(
    x,  # [TOKENS, K], rows x_stride apart
    weight,  # [columns, K], contiguous
    out,  # [TOKENS, columns]
    x_stride,
    columns,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_C columns of the result; grid `[blocks of columns]`."""
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    in_columns = (c < columns)[:, None]
    row_at = weight + tl.minimum(c, columns - 1)[:, None] * K
    if EARLY:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        for start in tl.static_range(0, K, LINE * LINES):
            line = start + LINE * tl.arange(0, LINES)
            prefetch(row_at + tl.minimum(line, K - 1)[None, :])
    wait_for_kernel_before(EARLY)
    t = tl.arange(0, TOKENS)
    acc = tl.zeros([TOKENS, BLOCK_C, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < K)[None, :]
        w = tl.load(row_at + k[None, :], mask=in_columns & inside, other=0.0).to(tl.float32)
        h = tl.load(x + t[:, None] * x_stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
        acc += h[:, None, :] * w[None, :, :]
    at = out + t[:, None] * columns + c[None, :]
    tl.store(at, tl.sum(acc, 2).to(out.dtype.element_ty), mask=(c < columns)[None, :])


def linear_gemv(
    x: Tensor, first: Tensor, second: Tensor | None = None, *, tiles: tuple[int, int, int] | None = None
) -> Tensor:
    """What `fused_linear` computes of one or two tokens, by weights that are one matrix in memory.

    tiles: columns and elements of k that a program reads at a time, and its warps. Of an H200's choices these won.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, k = x.shape
    columns = first.shape[0] + (0 if second is None else second.shape[0])
    block_c, block_k, warps = tiles or (4 if tokens > 1 or k <= 2048 else 2, 1024, 4)
    out = x.new_empty(tokens, columns)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        gemv_kernel[(triton.cdiv(columns, block_c),)](
            x,
            first,
            out,
            x.stride(0),
            columns,
            K=k,
            TOKENS=tokens,
            BLOCK_C=block_c,
            BLOCK_K=block_k,
            EARLY=starts_early(x),
            num_warps=warps,
            launch_pdl=starts_early(x),
        )
    return out
