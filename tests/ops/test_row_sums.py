"""`batch_invariant_sum`: values, bits, contract, errors."""

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.reductions.last_dim import batch_invariant_sum, row_sum_op, sum_torch
from tests.ops.row_sums import check


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 100, 2048, 3001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_by_halves(dtype: torch.dtype, columns: int) -> None:
    check(sum_torch, dtype, columns)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_contract(rows: int) -> None:
    opcheck(row_sum_op, (torch.randn(rows, 12),))


def test_a_mistake_is_named() -> None:
    with pytest.raises(MLAError, match=r"^x: .*rows, columns"):
        batch_invariant_sum(torch.randn(12))
