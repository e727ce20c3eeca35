"""What `batch_invariant_sum` and `batch_invariant_rms_norm` must do, whatever computes them."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]
Norm = Callable[[Tensor, Tensor | None, float], Tensor]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check(row_sum: Sum, rms_norm: Norm, dtype: torch.dtype, columns: int, device: str = "cpu") -> None:
    """Both of drawn rows: near float64, and a row's bits alone, anywhere in a batch, and in views of all kinds."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(7, columns, generator=generator).to(device, dtype)
    weight = torch.randn(columns, generator=generator).to(device, dtype)
    exact = x.double()
    wide = torch.promote_types(dtype, torch.float32)
    whole = row_sum(x)
    assert whole.dtype == wide and whole.shape == (7,)
    torch.testing.assert_close(whole.double(), exact.sum(1), rtol=1e-4, atol=1e-4)
    for factor in (None, weight):
        normed = rms_norm(x, factor, 1e-5)
        expected = exact * torch.rsqrt(exact.square().mean(1, keepdim=True) + 1e-5)
        expected = expected if factor is None else expected * factor.double()
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)
        for rows, view in views(x, columns):
            assert torch.equal(rms_norm(view, factor, 1e-5), normed[rows]), rows
    for rows, view in views(x, columns):
        assert torch.equal(row_sum(view), whole[rows]), rows


def views(x: Tensor, columns: int) -> list[tuple[slice, Tensor]]:
    """Rows of `x` and tensors that hold them: alone, together, apart, at odd addresses, columns first."""
    found = []
    rng = random.Random(columns)
    for _ in range(6):
        start = rng.randrange(7)
        rows = slice(start, rng.randint(start + 1, 7))
        part = x[rows]
        apart = x.new_zeros(len(part), columns + rng.choice([1, 8, 16, 64]))
        apart[:, :columns] = part
        odd = x.new_zeros(part.numel() + 3)[3:].view_as(part).copy_(part)
        found += [
            (rows, part),
            (rows, part.clone()),
            (rows, apart[:, :columns]),
            (rows, odd),
            (rows, part.t().clone().t()),
        ]
    return found
