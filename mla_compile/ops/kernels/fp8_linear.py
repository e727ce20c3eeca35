"""`x @ weight.T` by a weight in block FP8, `ops/fp8.py`: half of the bytes are read, and converted in registers.

One token is multiplied on the plain cores (`gemv.py`), others on tensor cores, block by block (`blocks.py`). Both
multiply the values of FP8, which are exact in every dtype of x, and scale a sum. Of many tokens the conversion, which
every tile of tokens repeats, takes longer than to write the weight dequantised once.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops.fp8 import each_matrix
from mla_compile.ops.kernels import blocks, gemv
from mla_compile.ops.kernels.fp8 import dequantize_triton
from mla_compile.ops.kernels.plan import MatmulTiles


def linear_gemv(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    *,
    tiles: gemv.Tiles | None = None,
) -> Tensor:
    """What `fp8_linear` computes of one token.

    tiles: chosen by `gemv.fp8_tiles` unless given.
    """
    product = partial(gemv.multiply, x, tiles=tiles or gemv.fp8_tiles(x.shape[1]))
    return each_matrix(product, first, first_scale, second, second_scale)


def linear_blocks(
    x: Tensor,
    first: Tensor,
    first_scale: Tensor,
    second: Tensor | None = None,
    second_scale: Tensor | None = None,
    *,
    tiles: MatmulTiles | None = None,
) -> Tensor:
    """What `fp8_linear` computes of a few tokens in half precision."""
    product = partial(blocks.multiply, x, tiles=tiles)
    return each_matrix(product, first, first_scale, second, second_scale)


def linear_in_order(
    x: Tensor, first: Tensor, first_scale: Tensor, second: Tensor | None, second_scale: Tensor | None
) -> Tensor:
    """What `fp8_linear` computes in half precision, with the same bits of a token in every number of tokens."""
    return each_matrix(partial(blocks.multiply_in_order, x), first, first_scale, second, second_scale)


def linear_dequantized(
    x: Tensor, first: Tensor, first_scale: Tensor, second: Tensor | None, second_scale: Tensor | None
) -> Tensor:
    """What `fp8_linear` computes: the weight is written dequantised, and cuBLAS multiplies."""

    def product(weight: Tensor, scale: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, dequantize_triton(weight, scale, x.dtype))

    return each_matrix(product, first, first_scale, second, second_scale)
