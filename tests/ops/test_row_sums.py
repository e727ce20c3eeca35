"""`batch_invariant_sum` and `batch_invariant_rms_norm`: values, bits, contracts, errors."""

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.row_sums import (
    batch_invariant_rms_norm,
    batch_invariant_sum,
    rms_norm_by_halves,
    rms_norm_op,
    row_sum_op,
    sum_by_halves,
)
from tests.ops.row_sums import TOLERANCE, check


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 100, 2048, 3001])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_by_halves(dtype: torch.dtype, columns: int) -> None:
    check(sum_by_halves, rms_norm_by_halves, dtype, columns)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_contracts(rows: int) -> None:
    x = torch.randn(rows, 12)
    opcheck(row_sum_op, (x,))
    opcheck(rms_norm_op, (x, torch.randn(12), 1e-5))
    opcheck(rms_norm_op, (x.bfloat16(), None, 1e-5))


def test_a_mistake_is_named() -> None:
    x = torch.randn(3, 12)
    with pytest.raises(MLAError, match=r"x: expected .*rows, columns"):
        batch_invariant_sum(x[0])
    with pytest.raises(MLAError, match=r"weight: expected \[12\], got \[11\]"):
        batch_invariant_rms_norm(x, torch.ones(11), 1e-5)
    with pytest.raises(
        MLAError, match=r"weight: expected the dtype of x, torch\.float32, got torch\.float64"
    ):
        batch_invariant_rms_norm(x, torch.ones(12).double(), 1e-5)
