"""`batch_invariant_sum` and `batch_invariant_rms_norm` by their Triton kernels."""

import pytest
import torch

from mla_compile.ops.kernels.row_sums import rms_norm_triton, sum_triton
from tests.ops.row_sums import check


@pytest.mark.parametrize("columns", [1, 100, 2048, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels(dtype: torch.dtype, columns: int) -> None:
    check(sum_triton, rms_norm_triton, dtype, columns)
