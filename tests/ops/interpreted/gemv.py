"""`fused_linear` of one and two tokens by its Triton kernel; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.kernels.gemv import linear_gemv  # noqa: E402


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel(dtype: torch.dtype, tokens: int) -> None:
    for k, columns, first in ((40, 13, 13), (1024, 6, 4), (2500, 5, 5), (2048, 3, 1)):
        weight = torch.randn(columns, k).to(dtype)
        weights = weight.split([first, columns - first]) if first < columns else (weight,)
        for x in (torch.randn(tokens, k).to(dtype), torch.randn(tokens, k + 24).to(dtype)[:, 8:-16]):
            expected = x.double() @ weight.double().T
            out = linear_gemv(x, *weights)
            assert out.dtype == dtype and out.is_contiguous()
            torch.testing.assert_close(out.double(), expected, atol=0.05, rtol=1e-2)
            for tiles in ((2, 1024, 4), (1, 4096, 2)):
                torch.testing.assert_close(
                    linear_gemv(x, *weights, tiles=tiles).double(), expected, atol=0.05, rtol=1e-2
                )
