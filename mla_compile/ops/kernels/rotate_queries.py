"""Rotation of queries in place: a program reads some heads of a token, then writes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.early import early_options, wait_for_kernel_before
from mla_compile.ops.kernels.rotation import Angles, blocks_of_heads, rotate_heads


@triton.jit
def rotate_queries_kernel(
    q_pe,
    cos,
    sin,
    heads,
    token_stride,
    head_stride,
    cos_stride,
    cos_step,
    sin_stride,
    sin_step,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`rotate_heads` of all queries; grid `[tokens, blocks of heads]`."""
    wait_for_kernel_before(EARLY)
    angles = Angles(cos, sin, cos_stride, cos_step, sin_stride, sin_step)
    rotate_heads(
        q_pe, angles, tl.program_id(0).to(tl.int64), tl.program_id(1), heads, token_stride, head_stride,
        HALF, SECOND, INTERLEAVED_IN, INTERLEAVED_OUT, BLOCK_HEADS, BLOCK_HALF,
    )  # fmt: skip


def rotate_queries_triton(
    q_pe: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool
) -> None:
    """What `mla_rotate_queries` does, with its arguments, on the GPU or in Triton's interpreter."""
    tokens, heads, rope = q_pe.shape
    blocks, sizes = blocks_of_heads(q_pe)
    with torch.cuda.device_of(q_pe):  # Triton launches on the current device
        rotate_queries_kernel[(tokens, blocks)](
            q_pe,
            cos,
            sin,
            heads,
            *q_pe.stride()[:2],
            *cos.stride(),
            *sin.stride(),
            HALF=rope // 2,
            SECOND=cos.shape[1] - rope // 2,
            INTERLEAVED_IN=interleaved_in,
            INTERLEAVED_OUT=interleaved_out,
            **sizes,
            num_warps=4,
            **early_options(q_pe),
        )
