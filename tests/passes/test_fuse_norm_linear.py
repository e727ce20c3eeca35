"""`fuse_norm_linear`: which norms are computed in the launch of the product that reads them, and which are not."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_compile.models.fp8 import FP8Linear
from mla_compile.ops.attention.norm_rope import rms_norm
from mla_compile.ops.linear.matmul import fused_linear
from mla_compile.ops.norm.rms_norm import add_rms_norm_op
from mla_compile.passes import PASSES
from mla_compile.passes.fuse_linear import fuse_linear
from mla_compile.passes.fuse_norm_linear import fuse_norm_linear
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from mla_compile.passes.make_batch_invariant import make_batch_invariant
from mla_compile.passes.remove_noops import remove_noops
from tests.passes.capture import Capture, Normed, check_results, nodes_of, ops, without_kernel
from tests.passes.test_fp8 import fill

K, FIRST, SECOND = Normed.K, 24, 8
NORM, LINEAR, NORM_LINEAR = map(without_kernel, (fuse_rms_norm, fuse_linear, fuse_norm_linear))
FUSE = [NORM, LINEAR, remove_noops, NORM_LINEAR]


class Layer(Normed):
    """Two projections with adjacent weights, one with an FP8 weight, and a norm."""

    def __init__(self, call: Callable[["Layer", Tensor, Tensor], Any]) -> None:
        super().__init__(call)
        self.a, self.b = nn.Linear(K, FIRST, bias=False), nn.Linear(K, SECOND, bias=False)
        both = torch.cat([self.a.weight.data, self.b.weight.data])
        self.a.weight.data, self.b.weight.data = both.split([FIRST, SECOND])
        self.fp8 = fill(FP8Linear(K, FIRST))
        self.requires_grad_(False)

    def both(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x).sin(), self.b(x)], dim=-1)


def joined(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer.both(layer.norm(total)), total * 2


def of_columns(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    wide = torch.cat([x, residual], dim=-1)
    return layer.both(layer.norm(wide[..., :K]).flatten(0, -2))


def twice(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    total = x + residual
    hidden = layer.both(layer.norm(total))[..., :K]
    return layer.both(layer.norm(hidden + total))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("call", "fused"), [(joined, 1), (of_columns, 1), (twice, 2)])
def test_a_norm_that_one_product_reads_is_computed_with_it(call: Any, fused: int, dims: int) -> None:
    gm = Layer.after(FUSE, call, dims)
    assert len(nodes_of(gm, "norm_linear")) == fused
    assert not {"fused_rms_norm", "fused_add_rms_norm", "fused_linear", "fp8_linear"} & set(ops(gm))
    assert (nodes_of(gm, "norm_linear")[0].args[1] is None) == (call is of_columns)


def read_by_others(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    normed = layer.norm(x + residual)
    return layer.both(normed), normed.sin()


def read_on_the_way(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    normed = layer.norm(x)
    return layer.both(normed), normed.unsqueeze(0) * 2


def of_other_rows(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    return layer.both(layer.norm(x.view(-1, 2, K // 2).flatten(1)).flip(0))


def with_a_weight_that_is_made(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    normed = layer.norm(x)
    return fused_linear(normed, layer.a.weight * residual[0, 0])


def with_an_fp8_weight(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    return layer.fp8(layer.norm(x))


def in_another_dtype(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    weight = layer.a.weight.half()
    normed = rms_norm(x.bfloat16(), layer.norm_weight.bfloat16(), 1e-5).view(torch.float16)
    return fused_linear(normed, weight)


def with_a_weight_written_to(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
    normed = layer.norm(x)
    layer.a.weight.mul_(1.0)
    return fused_linear(normed, layer.a.weight)


@pytest.mark.parametrize(
    "call",
    [
        read_by_others,
        read_on_the_way,
        of_other_rows,
        with_a_weight_that_is_made,
        with_an_fp8_weight,
        in_another_dtype,
        with_a_weight_written_to,
    ],
)
def test_others_stay(call: Any) -> None:
    gm = Layer.after(FUSE, call)
    assert not nodes_of(gm, "norm_linear")
    assert {"fused_rms_norm", "fused_add_rms_norm"} & set(ops(gm))


def by_keyword(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    normed, total = add_rms_norm_op(x, residual, layer.norm_weight, 1e-5)
    return layer.both(torch.flatten(input=normed, start_dim=0, end_dim=-2)), total.view(-1)


def under_no_grad(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return joined(layer, x, residual)


@pytest.mark.parametrize("call", [by_keyword, under_no_grad])
def test_results_are_known_and_need_no_gradient(call: Any) -> None:
    (node,) = nodes_of(Layer.after(FUSE, call, trains=call is under_no_grad), "norm_linear")
    check_results(node, num_views=call is by_keyword)


@pytest.mark.parametrize(("tokens", "fused"), [(2, 1), (3, 0)])
def test_more_tokens_than_the_kernel_takes_are_normed_apart(
    tokens: int, fused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mla_compile.passes.fuse_norm_linear.first_serves", lambda *_: True)
    capture = Capture([*FUSE[:3], fuse_norm_linear])
    torch.compile(Layer(joined), backend=capture, fullgraph=True)(*torch.randn(2, tokens, K))
    assert len(nodes_of(capture.after[0], "norm_linear")) == fused


def test_a_norm_with_two_readers_of_the_same_result_stays() -> None:
    """A user's pass may write such a graph."""

    def taken_twice(gm: Any, example_inputs: Any) -> Any:
        (norm,) = nodes_of(gm, "fused_add_rms_norm")
        normed = next(user for user in norm.users if user.args[1] == 0)
        sine = next(user for user in gm.graph.nodes if user.target == "cos")
        with gm.graph.inserting_before(sine):
            again = gm.graph.call_function(operator.getitem, (norm, 0))
        again.meta = dict(normed.meta)
        sine.args = (again,)
        return gm

    def call(layer: Layer, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        normed = layer.norm(total)
        return layer.both(normed), normed.cos()

    assert not nodes_of(Layer.after([*FUSE[:3], taken_twice, NORM_LINEAR], call), "norm_linear")


def test_a_caller_that_asks_for_bits_of_its_own_gets_them() -> None:
    def call(layer: Layer, x: Tensor, residual: Tensor) -> Tensor:
        return fused_linear(layer.norm(x), layer.a.weight, None, batch_invariant=True)

    (node,) = nodes_of(Layer.after(FUSE, call), "norm_linear")
    assert node.args[-1] is True


def test_a_batch_invariant_graph_asks_the_op_for_bits_that_do_not_depend_on_the_batch() -> None:
    (node,) = nodes_of(Layer.after([*FUSE, make_batch_invariant], of_columns), "norm_linear")
    assert node.args[-1] is True


def test_nothing_is_fused_where_the_op_has_no_kernel() -> None:
    gm = Layer.after([*FUSE[:3], fuse_norm_linear], joined)
    assert "norm_linear" not in ops(gm) and fuse_norm_linear in PASSES
