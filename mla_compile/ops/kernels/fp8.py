"""Block-FP8 weights in a kernel: one definition of their values, `ops/fp8.py`, for all that read them."""

import triton
import triton.language as tl

from mla_compile.ops import fp8

BLOCK = tl.constexpr(fp8.BLOCK)


@triton.jit
def dequantized(weight, scale, dtype: tl.constexpr):
    """Weights of FP8 times the scales of their blocks, rounded to a dtype."""
    return (weight.to(tl.float32) * scale).to(dtype)
