"""Rows of a weight times one token, on the plain cores: what the kernels of one token share.

A thread has 16 bytes of a row at a time, a unit, and adds up their products by itself. Of FP8 the values are multiplied
as they are, and a unit's sum by the scale of its block: a multiplication for 16 weights instead of one for each.
"""

import triton
import triton.language as tl

from mla_compile.ops.kernels.fp8 import BLOCK


@triton.jit
def unit_places(start, BLOCK_K: tl.constexpr, UNIT: tl.constexpr):
    """The places of BLOCK_K elements of a row, `[units, UNIT]`."""
    return start + tl.arange(0, BLOCK_K // UNIT)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]


@triton.jit
def load_units(pointers, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """What lies there, 0 behind the end of a row; `k` are the places, of which the last two dimensions are units."""
    if WIDTH % BLOCK_K == 0:
        return tl.load(pointers)
    return tl.load(pointers, mask=k < WIDTH, other=0.0)


@triton.jit
def row_sums(row_at, scale_at, h, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of products by units, float32 `[rows, units]`.

    row_at: `[rows]`, where rows begin; scale_at: the scales of their blocks, one row of them; None: no FP8.
    h: `[units, UNIT]` of the token, float32; k: their places.
    """
    w = load_units(row_at[:, None, None] + k[None, :, :], k[None, :, :], WIDTH, BLOCK_K)
    sums = tl.sum(w.to(tl.float32) * h[None, :, :], 2)
    if scale_at is not None:
        block = tl.min(k, 1) // BLOCK
        sums *= tl.load(scale_at + block, mask=block < (WIDTH + BLOCK - 1) // BLOCK, other=0.0)[None, :]
    return sums
