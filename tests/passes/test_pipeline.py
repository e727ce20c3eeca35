"""What the pipeline does around each pass, also a user's: counts, example values, checks, code, the log."""

import copy
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from mla_compile import MLABatch, MLAError
from mla_compile.ops.library import tables
from mla_compile.ops.norm.rms_norm import rms_norm_op
from mla_compile.passes import PASSES, pipeline
from mla_compile.passes.absorb_mla import absorb_mla
from mla_compile.passes.nodes import namespace_of
from mla_compile.passes.plan_decode import plan_decode
from mla_compile.torch_internals import copy_graph
from tests.passes.capture import Capture, Stack, graph_of, make_inputs, nodes_of

Graph = tuple[fx.GraphModule, Sequence[Any]]


def sine() -> Graph:
    return graph_of(lambda x: x.sin().cos() + 1, torch.randn(4, 3))


def before_sine(make: Callable[[fx.Graph, fx.Node], fx.Node]) -> pipeline.Pass:
    """A user's pass that puts nodes before `sin`, without example values, a check or new code."""

    def mine(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_method", target="sin"):
            with gm.graph.inserting_before(node):
                node.args = (make(gm.graph, node.args[0]),)
        return gm

    return mine


relu = before_sine(lambda graph, x: graph.call_function(torch.relu, (x,)))


# --- what it counts


def test_each_pass_is_timed_and_its_ops_are_counted() -> None:
    steps = pipeline.steps(*graph_of(Stack(2), *make_inputs(rows=2, q_len=3)))
    found = {applied.name: applied for applied, _ in steps}
    assert list(found) == [*(graph_pass.__name__ for graph_pass in PASSES), "plan_decode"]
    split = found["split_prefill_decode"]
    assert split.changed and (split.before["mla_attention"], split.after["mla_attention"]) == (2, 0)
    assert split.after["mla_append"] == split.after["mla_decode"] == 2
    others = [applied for name, applied in found.items() if name != "split_prefill_decode"]
    assert not any(applied.changed for applied in others)
    assert all(applied.before == applied.after for applied in others)
    assert all(applied.seconds > 0 for applied in found.values())


def random_edits(seed: int) -> tuple[pipeline.Pass, Counter[str], Counter[str]]:
    """A pass that inserts nodes after some and removes others, and what it adds and removes."""
    rng, added, removed = random.Random(seed), Counter[str](), Counter[str]()

    def edit(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        for node in [node for node in gm.graph.nodes if node.op.startswith("call_")]:
            choice = rng.random()
            if choice < 0.3:
                with gm.graph.inserting_after(node):
                    new = gm.graph.call_function(rng.choice((torch.relu, torch.neg)), (node,))
                node.replace_all_uses_with(new, lambda user, new=new: user is not new)
                added[new.target.__name__] += 1
            elif choice < 0.6:
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
                removed[node.target if node.op == "call_method" else node.target.__name__] += 1
        return gm

    return edit, added, removed


def test_what_is_counted_is_what_a_random_pass_did() -> None:
    captured, inputs = sine()
    for seed in range(100):
        edit, added, removed = random_edits(seed)
        ((applied, gm),) = pipeline.steps(copy_graph(captured), inputs, [edit])
        assert applied.after - applied.before == added and applied.before - applied.after == removed, seed
        assert applied.changed == bool(added or removed), f"seed {seed}"
        listed = re.findall(r"(\w+) x (\d+)", str(applied))
        assert Counter({name: int(n) for name, n in listed}) == added + removed, f"seed {seed}: {applied}"
        assert all("example_value" in n.meta for n in gm.graph.nodes if n.op.startswith("call_")), (
            f"seed {seed}"
        )


def test_a_pass_that_only_changes_arguments_has_changed_the_graph() -> None:
    gm, inputs = graph_of(Stack(1), *make_inputs(rows=2))
    passes = [*PASSES, partial(plan_decode, backend="reference")]
    *_, last = (applied for applied, _ in pipeline.steps(gm, inputs, passes))
    assert last.name == "plan_decode" and last.changed and last.before == last.after
    assert re.match(r"plan_decode: .*arguments.*ms\)", str(last))


def test_a_function_of_the_same_name_is_another_one() -> None:
    def swap(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        (node,) = gm.graph.find_nodes(op="call_function", target=torch.relu)
        node.target = torch.nn.functional.relu
        return gm

    gm, inputs = graph_of(torch.relu, torch.randn(3))
    ((applied, gm),) = pipeline.steps(gm, inputs, [swap])
    assert applied.changed and "functional" in gm.code


def test_the_log_has_a_line_for_each_pass_and_the_trace_a_graph_for_each_that_changed_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[str] = []
    monkeypatch.setattr(pipeline, "trace_graph", lambda name, gm: traced.append(f"{name}: {gm.code}"))
    with caplog.at_level(logging.DEBUG, "mla_compile"):
        pipeline.run(*graph_of(Stack(2), *make_inputs(rows=2)))
    lines = [record.getMessage() for record in caplog.records if record.name == "mla_compile.passes.pipeline"]
    changes = dict(line.split(": ", 1) for line in lines)
    assert list(changes) == [*(graph_pass.__name__ for graph_pass in PASSES), "plan_decode"]
    split = r"\+ .*mla_append x 2, mla_decode x 2 - mla_attention x 2 \(\d+\.\d ms\)"
    assert re.fullmatch(split, changes["split_prefill_decode"]), changes
    assert re.fullmatch(r"[^+-]+ \(\d+\.\d ms\)", changes["fuse_shared_experts"])
    (graph,) = traced
    assert graph.startswith("mla_after_split_prefill_decode: ") and "mla_decode" in graph


# --- what a pass may forget


def test_new_nodes_get_the_example_values_that_a_pass_left_out() -> None:
    shifted = before_sine(
        lambda graph, x: graph.call_method("add", (x, graph.call_function(torch.arange, (3,))))
    )
    gm = pipeline.run(*sine(), [shifted])
    values = {node.name: node.meta["example_value"] for node in gm.graph.nodes if node.op.startswith("call_")}
    assert tuple(values["add"].shape) == (4, 3) and values["add"].dtype == torch.float32
    assert tuple(values["arange"].shape) == (3,) and values["arange"].fake_mode is values["add"].fake_mode


def test_example_values_that_a_pass_has_set_are_left() -> None:
    def make(graph: fx.Graph, x: fx.Node) -> fx.Node:
        node = graph.call_function(torch.relu, (x,))
        node.meta["example_value"] = x.meta["example_value"]
        return node

    gm = pipeline.run(*sine(), [before_sine(make)])
    (node,) = nodes_of(gm, "relu")
    assert node.meta["example_value"] is node.args[0].meta["example_value"]


def test_the_code_is_that_of_the_graph_after_every_pass() -> None:
    def sees_relu(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        assert "relu" in gm.code
        return gm

    compiled = torch.compile(lambda x: x.sin().cos() + 1, backend=Capture([relu, sees_relu]), fullgraph=True)
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled(x), x.relu().sin().cos() + 1)


def test_a_pass_may_give_back_another_graph_module() -> None:
    def renew(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        return relu(fx.GraphModule(gm, graph), example_inputs)

    gm, inputs = sine()
    ((applied, other),) = pipeline.steps(gm, inputs, [renew])
    assert other is not gm and applied.after - applied.before == {"relu": 1}


# --- what it refuses


def fails(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    raise KeyError("no such node")


def forgets_to_return(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    relu(gm, example_inputs)


def reads_before_it_is_written(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    (sin,) = gm.graph.find_nodes(op="call_method", target="sin")
    (cos,) = gm.graph.find_nodes(op="call_method", target="cos")
    sin.prepend(cos)
    return gm


def multiplies_what_does_not_fit(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    return before_sine(lambda graph, x: graph.call_function(torch.mm, (x, x)))(gm, example_inputs)


class Broken:
    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        return reads_before_it_is_written(gm, example_inputs)


BAD = {
    "fails": (
        fails,
        r"pass fails: expected a graph module, got KeyError: 'no such node'; .*options=\{'passes'",
    ),
    "forgets to return": (
        forgets_to_return,
        "^pass forgets_to_return: .*None; .*`return gm`",
    ),
    "breaks the order": (
        reads_before_it_is_written,
        "^pass reads_before_it_is_written: .*lint",
    ),
    "breaks the order, an object": (Broken(), "pass Broken: "),
    "breaks the order, bound": (partial(reads_before_it_is_written), "pass reads_before_it_is_written: "),
    "cannot run": (
        multiplies_what_does_not_fit,
        "^pass multiplies_what_does_not_fit: .*example values: %mm .*same reduction dim",
    ),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_pass_is_named(bad: pipeline.Pass, message: str) -> None:
    with pytest.raises(MLAError, match=message) as refused:
        pipeline.run(*sine(), [absorb_mla, bad, relu])
    assert (refused.value.__cause__ is None) == (bad is forgets_to_return)


def test_the_compile_of_a_user_names_the_bad_pass_and_says_no_less() -> None:
    compiled = torch.compile(torch.sin, backend="mla", options={"passes": [fails]})
    with pytest.raises(Exception, match=r"pass fails: .*KeyError: 'no such node'"):
        compiled(torch.randn(3))


def test_an_error_that_a_pass_explains_itself_keeps_its_words() -> None:
    def refuses(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        raise MLAError("bound", "a number > 0", -1)

    with pytest.raises(MLAError, match=r"^bound: expected a number > 0, got -1 .*refuses"):
        pipeline.run(*sine(), [refuses])


# --- the list


def test_the_pass_of_an_option_is_bound_to_it_and_runs_last_also_after_a_users() -> None:
    gm, _ = graph_of(Stack(1), *make_inputs(rows=2))
    for passes, expected in ((None, PASSES), ([*PASSES, relu], [*PASSES, relu]), ([], [])):
        *others, last = pipeline.passes_for(gm, passes, decode_backend="triton")
        assert others == expected and isinstance(last, partial)
        assert last.func is plan_decode and last.keywords == {"backend": "triton", "captured": True}


def test_a_graph_without_an_op_of_ours_is_searched_for_mla_and_for_nothing_else() -> None:
    gm, _ = sine()
    assert pipeline.passes_for(gm) == [absorb_mla]


def mapped(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.outer(row).sum(0))(rms_norm_op(x, None, 1e-6))


def differentiated(x: Tensor) -> Tensor:
    return rms_norm_op(torch.func.grad(lambda y: y.pow(3).sum())(x), None, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("function", [mapped, differentiated])
def test_a_graph_with_transforms_is_compiled_without_passes(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 8)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="mla", fullgraph=True)
    torch.testing.assert_close(compiled(x), function(x))
    for name, value in (
        ("batch_invariant", True),
        ("decode_backend", "reference"),
        ("fp8_activations", True),
    ):
        torch._dynamo.reset()
        with pytest.raises(MLAError, match=rf"^options\['{name}'\]: .*torch\.func.*; compile"):
            torch.compile(function, backend="mla", fullgraph=True, options={name: value})(x)


@torch.compiler.nested_compile_region
def nested(layer: nn.Module, x: Tensor, batch: MLABatch) -> Tensor:
    return layer(x, batch)


def in_branches(layer: nn.Module, x: Tensor, batch: MLABatch) -> Tensor:
    return torch.cond(x[0, 0] > 9, lambda y: -layer(y, batch), lambda y: layer(y, batch), (x,))


@pytest.mark.parametrize(("call", "name"), [(nested, "invoke_subgraph"), (in_branches, "cond")])
def test_attention_in_a_subgraph_that_torch_cannot_compile_is_refused(
    call: Callable[..., Tensor], name: str
) -> None:
    layer, (x, batch) = Stack(1).layers[0], make_inputs(rows=2)

    def twice(x: Tensor) -> Tensor:  # Dynamo inlines a region that is called once
        return call(layer, call(layer, x, batch), batch)

    compiled = torch.compile(twice, backend="mla", fullgraph=True)
    with pytest.raises(MLAError, match=rf"^mla_attention: .* outside of {name}, .*test_pipeline\.py.*; move"):
        compiled(x)


@pytest.mark.usefixtures("lowering")
def test_attention_in_a_checkpoint_and_other_ops_of_ours_in_branches_are_compiled() -> None:
    def call(layer: nn.Module, x: Tensor, batch: MLABatch) -> Tensor:
        x = checkpoint(layer, x, batch, use_reentrant=False)
        return torch.cond(x[0, 0] > 9, lambda y: -y, lambda y: rms_norm_op(y, None, 1e-6), (x,))

    layer, (x, batch) = Stack(1).layers[0], make_inputs(rows=2)
    expected = call(copy.deepcopy(layer), x, batch)
    compiled = torch.compile(lambda *given: call(layer, *given), backend="mla", fullgraph=True)
    torch.testing.assert_close(compiled(x, batch), expected)


@pytest.mark.parametrize("name", sorted(tables))
def test_a_graph_with_an_op_of_ours_meets_every_pass_however_the_call_is_spelled(name: str) -> None:
    packet = getattr(torch.ops.mla_compile, name)  # as Dynamo leaves `torch.ops.mla_compile.NAME(...)`
    for target in (packet, packet.default):
        graph = fx.Graph()
        graph.output(graph.call_function(target, (graph.placeholder("x"),)))
        *passes, _ = pipeline.passes_for(fx.GraphModule(nn.Module(), graph))
        assert passes == PASSES


def test_a_call_with_the_overload_left_open_is_split() -> None:
    gm, inputs = graph_of(Stack(1), *make_inputs(rows=2, q_len=3))
    for node in gm.graph.nodes:
        if namespace_of(node.target) == "mla_compile":
            node.target = node.target.overloadpacket
    gm = pipeline.run(gm, inputs)
    assert not nodes_of(gm, "mla_attention") and len(nodes_of(gm, "mla_decode")) == 1


def test_the_decode_backend_that_was_asked_for_acts_with_passes_of_a_users_own() -> None:
    model, (x, batch) = Stack(1), make_inputs(rows=2)
    chosen: list[Any] = []

    def look(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        chosen.extend(node.args[-1] for node in nodes_of(gm, "mla_decode"))
        return gm

    options: dict[str, Any] = {"passes": [*PASSES, look], "decode_backend": "triton"}
    compiled: Callable[..., Tensor] = torch.compile(model, backend="mla", fullgraph=True, options=options)
    with pytest.raises(Exception, match=r"triton.*cuda.*cpu"):
        compiled(x, batch)
    assert chosen == [None], "the user's pass ran first"
