"""Dot products of weights and a token on CUDA cores: loads and partial sums that `gemv.py` and `moe_gemv.py` share.

A thread takes one unit of k at a time and adds its products. FP8 values are multiplied unscaled, and the sum of a unit
is multiplied by the scale of its block: one multiplication per 8 weights instead of one per weight.
"""

import triton
import triton.language as tl

from mla_compile.ops.linear.kernels.fp8 import BLOCK

UNIT = tl.constexpr(8)
"""Elements: 16 bytes in half precision, the most that a thread loads at once, and 8 bytes in FP8. With 16 elements of
FP8, a thread's weights and its elements of the token would differ, and the token would pass through shared memory."""


@triton.jit
def unit_places(start, BLOCK_K: tl.constexpr):
    """The offsets of BLOCK_K elements along k from `start` on, `[units, UNIT]`."""
    return start + tl.arange(0, BLOCK_K // UNIT)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]


@triton.jit
def unit_zeros(ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The initial accumulator of `unit_sums`."""
    return tl.zeros([ROWS, BLOCK_K // UNIT], tl.float32)


@triton.jit
def load_units(row_at, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """The elements at offsets k from `row_at`, 0 past WIDTH: `[units, UNIT]`, or `[rows, units, UNIT]` for `[rows]`
    pointers to matrix rows.
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
    """The sum of `w * h` in each unit, float32 `[rows, units]`, for BLOCK_K elements of k from `start` on.

    w: weights of matrix rows, `[rows, units, UNIT]`; h: the token, `[units, UNIT]`.
    scale_at: the scales along k of the one block that holds all of these matrix rows; None if w is not FP8.
    """
    sums = tl.sum(w.to(tl.float32) * h.to(tl.float32)[None, :, :], 2)
    if scale_at is not None:
        # A select, not a product: past WIDTH, where a weight is the constant 0, ptxas 12.8 and 13.0 convert arbitrary
        # bits from FP8 instead, and these may be NaN.
        first = start + tl.arange(0, BLOCK_K // UNIT) * UNIT
        inside = first < WIDTH
        scale = tl.load(scale_at + first // BLOCK, mask=inside, other=0.0)
        sums = tl.where(inside[None, :], sums * scale[None, :], 0.0)
    return sums
