"""`decode_metadata_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels.decode_metadata import decode_metadata_triton  # noqa: E402
from mla_compile.ops.attention.metadata import decode_metadata_torch  # noqa: E402
from tests.kernel_cases import metadata_args  # noqa: E402


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("q_len", [1, 4, 16, 33])
@pytest.mark.parametrize("ragged", [False, True], ids=["all", "ragged"])
def test_the_kernel_equals_the_torch_code_to_the_bit(ragged: bool, q_len: int, page_size: int) -> None:
    args = metadata_args(q_len, page_size, ragged=ragged)
    for got, expected in zip(decode_metadata_triton(*args), decode_metadata_torch(*args), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
