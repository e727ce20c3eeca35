"""`matmul_by_head`: values, where it writes them, contracts, errors. On a GPU: `test_gpu_kernels`."""

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.linear.matmul import matmul_by_head, matmul_by_head_op


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_a_product_for_each_head_written_by_token(dtype: torch.dtype, tokens: int) -> None:
    w = torch.randn(3, 6, 16).to(dtype)
    for x in (torch.randn(tokens, 3, 16), torch.randn(3, tokens, 20)[..., :16].transpose(0, 1)):
        out = matmul_by_head(x.to(dtype), w.mT)
        expected = torch.einsum("thk,hnk->thn", x.to(dtype).double(), w.double())
        assert out.dtype == dtype and out.is_contiguous()
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 5e-2)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_the_cpu_it_has_the_bits_of_the_einsum(dtype: torch.dtype) -> None:
    for tokens, k, n in ((1, 16, 6), (5, 128, 512), (33, 512, 128)):
        x, w = torch.randn(tokens, 3, k + 8, dtype=dtype)[..., :k], torch.randn(3, n, k, dtype=dtype).mT
        assert torch.equal(matmul_by_head(x, w), torch.einsum("thk,hkn->thn", x, w))


def test_contract() -> None:
    for tokens in (0, 1, 5):
        opcheck(matmul_by_head_op, (torch.randn(tokens, 3, 16), torch.randn(3, 6, 16).mT))


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.randn(2, 3, 4), torch.randn(2, 4, 5), r"^w: .*\bheads\b"),
        (torch.randn(2, 3, 4), torch.randn(3, 5, 4), r"^w: .*\bk\b"),
        (torch.randn(2, 3, 4), torch.randn(3, 4, 5).double(), r"^w: .*\bfloat32\b"),
        (torch.randn(2, 12), torch.randn(3, 4, 5), "^x: "),
    ],
)
def test_a_mistake_is_named(x: torch.Tensor, w: torch.Tensor, message: str) -> None:
    with pytest.raises(MLAError, match=message):
        matmul_by_head(x, w)
