"""`mutates`: which nodes of a Dynamo graph may write in place."""

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.passes.effects import mutates, writer_between
from tests.passes.capture import graph_of, nodes_of

ROWS, WIDTH = 6, 4
IDS = torch.tensor([4, 1])
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def inplace_method(x: Tensor) -> None:
    x.add_(1)


def augmented_assignment(x: Tensor) -> None:
    x += 1


def assignment_to_an_index(x: Tensor) -> None:
    x[0] = 1


def inplace_flag(x: Tensor) -> None:
    F.relu(x, inplace=True)


def out_argument(x: Tensor) -> None:
    torch.add(x, 1, out=x)


LIB = torch.library.Library("effects_test", "DEF")
LIB.define("bump(Tensor(a!) x) -> ()")
LIB.impl("bump", inplace_method, "CompositeExplicitAutograd")
torch.library.register_fake("effects_test::bump", lambda x: None, lib=LIB)
LIB.define("bump_and_sum(Tensor(a!) x) -> Tensor")
LIB.impl("bump_and_sum", lambda x: x.add_(1).sum(0), "CompositeExplicitAutograd")
torch.library.register_fake("effects_test::bump_and_sum", lambda x: x.new_empty(x.shape[1:]), lib=LIB)


def op_overload(x: Tensor) -> None:
    torch.ops.effects_test.bump.default(x)


def op_packet(x: Tensor) -> None:
    torch.ops.effects_test.bump(x)


def op_packet_with_a_result(x: Tensor) -> None:
    torch.ops.effects_test.bump_and_sum(x)


def max_norm_of_an_embedding(x: Tensor) -> None:
    F.embedding(IDS, x, max_norm=0.1)


def positional_max_norm_of_an_embedding(x: Tensor) -> None:
    F.embedding(IDS, x, None, 0.1)


def method_of_an_augmented_assignment(x: Tensor) -> None:
    x.__iadd__(1)


def running_statistics(x: Tensor) -> None:
    F.batch_norm(torch.ones(3, WIDTH), x[0], x[1], training=True)


def positional_running_statistics(x: Tensor) -> None:
    torch.batch_norm(torch.ones(3, WIDTH), None, None, x[0], x[1], True, 0.1, 1e-5, True)


def running_statistics_of_instances(x: Tensor) -> None:
    F.instance_norm(torch.ones(3, WIDTH, 2), x[0], x[1])


@pytest.mark.parametrize(
    "write",
    [
        *(inplace_method, augmented_assignment, assignment_to_an_index, inplace_flag, out_argument),
        *(op_overload, op_packet, op_packet_with_a_result),
        *(max_norm_of_an_embedding, positional_max_norm_of_an_embedding, method_of_an_augmented_assignment),
        *(running_statistics, positional_running_statistics, running_statistics_of_instances),
    ],
)
def test_what_writes_in_place_is_a_write(write: Callable[[Tensor], None]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        write(x)
        return y

    gm, _ = graph_of(function, X)
    assert any(mutates(node) for node in gm.graph.nodes)
    (read,) = nodes_of(gm, "sin")
    assert writer_between(read, next(reversed(gm.graph.nodes)), read.all_input_nodes) is not None


@pytest.mark.parametrize("name", sorted(n for n in {*dir(Tensor), *dir(operator)} if n[:3] == "__i"))
def test_a_method_of_an_augmented_assignment_is_a_write(name: str) -> None:
    """`x.__iadd__(y)`: every name of this form that a tensor or an operator has."""
    others = ("__index__", "__int__", "__inv__", "__invert__", "__init__", "__init_subclass__", "__iter__")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_method(name, (x, x))
    node.meta["example_value"] = X
    assert mutates(node) == (name not in others)


def test_a_higher_order_operator_and_a_module_call_may_write() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert mutates(graph.call_module("anything", (x,)))
    assert mutates(graph.call_function(torch.ops.higher_order.cond, (x,)))


@pytest.mark.parametrize(
    ("function", "writes"),
    [
        (lambda x: F.relu(x, True), True),
        (lambda x: F.dropout(x, 0.1, False, True), True),
        (lambda x: F.silu(x, inplace=True), True),
        (lambda x: F.silu(x, False), False),
        (lambda x: x.pow(2).mean(-1, True), False),
        (lambda x: torch.topk(x, 2, -1, True, True)[0], False),
    ],
)
def test_a_true_that_is_not_inplace_is_no_write(function: Callable[[Tensor], Tensor], writes: bool) -> None:
    gm, _ = graph_of(function, torch.randn(3, 4))
    assert any(mutates(node) for node in gm.graph.nodes) == writes


def test_masks_by_and_and_or_are_not_taken_for_writes() -> None:
    assert operator.and_.__name__.endswith("_"), "by its name it looks like one"
    gm, _ = graph_of(lambda x: x.where((x > 0) & (x < 1), 0.0).cos(), X)
    assert not any(mutates(node) for node in gm.graph.nodes)
