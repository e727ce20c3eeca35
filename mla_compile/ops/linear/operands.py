"""Arguments of a linear op as a named tuple, which its candidates take."""

from typing import NamedTuple

from torch import Tensor


class FP8LinearOperands(NamedTuple):
    """Arguments of `fp8_linear`."""

    x: Tensor
    first: Tensor
    first_scale: Tensor
    second: Tensor | None = None
    second_scale: Tensor | None = None
    fp8_activations: bool = False
