"""What every implementation of `norm_linear` must do."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from tests.fp8_cases import fp8_weight, values_of

NormLinear = Callable[..., tuple[Tensor, Tensor]]
EPS = 1e-5


def check(norm_linear: NormLinear, dtype: torch.dtype, tokens: int, k: int, device: str = "cpu") -> None:
    """Drawn tokens: near float64, with and without residual and weight of the norm, rows of any stride, weights
    in their dtype and in FP8, one or, in turn, two adjacent ones."""
    generator = torch.Generator().manual_seed(k)
    wide, other = (torch.randn(tokens, k + 24, generator=generator).to(device, dtype) for _ in range(2))
    factor = torch.randn(k, generator=generator).to(device, dtype)
    columns = 150 if device == "cuda" else 30  # Triton's interpreter takes long for each
    plain = (torch.randn(columns, k, generator=generator) * k**-0.5).to(device, dtype)
    quantised, scale = fp8_weight(150, k, device=device)
    for is_fp8, residual, norm_weight in product((False, True), (None, other[:, :k]), (None, factor)):
        x = wide[:, 8:-16]
        added = x if residual is None else x + residual
        normed = added.double() * torch.rsqrt(added.double().square().mean(1, keepdim=True) + EPS)
        normed = normed if norm_weight is None else normed * norm_weight.double()
        weight = values_of(quantised, scale, dtype) if is_fp8 else plain.double()
        expected, tolerance = normed @ weight.T, {torch.float32: 1e-4}.get(dtype, 3e-2)
        weights: tuple[Tensor | None, ...] = (quantised, scale) if is_fp8 else (plain, None)
        if (residual is None) == (norm_weight is None):
            first, second = (
                quantised.split([128, 22]) if is_fp8 else plain.split([columns // 3 * 2, columns // 3])
            )
            weights = first, None, second, None
            if is_fp8:
                weights = first, scale[:1], second, scale[1:]
        found, total = norm_linear(x, residual, norm_weight, EPS, *weights, *[None] * (4 - len(weights)))
        assert found.dtype == total.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
        if residual is None:
            assert total.shape == (0, k)
        else:  # Triton's interpreter truncates instead of rounding
            torch.testing.assert_close(total, added, rtol=torch.finfo(dtype).eps, atol=0)
