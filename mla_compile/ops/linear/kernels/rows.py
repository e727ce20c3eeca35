"""Rows of a weight times a token, on the plain cores: what `gemv.py` and `moe_gemv.py` share.

A thread has a unit of a row at a time, and adds up its products by itself. Of FP8 the values are multiplied as they
are, and a unit's sum by the scale of its block: a multiplication for 8 weights instead of one for each.
"""

import triton
import triton.language as tl

from mla_compile.ops.linear.kernels.fp8 import BLOCK

UNIT = tl.constexpr(8)
"""Elements: 16 bytes of half precision, the most that a thread loads at once, and 8 of FP8. With 16 of FP8 a thread's
weights and its elements of the token would not be the same ones, and the latter go through shared memory."""


@triton.jit
def unit_places(start, BLOCK_K: tl.constexpr):
    """The places of BLOCK_K elements of a row, `[units, UNIT]`."""
    return start + tl.arange(0, BLOCK_K // UNIT)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]


@triton.jit
def unit_zeros(ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """What `unit_sums` are added to."""
    return tl.zeros([ROWS, BLOCK_K // UNIT], tl.float32)


@triton.jit
def load_units(row_at, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """What is at places k of rows, 0 behind their end; of one row `[units, UNIT]`, of `[rows]` pointers one dimension
    more.
    """
    if len(row_at.shape) == 1:
        at = row_at[:, None, None] + k[None, :, :]
        if WIDTH % BLOCK_K == 0:
            return tl.load(at)
        return tl.load(at, mask=(k < WIDTH)[None, :, :], other=0.0)
    else:
        if WIDTH % BLOCK_K == 0:
            return tl.load(row_at + k)
        return tl.load(row_at + k, mask=k < WIDTH, other=0.0)


@triton.jit
def unit_sums(w, h, scale_at, start, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of products by units, float32 `[rows, units]`, of BLOCK_K elements from `start` on.

    w: `[rows, units, UNIT]`; h: of the token, `[units, UNIT]`; scale_at: the scales of the rows' blocks, which all of
        them share; None: w is not FP8.
    """
    sums = tl.sum(w.to(tl.float32) * h.to(tl.float32)[None, :, :], 2)
    if scale_at is not None:
        first = start + tl.arange(0, BLOCK_K // UNIT) * UNIT
        sums *= tl.load(scale_at + first // BLOCK, mask=first < WIDTH, other=0.0)[None, :]
    return sums
