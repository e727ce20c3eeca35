"""`x @ weight.T` by a weight in block FP8, `ops/linear/fp8.py`: half of the bytes are read, and converted in registers.

One token is multiplied on the plain cores (`gemv.py`), others on tensor cores, block by block (`blocks.py`). Both
multiply the values of FP8, which are exact in every dtype of x, and scale a sum. Of many tokens the conversion, which
every tile of tokens repeats, takes longer than to write the weight dequantised once.
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
    """What `fp8_linear` computes of one token.

    tiles: chosen by `gemv.fp8_tiles` unless given.
    """
    chosen = tiles or gemv.fp8_tiles(operands.x.shape[1])
    return each_matrix(lambda x, weight, scale: gemv.multiply(x, weight, scale, chosen)[0], operands)


def linear_blocks(operands: FP8LinearOperands, *, tiles: ProductTiles | None = None) -> Tensor:
    """What `fp8_linear` computes of a few tokens in half precision."""
    return each_matrix(partial(blocks.multiply, tiles=tiles), operands)


def linear_in_order(operands: FP8LinearOperands) -> Tensor:
    """What `fp8_linear` computes in half precision, with the same bits of a token in every number of tokens."""
    return each_matrix(blocks.multiply_in_order, operands)


def linear_dequantized(operands: FP8LinearOperands) -> Tensor:
    """What `fp8_linear` computes: the weight is written dequantised, and cuBLAS multiplies."""

    def product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, dequantize_triton(weight, scale, x.dtype))

    return each_matrix(product, operands)
