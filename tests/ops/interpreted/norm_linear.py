"""`norm_linear` of few tokens by its Triton kernel; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.kernels.linear import norm_linear_gemv  # noqa: E402
from tests.ops.norm_linear import check  # noqa: E402


@pytest.mark.parametrize("k", [40, 1024, 2500])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernel(dtype: torch.dtype, tokens: int, k: int) -> None:
    check(norm_linear_gemv, dtype, tokens, k)
