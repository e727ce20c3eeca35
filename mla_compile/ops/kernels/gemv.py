"""`x @ weight.T` of one or two tokens, on the plain cores: a program reads a few rows of the weight, whole.

Tensor cores have nothing to do here, and what feeds them waits for whole tiles of weights. Products of GLM-4.7-Flash
take an H200 3.0 to 6.7 us this way, and 5.0 to 11 by cuBLAS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mla_compile.ops.kernels.plan import starts_early


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
    """BLOCK_C columns of the result; grid `[blocks of columns]`.

    EARLY: the first weights are requested while the kernel before, which has `x` to write, still runs.
    """
    c = (tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    t = tl.arange(0, TOKENS)
    k = tl.arange(0, BLOCK_K)
    weight_at = weight + c[:, None] * K + k[None, :]
    x_at = x + t[:, None] * x_stride + k[None, :]
    in_columns = (c < columns)[:, None]
    w = tl.load(weight_at, mask=in_columns & (k < K)[None, :], other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    h = tl.load(x_at, mask=(k < K)[None, :], other=0.0)
    acc = h.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    for start in range(BLOCK_K, K, BLOCK_K):
        inside = (start + k < K)[None, :]
        w = tl.load(weight_at + start, mask=in_columns & inside, other=0.0)
        h = tl.load(x_at + start, mask=inside, other=0.0)
        acc += h.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
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
