"""`batch_invariant_sum`, `fused_rms_norm` and `fused_add_rms_norm` by their Triton kernels."""

import pytest
import torch

from mla_compile.ops.norm.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from mla_compile.ops.reductions.kernels.row_sums import sum_triton
from tests.ops import rms_norm, row_sums


@pytest.mark.parametrize(
    ("columns", "dtype"), [(1, torch.float32), (100, torch.bfloat16), (3001, torch.float32)], ids=str
)
def test_the_kernels(columns: int, dtype: torch.dtype) -> None:
    row_sums.check(sum_triton, dtype, columns)
    rms_norm.check(rms_norm_triton, add_rms_norm_triton, dtype, columns)
