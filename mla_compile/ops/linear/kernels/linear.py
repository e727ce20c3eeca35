"""Products of few tokens, by kernels that take weights of both kinds (`gemv.py`, `blocks.py`)."""

from torch import Tensor

from mla_compile.ops.adjacent import one_matrix
from mla_compile.ops.linear.kernels import blocks, gemv
from mla_compile.ops.linear.operands import NormLinearOperands
from mla_compile.ops.linear.tiles import ProductTiles


def linear_gemv(
    x: Tensor, first: Tensor, second: Tensor | None = None, *, tiles: gemv.Tiles | None = None
) -> Tensor:
    """What `fused_linear` computes of one or two tokens, by weights that are one matrix in memory.

    tiles: chosen by `gemv.half_tiles` unless given.
    """
    return gemv.multiply(x, one_matrix(first, second), None, tiles or gemv.half_tiles(x.shape[1]))[0]


def linear_blocks(
    x: Tensor, first: Tensor, second: Tensor | None = None, *, tiles: ProductTiles | None = None
) -> Tensor:
    """What `fused_linear` computes of a few tokens, by weights that are one matrix in memory."""
    return blocks.multiply(x, one_matrix(first, second), None, tiles)


def matmul_in_order(x: Tensor, w: Tensor) -> Tensor:
    """What `batch_invariant_matmul` computes by one matrix, whose columns lie along memory."""
    return blocks.multiply_in_order(x[:, 0], w[0].t(), None).unsqueeze(1)


def norm_linear_gemv(operands: NormLinearOperands) -> tuple[Tensor, Tensor]:
    """What `norm_linear` computes of one or two tokens, of FP8 one, by weights that are one matrix in memory."""
    x, residual, norm_weight, eps, first, first_scale, second, second_scale = operands
    weight, scale = one_matrix(first, second), None
    tiles = gemv.half_tiles(x.shape[1])
    if first_scale is not None:
        scale, tiles = one_matrix(first_scale, second_scale), gemv.fp8_tiles(x.shape[1], norm=True)
    return gemv.multiply(x, weight, scale, tiles, gemv.Norm(residual, norm_weight, eps))
