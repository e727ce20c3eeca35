"""Rotation of a token's heads in place, shared by two kernels."""

from typing import Any, NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import power_of_two

_MAX_PAIRS = 1024
"""The most pairs that a program rotates: eight per thread."""


class Angles(NamedTuple):
    """The cosines and sines of a kernel, `[tokens, HALF or 2 * HALF]`, with their strides."""

    cos: Any
    sin: Any
    cos_stride: Any
    cos_step: Any
    sin_stride: Any
    sin_step: Any


class Queries(NamedTuple):
    """The queries that a kernel rotates: `[tokens, heads, 2 * HALF]`, last stride 1; None: nothing."""

    q_pe: Any
    heads: Any
    token_stride: Any
    head_stride: Any

    @classmethod
    def of(cls, q_pe: Tensor | None) -> Self:
        """The queries of a call."""
        return cls(None, 0, 0, 0) if q_pe is None else cls(q_pe, q_pe.shape[1], *q_pe.stride()[:2])


class Sizes(NamedTuple):
    """The constants that a kernel is compiled for."""

    HALF: int
    SECOND: int  # the first column of cos and sin for the second elements of pairs
    INTERLEAVED_IN: bool
    INTERLEAVED_OUT: bool
    BLOCK_HEADS: int
    BLOCK_HALF: int


@triton.jit
def angles_of(angles, token, pair, S: tl.constexpr):
    """The angles of a token's pairs: for the first elements, then for the second ones, from column SECOND on."""
    cos = angles.cos + token * angles.cos_stride
    sin = angles.sin + token * angles.sin_stride
    cos_a = tl.load(cos + pair * angles.cos_step, mask=pair < S.HALF, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + pair * angles.sin_step, mask=pair < S.HALF, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + (S.SECOND + pair) * angles.cos_step, mask=pair < S.HALF, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + (S.SECOND + pair) * angles.sin_step, mask=pair < S.HALF, other=0.0).to(tl.float32)
    return cos_a, sin_a, cos_b, sin_b


@triton.jit
def rotate_heads(queries, angles, token, block, S: tl.constexpr):
    """`q_pe[token] = rotate(q_pe[token])` for the block-th BLOCK_HEADS of the heads.

    One product is rounded before the other is added to it.
    """
    HALF: tl.constexpr = S.HALF
    head = block * S.BLOCK_HEADS + tl.arange(0, S.BLOCK_HEADS)
    pair = tl.arange(0, S.BLOCK_HALF)
    column = tl.arange(0, 2 * S.BLOCK_HALF)
    inside = (head < queries.heads)[:, None] & (pair < HALF)[None, :]
    whole = (head < queries.heads)[:, None] & (column < 2 * HALF)[None, :]
    row = queries.q_pe + token * queries.token_stride + head[:, None] * queries.head_stride
    dtype = queries.q_pe.dtype.element_ty

    if S.INTERLEAVED_IN:  # one access to a head is wider than one to every other column
        both = tl.load(row + column[None, :], mask=whole, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, [S.BLOCK_HEADS, S.BLOCK_HALF, 2]))
    else:
        a = tl.load(row + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    cos_a, sin_a, cos_b, sin_b = angles_of(angles, token, pair, S)
    cos_a, sin_a, cos_b, sin_b = cos_a[None, :], sin_a[None, :], cos_b[None, :], sin_b[None, :]
    if S.INTERLEAVED_IN != S.INTERLEAVED_OUT:
        tl.debug_barrier()  # a thread writes where another one must have read
    # Explicit, so that all kernels that inline this round alike.
    first = tl.fma(a, cos_a, -(b * sin_a)).to(dtype)
    second = tl.fma(b, cos_b, a * sin_b).to(dtype)
    if S.INTERLEAVED_OUT:
        both = tl.reshape(tl.join(first, second), [S.BLOCK_HEADS, 2 * S.BLOCK_HALF])
        tl.store(row + column[None, :], both, mask=whole)
    else:
        tl.store(row + pair[None, :], first, mask=inside)
        tl.store(row + HALF + pair[None, :], second, mask=inside)


def rotation_of(
    cos: Tensor, sin: Tensor, heads: int, interleaved_in: bool, interleaved_out: bool, half: int
) -> tuple[Angles, Sizes, int]:
    """A kernel's arguments to rotate `half` pairs of each head, and the number of programs for a token's heads."""
    block_half = power_of_two(half)
    block = min(power_of_two(heads), max(1, _MAX_PAIRS // block_half))
    sizes = Sizes(half, cos.shape[1] - half, interleaved_in, interleaved_out, block, block_half)
    return Angles(cos, sin, *cos.stride(), *sin.stride()), sizes, triton.cdiv(heads, block)
