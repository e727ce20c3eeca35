"""Building blocks that every layer shares."""

from collections.abc import Callable
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.ops.attention.norm_rope import rms_norm


class KeepsDtype(nn.Module):
    """A module in which some tensors keep their dtype; they still move to other devices.

    kept: their names. Conversions such as `model.to(dtype)`, `half()` and `double()` do not change them.
    """

    kept: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # References, so that no replaced tensor is freed: a new one could get the same id.
        kept = [getattr(self, name, None) for name in self.kept]

        def guarded(x: Tensor) -> Tensor:
            result = fn(x)
            if result.dtype != x.dtype and any(x is tensor for tensor in kept):
                return x.to(result.device)
            return result

        super()._apply(guarded, recurse)  # type: ignore[no-untyped-call]
        return self


def random_parameter(*sizes: int, std: float = 1.0) -> nn.Parameter:
    """Normal random numbers.

    Not by `nn.init.normal_`, as in `nn.Embedding`: on the meta device it imports torch._dynamo, which takes a second.
    """
    return nn.Parameter(torch.randn(sizes).mul_(std))


def random_embedding(num_ids: int, size: int) -> nn.Embedding:
    """`nn.Embedding`; see `random_parameter`."""
    made: nn.Embedding = nn.Embedding.from_pretrained(random_parameter(num_ids, size), freeze=False)
    return made


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467) over the last dimension."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))` (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
