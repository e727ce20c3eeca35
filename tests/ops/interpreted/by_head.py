"""`matmul_by_head` by its Triton kernels; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.linear.kernels.by_head import multiply_by_head_tiles, multiply_by_head_triton  # noqa: E402
from mla_compile.ops.linear.tiles import ProductTiles  # noqa: E402

SMALL = ProductTiles(tokens=8, columns=16, depth=64, warps=1, stages=1)


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [*((torch.bfloat16, tokens) for tokens in (1, 2, 5, 19, 70)), (torch.float16, 2), (torch.float16, 19)],
    ids=str,
)
def test_the_kernels(dtype: torch.dtype, tokens: int) -> None:
    for heads, k, n in ((3, 512, 16), (1, 40, 13), (5, 192, 70)):
        weights = torch.randn(heads, n + 3, k + 5).to(dtype)[:, 3:, 5:]
        for w in (weights.mT, torch.randn(heads, k + 2, n).to(dtype)[:, 2:]):
            padded = torch.randn(tokens, heads, k + 24).to(dtype)[..., 8:-16]
            for x in (padded, torch.randn(heads, tokens, k).to(dtype).transpose(0, 1)):
                expected = torch.einsum("thk,hkn->thn", x.double(), w.double())
                outs = [multiply_by_head_tiles(x, w), multiply_by_head_tiles(x, w, tiles=SMALL)]
                if tokens <= 2:
                    outs.append(multiply_by_head_triton(x, w))
                for out in outs:
                    assert out.dtype == dtype and out.is_contiguous()
                    torch.testing.assert_close(out.double(), expected, atol=0.1, rtol=1e-2)
