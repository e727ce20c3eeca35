"""`norm_linear` of few tokens by its Triton kernel; `tests/ops/test_interpreted.py` runs this file."""

import itertools

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.linear.kernels.linear import norm_linear_gemv  # noqa: E402
from tests.ops.norm_linear import check  # noqa: E402


@pytest.mark.parametrize(
    ("dtype", "tokens", "k"),
    [
        *itertools.product([torch.bfloat16, torch.float32], [1, 2], [40, 1024]),
        (torch.float16, 2, 40),
        (torch.bfloat16, 2, 2500),
        *(
            pytest.param(*case, 2500, marks=pytest.mark.slow)
            for case in [(torch.bfloat16, 1), (torch.float32, 1), (torch.float32, 2)]
        ),
        pytest.param(torch.float16, 1, 40, marks=pytest.mark.slow),
        *(
            pytest.param(torch.float16, *sizes, marks=pytest.mark.slow)
            for sizes in itertools.product([1, 2], [1024, 2500])
        ),
    ],
    ids=str,
)
def test_the_kernel(dtype: torch.dtype, tokens: int, k: int) -> None:
    check(norm_linear_gemv, dtype, tokens, k)
