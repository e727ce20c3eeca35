"""Arguments by name: every spelling of a call of our ops is read and rewritten the same way."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx

from mla_compile import explain
from mla_compile.ops.attention.append import append_op
from mla_compile.ops.attention.decode import decode_op
from mla_compile.ops.attention.masked_decode import masked_decode_op
from mla_compile.ops.attention.mla_attention import attention_op
from mla_compile.ops.attention.norm_rope import norm_rope_append_op
from mla_compile.ops.attention.prefill import prefill_op
from mla_compile.ops.experts.moe import moe_experts_op
from mla_compile.passes import pipeline
from mla_compile.passes.effects import appended_cache, may_write
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.passes.nodes import (
    calls,
    is_call,
    op_arguments,
    tensor_of,
    values_of,
    with_arguments,
)
from mla_compile.passes.plan_decode import plan_decode
from tests.passes.capture import Capture, Stack, make_inputs, ops, without_kernel
from tests.passes.test_fuse_norm_rope_append import NormRopeLayer, halves, upcast

OPS = [
    *(append_op, attention_op, decode_op, masked_decode_op, moe_experts_op, norm_rope_append_op, prefill_op),
    torch.ops.aten.clone.default,  # has an argument that is only given by name
]
SEEDS = range(60)


def parameters(op: Any) -> list[Any]:
    schema = op._schema  # private: torch has no public way to the schema of an op
    return schema.arguments


def spell(op: Any, values: dict[str, Any], rng: random.Random) -> tuple[Any, tuple, dict[str, Any]]:
    """A call of an op with these values: some by position, the others by name in any order, defaults left out."""
    schema = parameters(op)
    by_position = rng.randint(0, sum(not argument.kwarg_only for argument in schema))
    named = [
        argument.name
        for argument in schema[by_position:]
        if not (argument.has_default_value() and values[argument.name] == argument.default_value)
        or rng.random() < 0.5
    ]
    rng.shuffle(named)
    args = tuple(values[argument.name] for argument in schema[:by_position])
    return rng.choice((op, op.overloadpacket)), args, {name: values[name] for name in named}


def drawn_call(rng: random.Random) -> tuple[fx.Node, Any, dict[str, Any]]:
    """A call in a graph, its op, and every argument's value."""
    graph, op = fx.Graph(), rng.choice(OPS)
    values = {
        argument.name: argument.default_value
        if argument.has_default_value() and rng.random() < 0.5
        else rng.choice((graph.placeholder(argument.name), rng.random()))
        for argument in parameters(op)
    }
    target, args, kwargs = spell(op, values, rng)
    return graph.call_function(target, args, kwargs), op, values


@pytest.mark.parametrize("part", range(5))
def test_every_argument_is_read_by_its_name_however_the_call_is_spelled(part: int) -> None:
    for seed in range(200 * part, 200 * (part + 1)):
        node, op, values = drawn_call(random.Random(seed))
        if node.target is torch.ops.aten.clone:
            continue  # two overloads: which one is meant is not known
        assert is_call(node, op) and calls(node.graph, op) == [node], f"seed {seed}: {node.format_node()}"
        assert op_arguments(node) == values, f"seed {seed}: {node.format_node()}"
        assert list(op_arguments(node)) == [argument.name for argument in parameters(op)]


def test_changing_arguments_by_name_leaves_the_others_and_gives_a_call_that_the_schema_takes() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        node, op, values = drawn_call(rng)
        if node.target is torch.ops.aten.clone:
            continue
        changed = {name: rng.random() for name in rng.sample(list(values), rng.randint(0, len(values)))}
        args, kwargs = with_arguments(node, **changed)
        again = node.graph.call_function(node.target, args, kwargs)
        assert op_arguments(again) == values | changed, f"seed {seed}"
        only_named = {argument.name for argument in parameters(op) if argument.kwarg_only}
        assert kwargs.keys() == only_named, f"seed {seed}"
        assert op_arguments(node) == values, f"seed {seed}: the node itself is another matter"


def test_a_name_that_the_schema_lacks_is_noticed() -> None:
    node = fx.Graph().call_function(append_op, (1, 2, 3, 4))
    with pytest.raises(AssertionError, match="no_such"):
        with_arguments(node, no_such=1)


def test_an_op_of_several_overloads_is_none_of_them_where_the_call_leaves_it_open() -> None:
    node = fx.Graph().call_function(torch.ops.aten.add, (1, 2))
    assert not is_call(node, torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)


def test_a_value_of_several_elements_is_read_by_its_first_tensor() -> None:
    node = fx.Graph().placeholder("x")
    assert values_of(node) == [None]
    node.meta["example_value"] = (2, [torch.zeros(4, 3), torch.zeros(5)])
    assert len(values_of(node)) == 3 and tensor_of(node).shape == (4, 3)


# --- passes


def respell(gm: fx.GraphModule, example_inputs: Sequence[Any], *, rng: random.Random) -> fx.GraphModule:
    """Spells every call of our ops in another way."""
    for node in gm.graph.nodes:
        op = getattr(node.target, "default", node.target) if node.op == "call_function" else None
        if op in OPS[:-1]:
            values = {argument.name: argument.default_value for argument in parameters(op)}
            values |= dict(zip(values, node.args)) | node.kwargs
            node.target, node.args, node.kwargs = spell(op, values, rng)
    return gm


PASSES = [
    *pipeline.PASSES[:2],
    without_kernel(fuse_norm_rope_append),
    partial(plan_decode, backend="reference"),
]


def after_passes(
    model: torch.nn.Module, inputs: tuple, respelled: random.Random | None
) -> tuple[Any, fx.GraphModule]:
    passes = PASSES
    if respelled is not None:
        passes = [p for one in PASSES for p in (partial(respell, rng=respelled), one)]
    capture = Capture(passes)
    return torch.compile(model, backend=capture, fullgraph=True)(*inputs), capture.after[0]


@pytest.mark.parametrize("seed", range(2))
def test_calls_that_are_spelled_in_another_way_before_each_pass_are_rewritten_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    model, inputs = NormRopeLayer(upcast, halves), make_inputs(rows=3, q_len=2)
    cache = model.layer.kv_cache.clone()
    expected, plain = after_passes(model, inputs, None)
    written = model.layer.kv_cache.clone()
    model.layer.kv_cache.copy_(cache)
    torch.compiler.reset()
    got, other = after_passes(model, inputs, random.Random(seed))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    torch.testing.assert_close(model.layer.kv_cache, written, rtol=0, atol=0)
    assert ops(other) == ops(plain) and "mla_norm_rope_append" in ops(plain)
    (decode,) = calls(other.graph, decode_op)
    assert op_arguments(decode)["backend"] == "reference"


def test_an_append_by_keywords_writes_to_its_cache_and_to_nothing_else() -> None:
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in ("slot_mapping", "kv_cache", "k_pe", "kv_c")}
    node = graph.call_function(torch.ops.mla_compile.mla_append, (), given)
    assert appended_cache(node) is given["kv_cache"] and may_write(node) == [given["kv_cache"]]


@pytest.mark.long
def test_layers_are_explained_the_same_however_their_calls_are_spelled() -> None:
    model, inputs = Stack(2), make_inputs(rows=2, q_len=3, chunks=(4,))
    expected = explain(model, *inputs).layers
    for seed in range(3):
        mixed = partial(respell, rng=random.Random(seed))
        passes = [p for one in pipeline.PASSES for p in (mixed, one)]
        assert explain(model, *inputs, passes=[*passes, mixed]).layers == expected, f"seed {seed}"
