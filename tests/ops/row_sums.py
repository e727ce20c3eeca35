"""What every implementation of `batch_invariant_sum` must do."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]


def check(row_sum: Sum, dtype: torch.dtype, columns: int, device: str = "cpu") -> None:
    """Drawn inputs: near float64, and the same bits alone, anywhere in a batch, and in views of all kinds."""
    x = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)).to(device, dtype)
    whole = row_sum(x)
    assert whole.dtype == torch.promote_types(dtype, torch.float32) and whole.shape == (7,)
    torch.testing.assert_close(whole.double(), x.double().sum(1), rtol=1e-4, atol=1e-4)
    for rows, view in views(x, columns):
        assert torch.equal(row_sum(view), whole[rows]), rows


def views(x: Tensor, columns: int) -> list[tuple[slice, Tensor]]:
    """Matrix rows of `x` and tensors that hold them: alone, together, strided, misaligned, columns first."""
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
