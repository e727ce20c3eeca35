"""What the candidates of linear ops take: an op's arguments in one record."""

from typing import NamedTuple

from torch import Tensor


class NormLinearOperands(NamedTuple):
    """Of `norm_linear`."""

    x: Tensor
    residual: Tensor | None
    norm_weight: Tensor | None
    eps: float
    first: Tensor
    first_scale: Tensor | None = None
    second: Tensor | None = None
    second_scale: Tensor | None = None


class FP8LinearOperands(NamedTuple):
    """Of `fp8_linear`."""

    x: Tensor
    first: Tensor
    first_scale: Tensor
    second: Tensor | None = None
    second_scale: Tensor | None = None
