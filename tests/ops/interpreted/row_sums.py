"""`batch_invariant_sum` and `batch_invariant_rms_norm` by their Triton kernels."""

import pytest
import torch

from mla_compile.ops.kernels.row_sums import rms_norm_triton, sum_triton
from tests.ops.row_sums import check


@pytest.mark.parametrize(
    ("columns", "dtype"), [(1, torch.float32), (100, torch.bfloat16), (3001, torch.float32)], ids=str
)
def test_the_kernels(columns: int, dtype: torch.dtype) -> None:
    check(sum_triton, rms_norm_triton, dtype, columns)
