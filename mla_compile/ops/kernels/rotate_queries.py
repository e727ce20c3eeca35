"""Rotation of queries in place: a program reads some heads of a token, then writes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.early import starts_early, wait_for_kernel_before
from mla_compile.ops.kernels.plan import power_of_two

_MOST_PAIRS = 1024
"""That a program rotates: eight a thread."""


@triton.jit
def rotate_queries_kernel(
    q_pe,  # [tokens, heads, 2 * HALF], the last stride 1
    cos,  # [tokens, HALF or 2 * HALF]
    sin,  # likewise
    heads,
    token_stride,
    head_stride,
    cos_stride,
    cos_step,
    sin_stride,
    sin_step,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,  # the column of cos and sin where the second elements' ones start
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`q_pe[token] = rotate(q_pe[token])`; grid `[tokens, blocks of heads]`."""
    wait_for_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    row = q_pe + token * token_stride + head[:, None] * head_stride
    dtype = q_pe.dtype.element_ty

    first_in = 2 * pair if INTERLEAVED_IN else pair
    second_in = first_in + (1 if INTERLEAVED_IN else HALF)
    a = tl.load(row + first_in[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + second_in[None, :], mask=inside, other=0.0).to(tl.float32)
    cos += token * cos_stride
    sin += token * sin_stride
    cos_a = tl.load(cos + pair * cos_step, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + pair * sin_step, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + (SECOND + pair) * cos_step, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + (SECOND + pair) * sin_step, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    if INTERLEAVED_IN != INTERLEAVED_OUT:
        tl.debug_barrier()  # an element is written to where another thread has read
    first_out = 2 * pair if INTERLEAVED_OUT else pair
    second_out = first_out + (1 if INTERLEAVED_OUT else HALF)
    tl.store(row + first_out[None, :], (a * cos_a - b * sin_a).to(dtype), mask=inside)
    tl.store(row + second_out[None, :], (b * cos_b + a * sin_b).to(dtype), mask=inside)


def rotate_queries_triton(
    q_pe: Tensor, cos: Tensor, sin: Tensor, interleaved_in: bool, interleaved_out: bool
) -> None:
    """What `mla_rotate_queries` does, with its arguments, on the GPU or in Triton's interpreter."""
    tokens, heads, rope = q_pe.shape
    half = power_of_two(rope // 2)
    block = min(power_of_two(heads), max(1, _MOST_PAIRS // half))
    with torch.cuda.device_of(q_pe):  # Triton launches on the current device
        rotate_queries_kernel[(tokens, triton.cdiv(heads, block))](
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
            BLOCK_HEADS=block,
            BLOCK_HALF=half,
            EARLY=starts_early(q_pe),
            num_warps=4,
            launch_pdl=starts_early(q_pe),
        )
