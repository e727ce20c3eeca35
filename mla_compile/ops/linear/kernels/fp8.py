"""Block-FP8 weights in kernels: the conversion and scaling (`ops/linear/fp8.py`) that all kernels share."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.linear import fp8

BLOCK = tl.constexpr(fp8.BLOCK)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter does not run inline assembly."""


@triton.jit
def values(weight, dtype: tl.constexpr, IN_ORDER: tl.constexpr):
    """FP8 weights without their scales, in `dtype`, which holds them exactly.

    IN_ORDER: whether a dot adds along k in the order of half-precision weights. For FP8 weights, Triton lays operands
    that an instruction reads from registers out in another order, which is faster to load. The `mov` hides the FP8
    origin from Triton. Hopper's instructions for tiles of 64 rows have one order in any case.
    """
    result = weight.to(tl.float32).to(dtype)
    if IN_ORDER and dtype != tl.float32 and not _INTERPRETED:
        result = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [result], dtype=result.dtype, is_pure=False, pack=2
        )
    return result


@triton.jit
def zeros(BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, scale):
    """The initial accumulator of `add_product`: `[columns, tokens]` for FP8 weights, else `[tokens, columns]`."""
    if scale is not None:
        return tl.zeros([BLOCK_C, BLOCK_T], tl.float32)
    else:
        return tl.zeros([BLOCK_T, BLOCK_C], tl.float32)


@triton.jit
def add_product(result, h, w, scale, IN_ORDER: tl.constexpr):
    """`result` plus the product of tokens `h` `[tokens, k]` and weights `w` `[columns, k]`.

    scale: `[columns]`, the scales of these weights, with k within one block; None if the weight is not FP8. The sum of
        the unscaled products is multiplied by it. FP8 weights are along M, which an instruction reads from registers.
    """
    # "ieee": float32 uses CUDA cores, as tensor cores would round it.
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
    """A tile of ROWS matrix rows in one block of columns; grid `[blocks of columns, tiles of rows]`."""
    r = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = (r * columns)[:, None] + c[None, :]
    s = tl.load(scale + tl.program_id(1) * ROWS // BLOCK * tl.num_programs(0) + tl.program_id(0))
    w = tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + at, (w.to(tl.float32) * s).to(out.dtype.element_ty), mask=inside)


def dequantize_triton(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """An FP8 weight `[rows, columns]`, dequantised to a dtype."""
    rows, columns = weight.shape
    out = weight.new_empty(weight.shape, dtype=dtype)
    grid = (triton.cdiv(columns, fp8.BLOCK), triton.cdiv(rows, 32))
    dequantize_kernel[grid](weight, scale, out, rows, columns, ROWS=32, num_warps=4)
    return out


@triton.jit
def quantized(x, PARTS: tl.constexpr, dtype: tl.constexpr):
    """x, float32 `[tokens, BLOCK]`, as `(large + small) * scale` with FP8 values and a scale for each token.

    One part: the largest becomes 448, and small is not used.
    Two parts: large has the first 4 significant bits of a number, small the next 4. The scale is a power of two with
    which the largest becomes 128 to 256. A number that bfloat16 holds is exact from 2^-9 of the largest on; others
    have a relative error of up to 2^-8 there. The error of smaller ones is at most 2^-16 of the largest.
    """
    largest = tl.max(tl.abs(x), 1)
    if PARTS == 1:
        scale = tl.where(largest == 0.0, 1.0, largest / 448.0)
        large = (x / scale[:, None]).to(dtype)
        return large, large, scale
    else:
        exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 8) - 7
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        # Rounded as bits, as ptxas 12.8 and 13.0 miscompile the conversion of a new FP8 value back to float32.
        bits = scaled.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)
        return rounded.to(dtype), (scaled - rounded).to(dtype), scale


@triton.jit
def quantize_blocks(
    x, vectors, scales, x_stride, token, stride, block, PARTS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Blocks of a token as `quantized_like` has them; stride: its padded tokens."""
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = block < BLOCKS
    of_token = tl.load(x + token * x_stride + column, mask=inside[:, None], other=0.0).to(tl.float32)
    large, small, scale = quantized(of_token, PARTS, vectors.dtype.element_ty)
    at = vectors + token * (BLOCKS * BLOCK) + column
    tl.store(at, large, mask=inside[:, None])
    if PARTS == 2:
        tl.store(at + stride.to(tl.int64) * (BLOCKS * BLOCK), small, mask=inside[:, None])
    tl.store(scales + block * stride + token, scale, mask=inside)


@triton.jit
def padded_tokens(tokens):
    """The tokens of `quantized_like`."""
    return (tokens + 3) // 4 * 4


BLOCKS_AT_ONCE = 16
"""Blocks of a token that a program quantises."""


@triton.jit(do_not_specialize=["tokens"])
def quantize_kernel(
    x,  # [tokens, BLOCKS * BLOCK], strides (x_stride, 1)
    vectors,  # of `quantized_like`
    scales,
    x_stride,
    tokens,
    BLOCKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """AT_ONCE blocks of a token, as one vector; grid `[tokens, BLOCKS / AT_ONCE]`."""
    block = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = tl.program_id(0).to(tl.int64)
    quantize_blocks(x, vectors, scales, x_stride, token, padded_tokens(tokens), block, 1, BLOCKS)


def quantized_like(x: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Memory for tokens as sums of `parts` FP8 vectors (see `quantized`).

    Returns:
        float8_e4m3fn `[parts, padded tokens, columns]`, and float32 scales `[columns / 128, padded tokens]`. Tokens are
        padded to a multiple of 4, as cuBLAS requires.
    """
    tokens, columns = x.shape
    padded = -(-tokens // 4) * 4
    vectors = x.new_empty((parts, padded, columns), dtype=fp8.DTYPE)
    return vectors, x.new_empty((columns // fp8.BLOCK, padded), dtype=torch.float32)


def quantize_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each block of 128 columns of a token in FP8, as DeepSeek quantises activations (arXiv 2412.19437, section 3.3.2).

    Args:
        x: `[tokens, columns]`, a multiple of 128 columns.

    Returns:
        float8_e4m3fn `[padded tokens, columns]`, and scales as of `quantized_like`; padding is uninitialised.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    blocks = x.shape[1] // fp8.BLOCK
    vectors, scales = quantized_like(x, 1)
    quantize_kernel[(len(x), triton.cdiv(blocks, BLOCKS_AT_ONCE))](
        x, vectors, scales, x.stride(0), len(x), BLOCKS=blocks, AT_ONCE=BLOCKS_AT_ONCE, num_warps=4
    )
    return vectors[0], scales
