"""What every implementation of `norm_linear` must do."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

NormLinear = Callable[..., tuple[Tensor, Tensor]]
EPS = 1e-5


def check(norm_linear: NormLinear, dtype: torch.dtype, tokens: int, k: int, device: str = "cpu") -> None:
    """Drawn tokens: near float64, with and without residual and weight of the norm, rows of any stride, one weight or,
    in turn, two adjacent ones."""
    generator = torch.Generator().manual_seed(k)
    wide, other = (torch.randn(tokens, k + 24, generator=generator).to(device, dtype) for _ in range(2))
    factor = torch.randn(k, generator=generator).to(device, dtype)
    columns = 150 if device == "cuda" else 30  # Triton's interpreter takes long for each
    weight = (torch.randn(columns, k, generator=generator) * k**-0.5).to(device, dtype)
    for residual, norm_weight in product((None, other[:, :k]), (None, factor)):
        x = wide[:, 8:-16]
        added = x if residual is None else x + residual
        normed = added.double() * torch.rsqrt(added.double().square().mean(1, keepdim=True) + EPS)
        normed = normed if norm_weight is None else normed * norm_weight.double()
        expected, tolerance = normed @ weight.double().T, {torch.float32: 1e-4}.get(dtype, 3e-2)
        weights: tuple[Tensor, ...] = (weight,)
        if (residual is None) == (norm_weight is None):
            weights = weight.split([columns // 3 * 2, columns // 3])
        found, total = norm_linear(x, residual, norm_weight, EPS, *weights)
        assert found.dtype == total.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        if residual is None:
            assert total.shape == (0, k)
        else:  # Triton's interpreter truncates instead of rounding
            torch.testing.assert_close(total, added, rtol=torch.finfo(dtype).eps, atol=0)
