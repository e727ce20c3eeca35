"""Inductor's and AOTAutograd's caches behind our passes: hit when possible, never stale."""

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from mla_compile import MLABatch
from mla_compile.passes import PASSES
from tests.passes.capture import Stack, make_inputs


class Tanh(Stack):
    """Has a random constant, which no cached graph has."""

    def __init__(self) -> None:
        super().__init__(1)
        self.constant = random.SystemRandom().random()

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        return torch.tanh(super().forward(x, batch) + self.constant)


@pytest.fixture(autouse=True)
def caches_are_on() -> Iterator[None]:
    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


def replace_tanh(by: object) -> object:
    def my_pass(gm: fx.GraphModule, example_inputs: object) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.tanh):
            node.target = by
        gm.recompile()
        return gm

    return my_pass


def compile_and_run(
    model: Stack, inputs: tuple[Tensor, MLABatch], **options: object
) -> tuple[Tensor, dict[str, int]]:
    """Like a new process: nothing compiled in memory, only the caches on disk."""
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(copy.deepcopy(model), backend="mla", fullgraph=True, options=options or None)
    out = compiled(*inputs)
    found = {**counters["aot_autograd"], **counters["inductor"]}
    return out, {name: n for name, n in found.items() if "cache_" in name and "lookup" not in name}


@pytest.mark.long
def test_a_second_compile_hits_the_caches_and_none_is_bypassed() -> None:
    model, inputs = Tanh(), make_inputs(rows=2, q_len=2, chunks=(3,), unbacked=True)
    _, first = compile_and_run(model, inputs)
    out, second = compile_and_run(model, inputs)
    assert first["autograd_cache_miss"] == first["fxgraph_cache_miss"] == 1
    assert second["autograd_cache_hit"] == second["fxgraph_cache_hit"] == 1
    assert not any("bypass" in name for name in {**first, **second}), "a node without example_value, perhaps"
    torch.testing.assert_close(out, model(*inputs))


@pytest.mark.long
def test_a_users_pass_that_leaves_out_example_values_does_not_bypass_the_caches() -> None:
    def bounded(gm: fx.GraphModule, example_inputs: object) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=torch.tanh):
            with gm.graph.inserting_before(node):
                bound = gm.graph.call_function(torch.clamp, (node.args[0], -0.5, 0.5))
                node.args = (gm.graph.call_method("neg", (bound,)),)  # a method, whose tensor must be known
        return gm

    model, inputs = Tanh(), make_inputs(rows=2, q_len=2)
    _, first = compile_and_run(model, inputs, passes=[*PASSES, bounded])
    out, second = compile_and_run(model, inputs, passes=[*PASSES, bounded])
    assert first["autograd_cache_miss"] == second["autograd_cache_hit"] == 1
    assert not any("bypass" in name for name in {**first, **second})
    plain = Stack.forward(model, *inputs) + model.constant
    torch.testing.assert_close(out, torch.tanh(-plain.clamp(-0.5, 0.5)))


@pytest.mark.long
def test_another_decode_backend_does_not_get_the_entry_of_the_first() -> None:
    model, inputs = Tanh(), make_inputs(rows=2, q_len=2)
    before, _ = compile_and_run(model, inputs)
    after, found = compile_and_run(model, inputs, decode_backend="reference")
    assert found["autograd_cache_miss"] == 1 and "autograd_cache_hit" not in found
    torch.testing.assert_close(before, after)


@pytest.mark.long
def test_an_edited_pass_does_not_get_the_entry_of_the_old_one() -> None:
    model, inputs = Tanh(), make_inputs(rows=2, q_len=2)
    before, _ = compile_and_run(model, inputs, passes=[*PASSES, replace_tanh(torch.sin)])
    after, found = compile_and_run(model, inputs, passes=[*PASSES, replace_tanh(torch.cos)])
    assert found["autograd_cache_miss"] == 1 and "autograd_cache_hit" not in found
    plain = Stack.forward(model, *inputs) + model.constant
    torch.testing.assert_close(before, torch.sin(plain))
    torch.testing.assert_close(after, torch.cos(plain))
