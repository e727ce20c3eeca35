"""`moe_router`: values, contract, errors, and its compiled kernels."""

from functools import partial

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.device import H200
from mla_compile.ops.experts.routing import moe_router, moe_router_op, router_by_token, router_torch
from tests.ops.routing import ROUTINGS, check, check_bits, router_args


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_plain_torch(name: str) -> None:
    for tokens, dtype in ((1, torch.float32), (9, torch.bfloat16)):
        args = router_args(name, tokens, 40, dtype)
        check(router_torch, args)
        check(router_by_token, args)
        check_bits(partial(moe_router, batch_invariant=True), args)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_contract(tokens: int) -> None:
    for name in ("v3", "v2-lite"):
        opcheck(moe_router_op, tuple(router_args(name, tokens, 12, torch.bfloat16)))
    weights, ids = moe_router(*router_args("v3", tokens, 12, torch.float64))
    assert weights.dtype == torch.float64 and ids.shape == weights.shape == (tokens, 8)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.ones(3), "x: .*tokens, hidden"),
        (1, torch.ones(256, 11), "weight: .*hidden"),
        (1, torch.ones(256, 12).int(), "weight: .*float16.*int32"),
        (2, torch.ones(255), "bias: .*experts"),
        (3, 129, r"topk: .*\b128\b.*\b129\b"),
        (3, 0, r"topk: .*\b1\b.*\b0\b"),
        (4, 7, r"num_groups: .*divisor.*\b256\b.*\b7\b"),
        (4, 256, "num_groups: .*divisor"),
        (5, 9, r"topk_groups: .*\b8\b.*\b9\b"),
    ],
)
def test_a_mistake_is_named(place: int, value: object, message: str) -> None:
    args = router_args("v3", 3, 12, torch.float32)
    args[place] = value
    with pytest.raises(MLAError, match=f"^{message}"):
        moe_router(*args)


def test_the_kernels_spill_nothing() -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.routing import router_triton
    from tests.triton_compile import compiled_for

    with compiled_for(10 * H200.capability[0] + H200.capability[1]) as kernels:
        for name, hidden in (("glm", 2048), ("v3", 7168), ("v2", 5120)):
            router_triton(*router_args(name, 2, hidden, torch.bfloat16))
    assert len(kernels) == 6 and all(kernel.spilled_bytes == 0 for kernel in kernels)
