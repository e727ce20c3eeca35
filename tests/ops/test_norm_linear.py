"""`norm_linear`: values, contracts, bits of a token, errors."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.linear.norm_linear import norm_linear, norm_linear_op
from tests.ops.norm_linear import EPS, check

K = 40


@pytest.mark.parametrize("product", [norm_linear, partial(norm_linear, batch_invariant=True)])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_the_product_of_the_norm(
    dtype: torch.dtype, tokens: int, product: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    check(product, dtype, tokens, K)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_contracts(tokens: int, batch_invariant: bool) -> None:
    x, weight = torch.randn(tokens, K), torch.randn(7, K)
    opcheck(norm_linear_op, (x, x * 2, torch.ones(K), EPS, weight, None, batch_invariant))
    opcheck(norm_linear_op, (x, None, None, EPS, weight, weight[:3], batch_invariant))


def test_a_tokens_bits_can_be_its_own() -> None:
    x, weight = torch.randn(9, K), torch.randn(7, K)
    exact = partial(norm_linear, norm_weight=torch.randn(K), eps=EPS, first=weight, batch_invariant=True)
    product, total = exact(x, x.flip(1))
    for token in range(9):
        alone = exact(x[token, None], x.flip(1)[token, None])
        assert torch.equal(alone[0][0], product[token]) and torch.equal(alone[1][0], total[token])


def test_a_mistake_is_named() -> None:
    x, weight = torch.randn(3, K), torch.randn(7, K)
    with pytest.raises(MLAError, match=r"^residual: .*\b3\b.*\[2, 40\]"):
        norm_linear(x, x[:2], None, EPS, weight)
    with pytest.raises(MLAError, match=r"weight: .*\b40\b.*\[3\]"):
        norm_linear(x, None, torch.ones(3), EPS, weight)
    with pytest.raises(MLAError, match=r"^first: "):
        norm_linear(x, None, None, EPS, weight[:, 1:])


def test_nothing_stands_between_the_loads_of_the_kernel() -> None:
    """No barrier and no spills."""
    pytest.importorskip("triton")
    from mla_compile.ops.linear.kernels import gemv
    from tests.triton_compile import compiled_for

    x, residual = torch.zeros(2, 1, 2048, dtype=torch.bfloat16)
    weight = torch.zeros(1344, 2048, dtype=torch.bfloat16)
    with compiled_for(90) as kernels:
        for given in (x, x[:, :768]):
            k = given.shape[1]
            norm = gemv.Norm(residual[:, :k], given[0], EPS)
            gemv.multiply(given, weight[:, :k].contiguous(), None, gemv.half_tiles(k), norm)
    assert [kernel.spilled_bytes for kernel in kernels] == [0, 0]
    for kernel in kernels:
        found = re.findall(r"ld\.global|bar\.sync", kernel.text)
        assert "ld.global" not in found[found.index("bar.sync") :]
