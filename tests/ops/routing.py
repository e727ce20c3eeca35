"""What every implementation of `moe_router` must do."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_compile.ops.experts.routing import choose_experts

ROUTINGS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "glm": (64, (4, 1, 1, False, True, 1.8)),
    "v3": (256, (8, 8, 4, False, True, 2.5)),
    "v2": (160, (6, 8, 3, True, False, 16.0)),
    "v2-lite": (64, (6, 1, 1, True, False, 1.0)),
    "odd": (30, (5, 5, 2, False, False, 0.5)),
    "all": (3, (3, 1, 1, False, True, 1.0)),
    "one": (1, (1, 1, 1, True, True, 1.0)),
}
"""Experts, and from `topk` on the arguments of the op."""


def router_args(name: str, tokens: int, hidden: int, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Arguments of the op without near-ties."""
    experts, rest = ROUTINGS[name]
    generator = torch.Generator().manual_seed(experts + tokens)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((tokens + 9, hidden), (experts, hidden), (experts,))
    )
    weight, bias = weight / hidden**0.5, None if rest[3] else 0.1 * bias.float()
    logits, choices = x.double() @ weight.double().T, []
    for _ in range(5):  # rounding may turn the choice of a near-tie
        off = 1e-5 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        choices.append(choose_experts(logits + off, bias, *rest)[1].sort(1).values)
    clear = torch.stack([choice == choices[0] for choice in choices]).all(0).all(1)
    x = x[clear][:tokens]
    assert len(x) == tokens
    return [x.to(device), weight.to(device), None if bias is None else bias.to(device), *rest]


def check(router: Callable[..., tuple[Tensor, Tensor]], args: list[Any]) -> None:
    """Near float64."""
    x, weight, bias, *rest = args
    weights, ids = router(*args)
    assert weights.dtype == torch.promote_types(x.dtype, torch.float32) and ids.dtype == torch.int64
    expected, expected_ids = choose_experts(
        x.double() @ weight.double().T, None if bias is None else bias.double(), *rest
    )
    order, expected_order = ids.argsort(1), expected_ids.argsort(1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    torch.testing.assert_close(
        weights.gather(1, order).double(), expected.gather(1, expected_order), rtol=1e-5, atol=1e-6
    )


def check_bits(router: Callable[..., tuple[Tensor, Tensor]], args: list[Any]) -> None:
    """A token's bits are the same alone, anywhere in a batch, and in strided tensors."""
    x, weight, bias, *rest = args
    weights, ids = router(*args)
    rng = random.Random(len(x))
    for _ in range(3):
        start = rng.randrange(len(x))
        rows = slice(start, rng.randint(start + 1, len(x)))
        apart = x.new_zeros(len(x[rows]), x.shape[1] + rng.choice([1, 8, 64]))
        apart[:, : x.shape[1]] = x[rows]
        for part in (x[rows], x[rows].clone(), apart[:, : x.shape[1]]):
            again = router(part, weight, bias, *rest)
            assert torch.equal(again[0], weights[rows]) and torch.equal(again[1], ids[rows])


def check_after_norm(norm_router: Callable[..., tuple[Tensor, ...]], args: list[Any]) -> None:
    """Norm and sum are near torch's; the choice is that of the rounded norm."""
    x, *rest = args
    generator = torch.Generator().manual_seed(len(x))
    residual = torch.randn(x.shape, generator=generator).to(x)
    # Its norm is about the tokens without near-ties.
    given = (x - residual).to(x.dtype)
    for norm_weight in (None, torch.ones_like(x[0])):
        normed, total, weights, ids = norm_router(given, residual, norm_weight, 1e-5, *rest)
        torch.testing.assert_close(total, given + residual, rtol=torch.finfo(x.dtype).eps, atol=0)
        wide = total.double()
        expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5)
        tolerance = {torch.float32: 1e-5}.get(x.dtype, 2e-2)
        torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)
        assert normed.is_contiguous() and normed.dtype == total.dtype == x.dtype
        assert normed.untyped_storage().data_ptr() != total.untyped_storage().data_ptr()
        by_definition = rest[0].double() @ normed.double().T
        bias = None if rest[1] is None else rest[1].double()
        expected_weights, expected_ids = choose_experts(by_definition.T, bias, *rest[2:])
        order, expected_order = ids.argsort(1), expected_ids.argsort(1)
        assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
        found = weights.gather(1, order).double()
        torch.testing.assert_close(found, expected_weights.gather(1, expected_order), rtol=1e-5, atol=1e-6)
