"""`fuse_norm_router`: which norms are computed in the launch of the router's scores, and which are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_compile.ops.experts.routing import moe_router
from mla_compile.ops.norm.rms_norm import add_rms_norm_op
from mla_compile.passes import PASSES
from mla_compile.passes.fuse_norm_router import fuse_norm_router
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from mla_compile.passes.make_batch_invariant import make_batch_invariant
from mla_compile.passes.remove_noops import remove_noops
from tests.passes.capture import Capture, Normed, check_results, nodes_of, ops, without_kernel

K, EXPERTS = Normed.K, 8
FUSE = [without_kernel(fuse_rms_norm), remove_noops, without_kernel(fuse_norm_router)]


class Layer(Normed):
    """A norm and a router."""

    def __init__(self, call: Callable[["Layer", Tensor, Tensor], Any]) -> None:
        super().__init__(call)
        self.weight = nn.Parameter(torch.randn(EXPERTS, K), requires_grad=False)
        self.register_buffer("bias", torch.randn(EXPERTS))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return moe_router(x, self.weight, self.bias, 2, 1, 1, False, True, 1.5)


def routed(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    total = x + residual
    normed = layer.norm(total)
    weights, ids = layer.route(normed.flatten(0, -2))
    return normed.sin(), total * 2, weights, ids + 1


def twice(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    for _ in range(2):
        x, residual, weights, _ = routed(layer, x, residual)
        x = x * weights.sum(1).view(-1, *[1] * (x.dim() - 1))
    return x, residual


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("call", "fused"), [(routed, 1), (twice, 2)])
def test_a_norm_that_a_router_reads_is_computed_with_it(call: Any, fused: int, dims: int) -> None:
    gm = Layer.after(FUSE, call, dims)
    assert len(nodes_of(gm, "norm_router")) == fused
    assert not {"fused_add_rms_norm", "moe_router"} & set(ops(gm))


def without_a_residual(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return (*layer.route(layer.norm(x)), x + residual)


def of_what_is_made_of_the_norm(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    return layer.route(layer.norm(x + residual) * 2)


def with_a_bias_that_is_written_to(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    normed = layer.norm(x + residual)
    layer.bias.mul_(1.0)
    return layer.route(normed)


def with_a_weight_that_is_made(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    normed = layer.norm(x + residual)
    return moe_router(normed, layer.weight * residual[0], layer.bias, 2, 1, 1, False, True, 1.5)


def of_a_norm_that_is_written_to(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    normed = layer.norm(x + residual)
    normed.mul_(2.0)
    return (*layer.route(normed), normed)


def of_a_norm_whose_view_is_written_to(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    normed = layer.norm(x + residual)
    normed.view(-1, K).mul_(2.0)
    return layer.route(normed)


@pytest.mark.parametrize(
    "call",
    [
        without_a_residual,
        of_what_is_made_of_the_norm,
        with_a_bias_that_is_written_to,
        with_a_weight_that_is_made,
        of_a_norm_that_is_written_to,
        of_a_norm_whose_view_is_written_to,
    ],
)
def test_others_stay(call: Any) -> None:
    gm = Layer.after(FUSE, call)
    assert not nodes_of(gm, "norm_router") and nodes_of(gm, "moe_router")


def by_keyword(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    normed, total = add_rms_norm_op(x, residual, layer.norm_weight, 1e-5)
    return (
        *layer.route(torch.flatten(input=normed, start_dim=0, end_dim=-2)),
        normed.view(-1),
        total.view(-1),
    )


def under_no_grad(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return routed(layer, x, residual)


@pytest.mark.parametrize("call", [by_keyword, under_no_grad])
def test_results_are_known_and_need_no_gradient(call: Any) -> None:
    (node,) = nodes_of(Layer.after(FUSE, call, trains=call is under_no_grad), "norm_router")
    check_results(node, num_views=2 if call is by_keyword else 0)


@pytest.mark.parametrize(("tokens", "fused"), [(32, 1), (33, 0)])
def test_more_tokens_than_the_kernel_takes_are_normed_apart(
    tokens: int, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_compile.passes.fuse_norm_router.first_serves", lambda *_, **facts: True)
    capture = Capture([*FUSE[:2], fuse_norm_router])
    torch.compile(Layer(routed), backend=capture, fullgraph=True)(*torch.randn(2, tokens, K))
    assert len(nodes_of(capture.after[0], "norm_router")) == fused


def test_a_caller_that_asks_for_bits_of_its_own_gets_them() -> None:
    def call(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        normed = layer.norm(x + residual)
        return moe_router(normed, layer.weight, layer.bias, 2, 1, 1, False, True, 1.5, batch_invariant=True)

    (node,) = nodes_of(Layer.after(FUSE, call), "norm_router")
    assert node.args[-1] is True


def test_a_batch_invariant_graph_asks_the_op_for_bits_that_do_not_depend_on_the_batch() -> None:
    (node,) = nodes_of(Layer.after([*FUSE, make_batch_invariant], routed), "norm_router")
    assert node.args[-1] is True


def test_nothing_is_fused_where_the_op_has_no_kernel() -> None:
    gm = Layer.after([*FUSE[:2], fuse_norm_router], routed)
    assert "norm_router" not in ops(gm) and fuse_norm_router in PASSES
