"""`fused_linear` of few tokens by its Triton kernels; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.linear.kernels.linear import linear_blocks, linear_gemv  # noqa: E402
from mla_compile.ops.linear.tiles import ProductTiles  # noqa: E402

SMALL = ProductTiles(tokens=8, columns=32, depth=128, warps=2, stages=1)


@pytest.mark.parametrize("tokens", [1, 2, 5, 19])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernels(dtype: torch.dtype, tokens: int) -> None:
    for k, columns, first in ((40, 13, 13), (1024, 6, 4), (2500, 5, 5), (2048, 3, 1)):
        weight = torch.randn(columns, k).to(dtype)
        weights = weight.split([first, columns - first]) if first < columns else (weight,)
        for x in (torch.randn(tokens, k).to(dtype), torch.randn(tokens, k + 24).to(dtype)[:, 8:-16]):
            expected = x.double() @ weight.double().T
            outs = [linear_blocks(x, *weights), linear_blocks(x, *weights, tiles=SMALL)]
            if tokens <= 2:
                outs += [
                    linear_gemv(x, *weights, tiles=tiles) for tiles in (None, (2, 1024, 4), (1, 4096, 2))
                ]
            for out in outs:
                assert out.dtype == dtype and out.is_contiguous()
                torch.testing.assert_close(out.double(), expected, atol=0.05, rtol=1e-2)
