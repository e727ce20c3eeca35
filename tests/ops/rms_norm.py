"""What every implementation of `fused_rms_norm` and `fused_add_rms_norm` must do."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.ops.row_sums import views

Norm = Callable[[Tensor, Tensor | None, float], Tensor]
AddNorm = Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check(norm: Norm, add_norm: AddNorm, dtype: torch.dtype, columns: int, device: str = "cpu") -> None:
    """Drawn inputs: near float64, and the same bits alone, anywhere in a batch, and in views of all kinds.

    The sum is near torch's, and its norm has the bits of the norm alone.
    """
    generator = torch.Generator().manual_seed(columns)
    x, residual = (torch.randn(7, columns, generator=generator).to(device, dtype) for _ in range(2))
    weight = torch.randn(columns, generator=generator).to(device, dtype)
    exact, tolerance = x.double(), TOLERANCE[dtype]
    for factor in (None, weight):
        normed = norm(x, factor, 1e-5)
        assert normed.dtype == dtype
        expected = exact * torch.rsqrt(exact.square().mean(1, keepdim=True) + 1e-5)
        expected = expected if factor is None else expected * factor.double()
        torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)
        for rows, view in views(x, columns):
            assert torch.equal(norm(view, factor, 1e-5), normed[rows]), rows
        of_sum, total = add_norm(x, residual, factor, 1e-5)
        # Triton's interpreter truncates instead of rounding.
        torch.testing.assert_close(total, x + residual, rtol=torch.finfo(dtype).eps, atol=0)
        assert torch.equal(of_sum, norm(total, factor, 1e-5))
        for rows, view in views(x, columns):
            parts = add_norm(view, residual[rows], factor, 1e-5), add_norm(residual[rows], view, factor, 1e-5)
            for part in parts:
                assert torch.equal(part[0], of_sum[rows]) and torch.equal(part[1], total[rows]), rows
