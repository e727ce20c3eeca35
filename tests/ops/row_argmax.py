"""What every implementation of `row_argmax` must do."""

from collections.abc import Callable

import torch
from torch import Tensor

Argmax = Callable[[Tensor], Tensor]
VOCABULARIES = (129_280, 154_880)
"""Those of DeepSeek-V3 and GLM."""
LIMITS = (torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0)


def rows_of(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of six kinds in turn, `[count, columns]`: drawn numbers, few different ones, -inf alone, subnormal ones,
    drawn ones with some of `LIMITS`, and such without NaN and +inf."""
    generator = torch.Generator().manual_seed(columns)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    x = torch.randn(count, columns, generator=generator).to(dtype)
    x[1::6] = drawn(-2, 3, *x[1::6].shape).to(dtype)
    x[2::6] = -torch.inf
    x[3::6] = -x[3::6].abs() * torch.finfo(dtype).tiny
    for row in (*x[4::6], *x[5::6]):
        places = drawn(0, columns, 5)
        row[places] = torch.tensor(LIMITS, dtype=dtype)[drawn(0, len(LIMITS), 5)]
    x[5::6] = x[5::6].nan_to_num(nan=-torch.inf, posinf=-torch.inf)
    return x


def check(argmax: Argmax, x: Tensor) -> None:
    """torch's `argmax`; also of single, strided, misaligned and expanded rows."""
    whole = argmax(x)
    assert whole.dtype == torch.int64 and torch.equal(whole, x.argmax(dim=-1))
    last, columns = x[-1:], x.shape[1]
    apart = x.new_full((len(x), columns + 3), torch.nan)
    apart[:, 1:-2] = x
    assert torch.equal(argmax(apart[:, 1:-2]), whole)
    assert torch.equal(argmax(x[::2]), whole[::2])
    assert torch.equal(argmax(last), whole[-1:])
    assert torch.equal(argmax(last.expand(3, -1)), whole[-1:].expand(3))
