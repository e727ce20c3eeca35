"""`x @ w` for a matrix of weights a group, with one order along k: a row's bits do not depend on the other rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.plan import MatmulTiles, device_of, matmul_tiles


@triton.jit(do_not_specialize=["tokens"])
def matmul_kernel(
    x,  # [tokens, groups, K], the last dimension contiguous
    w,  # [groups, K, n]
    out,  # [tokens, groups, n]
    tokens,
    groups,
    n,
    x_token_stride,
    x_group_stride,
    w_group_stride,
    w_k_stride,
    w_n_stride,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T tokens, BLOCK_C columns of one group; grid `[tiles of tokens * tiles of columns, groups]`.

    Programs of the same columns follow one another: all but the first find the weights in the cache.
    """
    token_tiles = (tokens + BLOCK_T - 1) // BLOCK_T
    program = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    t = program % token_tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    c = program // token_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.arange(0, BLOCK_K)
    x_at = x + group * x_group_stride + (t.to(tl.int64) * x_token_stride)[:, None] + k[None, :]
    w_at = w + group * w_group_stride + (c.to(tl.int64) * w_n_stride)[None, :] + (k * w_k_stride)[:, None]
    result = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, K, BLOCK_K):
        in_x, in_w = (t < tokens)[:, None], (c < n)[None, :]
        if K % BLOCK_K != 0:
            in_x &= (start + k < K)[None, :]
            in_w &= (start + k < K)[:, None]
        rows = tl.load(x_at, mask=in_x, other=0.0)
        columns = tl.load(w_at, mask=in_w, other=0.0)
        # Float32 on the plain cores: tensor cores would round it.
        result = tl.dot(rows, columns, result, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K * w_k_stride
    at = out + ((t.to(tl.int64) * groups + group) * n)[:, None] + c[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (c < n)[None, :])


def matmul_triton(x: Tensor, w: Tensor, *, tiles: MatmulTiles | None = None) -> Tensor:
    """`batch_invariant_matmul` on the GPU or in Triton's interpreter, with tiles of `plan.py` unless given."""
    x = x if x.stride(2) == 1 else x.contiguous()
    (tokens, groups, k), n = x.shape, w.shape[2]
    tiles = tiles or matmul_tiles(tokens, groups * n, x.dtype, device_of(x))
    out = x.new_empty(tokens, groups, n)
    grid = (triton.cdiv(tokens, tiles.tokens) * triton.cdiv(n, tiles.columns), groups)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        matmul_kernel[grid](
            x, w, out, tokens, groups, n, *x.stride()[:2], *w.stride(), K=k, **tiles.options()
        )
    return out
