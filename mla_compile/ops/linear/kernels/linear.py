"""Linear ops for few tokens by the kernels that take half-precision and FP8 weights (`gemv.py`, `blocks.py`)."""

from torch import Tensor

from mla_compile.ops.adjacent import one_matrix
from mla_compile.ops.linear.kernels import blocks, gemv
from mla_compile.ops.linear.tiles import ProductTiles


def linear_gemv(
    x: Tensor, first: Tensor, second: Tensor | None = None, *, tiles: gemv.Tiles | None = None
) -> Tensor:
    """`fused_linear` for one or two tokens and weights that are one matrix in memory.

    tiles: by default from `gemv.half_tiles`.
    """
    return gemv.multiply(x, one_matrix(first, second), None, tiles or gemv.half_tiles(x.shape[1]))[0]


def linear_blocks(
    x: Tensor, first: Tensor, second: Tensor | None = None, *, tiles: ProductTiles | None = None
) -> Tensor:
    """`fused_linear` for a few tokens and weights that are one matrix in memory."""
    return blocks.multiply(x, one_matrix(first, second), None, tiles)


def matmul_in_order(x: Tensor, w: Tensor) -> Tensor:
    """`batch_invariant_matmul` by one group's matrix `w`, whose transpose is contiguous."""
    return blocks.multiply_in_order(x[:, 0], w[0].t(), None).unsqueeze(1)


def norm_linear_gemv(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    first: Tensor,
    second: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`norm_linear` for one or two tokens and weights that are one matrix in memory."""
    tiles, norm = gemv.half_tiles(x.shape[1]), gemv.Norm(residual, norm_weight, eps)
    return gemv.multiply(x, one_matrix(first, second), None, tiles, norm)
