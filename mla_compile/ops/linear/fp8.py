"""Block-FP8 weights, as DeepSeek publishes them (arXiv 2412.19437, section 3.3.2): their values and rounding.

A weight is float8_e4m3fn, and each block of 128 x 128 has a float32 scale. A matmul multiplies x by `value * scale`, in
one of three ways:

- rounded: `value * scale` in float32 is rounded to the dtype of x, then multiplied. Plain torch does this, and so do
  dense matmuls that write the dequantised weight first: those of more than 128 tokens; in float32 those of more than
  one; on GPUs newer than SM 90 those of more than 32, and all batch-invariant ones. The relative error of a weight is
  at most 2^-8 in bfloat16 and 2^-11 in float16.
- by block: x is multiplied by `value`, which is exact in every dtype of x, and the float32 sum over a block, or a part
  of it, by `scale`. The remaining kernels do this. No weight is rounded, so the error against `value * scale` in
  float64 is no larger than that of a float32 matmul by weights that need no rounding, as long as 2^16 |x| is finite in
  float32.
- FP8 by FP8: experts in bfloat16 on Hopper, from three (token, expert) pairs each on, and all batch-invariant ones, if
  both sizes are multiples of 128. A token is the sum of two FP8 vectors, which hold its numbers but for the last bits
  of those below 2^-9 of a block's largest (`quantized` in `kernels/fp8.py`). Hopper adds the products of a block with
  13 to 14 bits (arXiv 2412.19437, section 3.5.2). As a norm, this error is less than that of rounding the result to
  bfloat16.

With `fp8_activations`, x is quantised too if there are many tokens: a token has a scale for each 128 columns, and the
float32 sum over a block of products of FP8 values is multiplied by both scales.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.adjacent import lies_before, one_matrix
from mla_compile.ops.linear.operands import FP8LinearOperands
from mla_compile.ops.validate import inference_only
from mla_compile.torch_internals import statically_known_true

BLOCK = 128
"""Rows and columns of a block."""
DTYPE = torch.float8_e4m3fn
_LARGEST = 448.0


def scale_shape(weight_shape: tuple[int, ...], block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[int, ...]:
    """Shape of the scales of a matrix or a stack: one per block of the last two dimensions, partial blocks included."""
    blocks = [-(-size // step) for size, step in zip(weight_shape[-2:], block)]
    return (*weight_shape[:-2], *blocks)


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """Each weight times the scale of its block, float32.

    weight: float8 `[..., rows, columns]`; scale: float `[..., ceil(rows / block rows), ceil(columns / block columns)]`.
    """
    rows, columns = weight.shape[-2:]
    # A config may give a block larger than the matrix, so blocks are clamped to its size.
    of_rows = scale.float().repeat_interleave(min(block[0], rows), dim=-2)[..., :rows, :]
    return weight.float() * of_rows.repeat_interleave(min(block[1], columns), dim=-1)[..., :columns]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a float weight `[..., rows, columns]` to FP8 values and scales. In each block the largest becomes 448.

    The error of a number is at most half of the distance between FP8 numbers: 2^-4 of the number, or 2^-10 of the scale
    for tiny ones.
    """
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(
        -3, (-1, BLOCK)
    )  # [..., row blocks, BLOCK, column blocks, BLOCK]
    scale = blocks.abs().amax((-3, -1)) / _LARGEST
    scale = scale.masked_fill(scale == 0, 1.0)  # a block of zeros
    scaled = (blocks / scale[..., :, None, :, None]).clamp(-_LARGEST, _LARGEST)
    values = scaled.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]
    return values.to(DTYPE).contiguous(), scale


def check(name: str, weight: Tensor, scale_name: str, scale: Tensor | None, *, halves: int = 1) -> None:
    """Check the dtype and layout of FP8 weights `[..., rows, columns]` and their scales.

    halves: the number of matrices with their own scales that are stacked along the rows of a weight.

    Raises:
        MLAError: names the invalid argument.
    """
    if weight.dtype != DTYPE or not weight.is_contiguous():
        got = weight.dtype if weight.dtype != DTYPE else f"strides {weight.stride()}"
        raise MLAError(name, "contiguous float8_e4m3fn, because scales are given", got)
    inference_only(name, weight)
    *leading, rows, columns = weight.shape
    blocks = scale_shape((*leading, rows // halves, columns))
    expected = [*blocks[:-2], halves * blocks[-2], blocks[-1]]
    if scale is None or scale.dtype != torch.float32 or not scale.is_contiguous():
        got = "None" if scale is None else f"{scale.dtype} with strides {scale.stride()}"
        raise MLAError(scale_name, f"contiguous float32 {expected}", got)
    agrees = scale.dim() == len(expected) and scale.device == weight.device
    if not agrees or any(statically_known_true(a != b) for a, b in zip(scale.shape, expected, strict=True)):
        raise MLAError(
            scale_name,
            f"one scale per block of {BLOCK} x {BLOCK}: {expected} on {weight.device}",
            f"{list(scale.shape)} on {scale.device}",
        )


def is_one_matrix(first: Tensor, first_scale: Tensor, second: Tensor, second_scale: Tensor) -> bool:
    """Whether two weights and their scales are adjacent in memory, and a block ends with the first weight."""
    aligned = first.shape[0] % BLOCK == 0
    return aligned and lies_before(first, second) and lies_before(first_scale, second_scale)


def each_matrix(product: Callable[[Tensor, Tensor, Tensor], Tensor], operands: FP8LinearOperands) -> Tensor:
    """`product` of x and one or two weights with scales, `[tokens, columns]`: one call if they are one matrix."""
    x, first, first_scale, second, second_scale, _ = operands
    if second is None or second_scale is None:
        return product(x, first, first_scale)
    if is_one_matrix(first, first_scale, second, second_scale):
        return product(x, one_matrix(first, second), one_matrix(first_scale, second_scale))
    return torch.cat([product(x, first, first_scale), product(x, second, second_scale)], dim=1)
