"""`x @ weight.T` by a block-FP8 weight (`ops/linear/fp8.py`): kernels read half of the bytes and convert in registers.

One token uses CUDA cores (`gemv.py`); more use tensor cores, block by block (`blocks.py`). Both multiply FP8 values,
which are exact in every dtype of x, and scale a sum. Every tile of tokens repeats the conversion, so for many tokens it
is faster to write the dequantised weight once.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops.linear.fp8 import each_matrix
from mla_compile.ops.linear.kernels import blocks, gemv
from mla_compile.ops.linear.kernels.fp8 import dequantize_triton
from mla_compile.ops.linear.operands import FP8LinearOperands
from mla_compile.ops.linear.tiles import ProductTiles


def linear_gemv(operands: FP8LinearOperands, *, tiles: gemv.Tiles | None = None) -> Tensor:
    """`fp8_linear` for one token. tiles: by default from `gemv.fp8_tiles`."""
    chosen = tiles or gemv.fp8_tiles(operands.x.shape[1])
    return each_matrix(lambda x, weight, scale: gemv.multiply(x, weight, scale, chosen)[0], operands)


def linear_blocks(operands: FP8LinearOperands, *, tiles: ProductTiles | None = None) -> Tensor:
    """`fp8_linear` for a few tokens in half precision."""
    return each_matrix(partial(blocks.multiply, tiles=tiles), operands)


def linear_in_order(operands: FP8LinearOperands) -> Tensor:
    """Batch-invariant `fp8_linear` in half precision."""
    return each_matrix(blocks.multiply_in_order, operands)


def linear_dequantized(operands: FP8LinearOperands) -> Tensor:
    """`fp8_linear` that writes the dequantised weight and multiplies by cuBLAS."""

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, dequantize_triton(weight, scale, x.dtype))

    return each_matrix(product, operands)
