"""`prefill_metadata_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import random

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels.prefill_metadata import prefill_metadata_triton  # noqa: E402
from mla_compile.ops.attention.metadata import prefill_metadata_torch  # noqa: E402
from tests.kernel_cases import prefill_metadata_args  # noqa: E402


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_equals_the_torch_code_to_the_bit(seed: int) -> None:
    args = prefill_metadata_args(random.Random(seed))
    for got, expected in zip(prefill_metadata_triton(*args), prefill_metadata_torch(*args), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
