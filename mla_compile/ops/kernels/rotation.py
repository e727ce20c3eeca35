"""Rotation of a token's heads in place, which two kernels do."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.plan import power_of_two

_MOST_PAIRS = 1024
"""That a program rotates: eight a thread."""


class Angles(NamedTuple):
    """Cosines and sines in a kernel, `[tokens, HALF or 2 * HALF]`: its arguments of these names."""

    cos: Any
    sin: Any
    cos_stride: Any
    cos_step: Any
    sin_stride: Any
    sin_step: Any


@triton.jit
def angles_of(angles, token, pair, HALF: tl.constexpr, SECOND: tl.constexpr):
    """Those of a token's pairs: of the first elements, then of the second ones, which start at column SECOND."""
    cos = angles.cos + token * angles.cos_stride
    sin = angles.sin + token * angles.sin_stride
    cos_a = tl.load(cos + pair * angles.cos_step, mask=pair < HALF, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + pair * angles.sin_step, mask=pair < HALF, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + (SECOND + pair) * angles.cos_step, mask=pair < HALF, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + (SECOND + pair) * angles.sin_step, mask=pair < HALF, other=0.0).to(tl.float32)
    return cos_a, sin_a, cos_b, sin_b


@triton.jit
def rotate_heads(
    q_pe,  # [tokens, heads, 2 * HALF], the last stride 1
    angles,
    token,
    block,  # which heads: the block-th BLOCK_HEADS of them
    heads,
    token_stride,
    head_stride,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    INTERLEAVED_IN: tl.constexpr,
    INTERLEAVED_OUT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """`q_pe[token] = rotate(q_pe[token])` for some heads. A product is rounded before another one is added to it."""
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    row = q_pe + token * token_stride + head[:, None] * head_stride
    dtype = q_pe.dtype.element_ty

    first_in = 2 * pair if INTERLEAVED_IN else pair
    second_in = first_in + (1 if INTERLEAVED_IN else HALF)
    a = tl.load(row + first_in[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + second_in[None, :], mask=inside, other=0.0).to(tl.float32)
    cos_a, sin_a, cos_b, sin_b = angles_of(angles, token, pair, HALF, SECOND)
    cos_a, sin_a, cos_b, sin_b = cos_a[None, :], sin_a[None, :], cos_b[None, :], sin_b[None, :]
    if INTERLEAVED_IN != INTERLEAVED_OUT:
        tl.debug_barrier()  # an element is written to where another thread has read
    first_out = 2 * pair if INTERLEAVED_OUT else pair
    second_out = first_out + (1 if INTERLEAVED_OUT else HALF)
    # Spelled out, so that all kernels that inline this round alike.
    tl.store(row + first_out[None, :], tl.fma(a, cos_a, -(b * sin_a)).to(dtype), mask=inside)
    tl.store(row + second_out[None, :], tl.fma(b, cos_b, a * sin_b).to(dtype), mask=inside)


def blocks_of_heads(q_pe: Tensor) -> tuple[int, dict[str, int]]:
    """How many programs rotate a token's heads, and the sizes of `rotate_heads`."""
    heads, half = q_pe.shape[1], power_of_two(q_pe.shape[2] // 2)
    block = min(power_of_two(heads), max(1, _MOST_PAIRS // half))
    return triton.cdiv(heads, block), {"BLOCK_HEADS": block, "BLOCK_HALF": half}
