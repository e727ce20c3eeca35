"""Block-FP8 weights in kernels: one definition of their values, `ops/linear/fp8.py`, for all that read them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.linear import fp8

BLOCK = tl.constexpr(fp8.BLOCK)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter knows no assembly."""


@triton.jit
def values(weight, dtype: tl.constexpr, IN_ORDER: tl.constexpr):
    """Weights of FP8 without their scales, exact in every dtype.

    IN_ORDER: so that a product adds them along k as it adds weights that never were FP8. Seeing FP8, Triton lays the
    operands of instructions that take them from registers out in another order, which is quicker to load. The move
    hides from it that they were FP8. Hopper's instructions for tiles of 64 rows have one order anyway.
    """
    result = weight.to(tl.float32).to(dtype)
    if IN_ORDER and dtype != tl.float32 and not _INTERPRETED:
        result = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [result], dtype=result.dtype, is_pure=False, pack=2
        )
    return result


@triton.jit
def zeros(BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, scale):
    """What `add_product` adds to first: columns by tokens, or where weights are not in FP8 tokens by columns."""
    if scale is not None:
        return tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
    else:
        return tl.zeros([BLOCK_T, BLOCK_C], tl.float32)


@triton.jit
def add_product(result, h, w, scale, IN_ORDER: tl.constexpr):
    """`result` and a product: of tokens, `h` `[tokens, k]`, by rows of a weight, `w` `[columns, k]`.

    scale: `[columns]`, of these rows where k is within a block: values of FP8 are multiplied as they are, and the sum
        by the scale. Rows of the weight are those of the tile, as an instruction takes these from registers. None: the
        weight is not FP8.
    """
    # Float32 on the plain cores: tensor cores would round it.
    if scale is None:
        return tl.dot(h, tl.trans(w), result, input_precision="ieee")
    else:
        product = tl.dot(values(w, h.dtype, IN_ORDER), tl.trans(h), input_precision="ieee")
        return tl.fma(product, scale[:, None], result)


@triton.jit
def dequantize_kernel(
    weight,  # float8 [rows, columns], contiguous
    scale,  # float32 [ceil(rows / BLOCK), ceil(columns / BLOCK)], contiguous
    out,  # [rows, columns]
    rows,
    columns,
    ROWS: tl.constexpr,
):
    """ROWS rows of one block of columns; grid `[blocks of columns, tiles of rows]`."""
    r = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = (r * columns)[:, None] + c[None, :]
    s = tl.load(scale + tl.program_id(1) * ROWS // BLOCK * tl.num_programs(0) + tl.program_id(0))
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + at, (w.to(tl.float32) * s).to(out.dtype.element_ty), mask=inside)


def dequantize_triton(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in FP8, `[rows, columns]`, in another dtype."""
    rows, columns = weight.shape
    out = weight.new_empty(weight.shape, dtype=dtype)
    grid = (triton.cdiv(columns, fp8.BLOCK), triton.cdiv(rows, 32))
    dequantize_kernel[grid](weight, scale, out, rows, columns, ROWS=32, num_warps=4)
    return out
