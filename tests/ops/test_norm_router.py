"""`norm_router`: values, contract, bits of a token, errors, and its compiled kernel."""

import re
from functools import partial

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.experts.norm_router import norm_router, norm_router_op
from tests.ops.routing import ROUTINGS, check_after_norm, router_args


@pytest.mark.parametrize("name", list(ROUTINGS))
@pytest.mark.parametrize("product", [norm_router, partial(norm_router, batch_invariant=True)])
def test_it_is_the_router_of_the_norm(name: str, product: object) -> None:
    for tokens, dtype in ((1, torch.float32), (9, torch.bfloat16)):
        check_after_norm(product, router_args(name, tokens, 40, dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_contract(tokens: int) -> None:
    for name in ("v3", "v2-lite"):
        x, *rest = router_args(name, tokens, 12, torch.bfloat16)
        opcheck(norm_router_op, (x, x * 2, x.new_ones(12), 1e-5, *rest))
        opcheck(norm_router_op, (x, x * 2, None, 1e-5, *rest, True))


def test_a_tokens_bits_can_be_its_own() -> None:
    x, *rest = router_args("v3", 9, 40, torch.bfloat16)
    exact = partial(norm_router, batch_invariant=True)
    whole = exact(x, x.flip(1), None, 1e-5, *rest)
    for token in range(9):
        row = x[token, None]
        alone = exact(row, row.flip(1), None, 1e-5, *rest)
        assert all(torch.equal(one[0], all_[token]) for one, all_ in zip(alone, whole, strict=True))


def test_a_mistake_is_named() -> None:
    x, weight, bias, *rest = router_args("v3", 3, 12, torch.float32)
    with pytest.raises(MLAError, match=r"^residual: .*\b3\b.*\[2, 12\]"):
        norm_router(x, x[:2], None, 1e-5, weight, bias, *rest)
    with pytest.raises(MLAError, match=r"^topk: .*\b128\b.*\b129\b"):
        norm_router(x, x, None, 1e-5, weight, bias, 129, *rest[1:])


def test_nothing_stands_between_the_loads_of_the_kernel() -> None:
    """Nor does it spill."""
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.routing import norm_router_triton
    from tests.triton_compile import compiled_for

    with compiled_for(90) as kernels:
        for name, hidden in (("glm", 2048), ("v3", 7168), ("v2", 5120)):
            x, *rest = router_args(name, 2, hidden, torch.bfloat16)
            norm_router_triton(x, x, x[0], 1e-5, *rest)
    assert all(kernel.spilled_bytes == 0 for kernel in kernels)
    for kernel in kernels[::2]:
        found = re.findall(r"ld\.global|bar\.sync", kernel.text)
        assert "ld.global" not in found[found.index("bar.sync") :]
