"""`hoist_row_gather`: how far a gather climbs, where it stops, and that the result stays the same."""

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked

from mla_compile import MLABatch
from mla_compile.caches import allocate
from mla_compile.ops.append import append_op
from mla_compile.ops.moe import moe_experts, moe_experts_op
from mla_compile.passes import pipeline
from mla_compile.passes.effects import mutates
from mla_compile.passes.hoist_row_gather import hoist_row_gather
from mla_compile.passes.provenance import module_path
from mla_compile.speculate import DecodeState, SpeculativeDecoder
from mla_compile.torch_internals import capture_graph
from tests.models_for_tests import tiny_model
from tests.passes.capture import (
    RANK,
    ROPE,
    Capture,
    Layer,
    Stack,
    V,
    compiled_graph,
    make_inputs,
    nodes_of,
    ops,
    rows_computed,
    shape,
)

ROWS, WIDTH = 6, 4
IDS = torch.tensor([4, 1])


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
W = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    """A residual MLP block, a final norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.final_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.lm_head = nn.Linear(WIDTH, 11, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return self.lm_head(self.final_norm(x)).index_select(0, ids)


def test_head_norms_residual_and_mlp_run_on_the_kept_rows_only() -> None:
    gm = compiled_graph(Block(), X, IDS)
    assert {rows for found in rows_computed(gm).values() for rows in found} == {len(IDS)}
    assert len(nodes_of(gm, "index_select")) == 1, "x is gathered once, for the norm and for the residual"


def test_an_moe_op_runs_on_the_kept_rows_only() -> None:
    gate_up, down = torch.randn(3, 2 * 5, WIDTH), torch.randn(3, WIDTH, 5)

    def moe(x: Tensor, router: Tensor, ids: Tensor) -> Tensor:
        weights, experts = F.linear(x, router).softmax(-1).topk(2, dim=-1)
        return torch.index_select(x + moe_experts(x, weights, experts, gate_up, down), 0, ids)

    gm = compiled_graph(moe, X, W, IDS)
    assert rows_computed(gm)["moe_experts"] == rows_computed(gm)["topk"] == {len(IDS)}


def test_an_moe_op_knows_which_of_the_kept_rows_are_padding() -> None:
    gate_up, down = torch.randn(3, 2 * 5, WIDTH), torch.randn(3, WIDTH, 5)
    lens = torch.tensor(
        [1, 2], dtype=torch.int32
    )  # of two tokens each: token 1 is padding, 4 is none of theirs

    def moe(x: Tensor, router: Tensor, ids: Tensor, lens: Tensor) -> Tensor:
        weights, experts = F.linear(x, router).softmax(-1).topk(2, dim=-1)
        out = moe_experts_op(x, weights, experts, gate_up, down, lens, 2)
        return torch.index_select(out, 0, ids)

    gm = compiled_graph(moe, X, W, IDS, lens)
    assert rows_computed(gm)["moe_experts"] == {len(IDS)}
    assert moe(X, W, IDS, lens).any(dim=1).tolist() == [True, False], "IDS are 4 and 1"


@pytest.mark.parametrize("q_len", [1, 2])
def test_an_moe_op_may_be_told_of_no_padding_or_of_no_rows(q_len: int) -> None:
    gate_up, down = torch.randn(3, 2 * 5, WIDTH), torch.randn(3, WIDTH, 5)
    lens = None if q_len == 1 else torch.zeros(0, dtype=torch.int32)

    def moe(x: Tensor, router: Tensor, ids: Tensor) -> Tensor:
        weights, experts = F.linear(x, router).softmax(-1).topk(2, dim=-1)
        return torch.index_select(moe_experts_op(x, weights, experts, gate_up, down, lens, q_len), 0, ids)

    assert rows_computed(compiled_graph(moe, X, W, IDS))["moe_experts"] == {len(IDS)}


def test_an_moe_op_that_is_told_of_padding_by_name_knows_it_of_the_kept_rows() -> None:
    gate_up, down = torch.randn(3, 2 * 5, WIDTH), torch.randn(3, WIDTH, 5)
    lens = torch.tensor([1, 2], dtype=torch.int32)

    def moe(x: Tensor, router: Tensor, ids: Tensor, lens: Tensor) -> Tensor:
        weights, experts = F.linear(x, router).softmax(-1).topk(2, dim=-1)
        out = moe_experts_op(x, weights, experts, gate_up, down, row_lens=lens, q_len=2)
        return torch.index_select(out, 0, ids)

    # Token 1 is padding; as the first of three that are kept it must not be taken for token 0.
    ids = torch.tensor([1, 3, 2])
    gm = compiled_graph(moe, X, W, ids, lens)
    assert rows_computed(gm)["moe_experts"] == {len(ids)}
    assert moe(X, W, ids, lens).any(dim=1).tolist() == [False, True, True]


# --- where it stops


def test_it_stops_at_a_node_that_somebody_else_uses_too() -> None:
    def hidden_and_logits(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        return hidden, torch.index_select(F.linear(F.silu(hidden), W), 0, ids)

    gm = compiled_graph(hidden_and_logits, X, IDS)
    assert rows_computed(gm) == {"mul": {ROWS}, "silu": {len(IDS)}, "linear": {len(IDS)}}


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


LIB = torch.library.Library("hoist_test", "DEF")
LIB.define("bump(Tensor(a!) x) -> ()")
LIB.impl("bump", inplace_method, "CompositeExplicitAutograd")
torch.library.register_fake("hoist_test::bump", lambda x: None, lib=LIB)
LIB.define("bump_and_sum(Tensor(a!) x) -> Tensor")
LIB.impl("bump_and_sum", lambda x: x.add_(1).sum(0), "CompositeExplicitAutograd")
torch.library.register_fake("hoist_test::bump_and_sum", lambda x: x.new_empty(x.shape[1:]), lib=LIB)


def op_overload(x: Tensor) -> None:
    torch.ops.hoist_test.bump.default(x)


def op_packet(x: Tensor) -> None:
    torch.ops.hoist_test.bump(x)


def op_packet_with_a_result(x: Tensor) -> None:
    torch.ops.hoist_test.bump_and_sum(x)


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
def test_it_stops_at_a_write_in_place_by(write: Callable[[Tensor], None]) -> None:
    def function(x: Tensor, ids: Tensor) -> Tensor:
        y = x.sin()  # reads x as it was: it may not move below the write
        write(x)
        return torch.index_select(y.cos(), 0, ids)

    gm = compiled_graph(function, X, IDS)
    computed = rows_computed(gm)
    assert computed["sin"] == {ROWS} and computed["cos"] == {len(IDS)}


@pytest.mark.parametrize("name", sorted(n for n in {*dir(Tensor), *dir(operator)} if n[:3] == "__i"))
def test_a_method_of_an_augmented_assignment_is_a_write(name: str) -> None:
    """`x.__iadd__(y)`: every name of this form that a tensor or an operator has."""
    others = ("__index__", "__int__", "__inv__", "__invert__", "__init__", "__init_subclass__", "__iter__")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_method(name, (x, x))
    node.meta["example_value"] = X
    assert mutates(node) == (name not in others)


def test_it_stops_at_a_higher_order_operator_and_at_a_module_call() -> None:
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
    gm, _ = capture_graph(function, (torch.randn(3, 4),), {})
    assert any(mutates(node) for node in gm.graph.nodes) == writes


def test_it_does_not_leave_an_autocast_region() -> None:
    def function(x: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, W)
        return torch.index_select(y.float(), 0, ids)

    (linear,) = nodes_of(compiled_graph(function, X, IDS), "linear")
    assert shape(linear)[0] == ROWS


def test_an_embedding_with_a_max_norm_looks_up_all_rows() -> None:
    def function(x: Tensor, ids: Tensor) -> Tensor:
        return F.embedding(torch.arange(ROWS), x, max_norm=0.1).index_select(0, ids)

    assert rows_computed(compiled_graph(function, X, IDS))["embedding"] == {ROWS}


@pytest.mark.parametrize(
    "part",
    [lambda x: (x * 2).chunk(2, -1)[0], lambda x: (x * 2)[:, 1:3], lambda x: (x * 2)[..., 0]],
    ids=["chunk", "slice", "column"],
)
def test_the_new_value_has_the_strides_of_the_gather(part: Callable[[Tensor], Tensor]) -> None:
    gm = compiled_graph(lambda x, ids: part(x).index_select(0, ids).view(-1), X, IDS)
    assert rows_computed(gm)["mul"] == {len(IDS)} and "contiguous" in ops(gm)


@pytest.mark.parametrize("sizes", [(ROWS, 2, -1), (-1, 2, 2)])
def test_a_gather_of_no_rows_climbs_over_a_view_with_a_size_left_out(sizes: tuple[int, ...]) -> None:
    no_ids = torch.empty(0, dtype=torch.int64)
    gm = compiled_graph(lambda x, ids: x.sin().view(sizes).index_select(0, ids), X, no_ids)
    assert ops(gm) == ["index_select", "sin", "view"]


def test_it_stops_at_a_view_that_leaves_out_a_dynamic_size() -> None:
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 1)
    capture = Capture()
    torch.compile(lambda x, ids: x.sin().view(ROWS, 2, -1).index_select(0, ids), backend=capture)(x, IDS)
    assert ops(capture.after[0])[-1] == "index_select"


def test_a_gather_of_unknown_length_may_turn_out_empty() -> None:
    def function(x: Tensor, ids: Tensor) -> Tensor:
        return x.sin().view(ROWS, 2, -1).index_select(0, ids)

    compiled = torch.compile(function, backend=Capture(), fullgraph=True)
    for kept in (2, 0):
        ids = IDS[:kept].clone()
        mark_unbacked(ids, 0)
        torch.testing.assert_close(compiled(X, ids), function(X, ids))


def test_an_index_in_brackets_is_no_gather() -> None:
    gm = compiled_graph(lambda x, ids: x.sin()[ids], X, torch.tensor([-1, 2]))
    assert rows_computed(gm)["sin"] == {ROWS}


def test_masks_by_and_and_or_are_not_taken_for_writes() -> None:
    assert operator.and_.__name__.endswith("_"), "by its name it looks like one"
    gm = compiled_graph(
        lambda x, ids: torch.index_select(x.where((x > 0) & (x < 1), 0.0).cos(), 0, ids), X, IDS
    )
    assert rows_computed(gm)["cos"] == {len(IDS)}


def test_a_gather_that_keeps_as_many_rows_as_there_are_stays() -> None:
    order = torch.randperm(ROWS)
    gm = compiled_graph(lambda x, ids: torch.index_select(x.sin(), 0, ids), X, order)
    assert ops(gm) == ["sin", "index_select"]


def test_a_gather_of_columns_stays() -> None:
    gm = compiled_graph(lambda x, ids: torch.index_select(x.sin(), 1, ids), X, torch.tensor([1]))
    assert ops(gm) == ["sin", "index_select"]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_graph_in_which_nothing_climbs_is_the_same_object_with_the_same_code(dim: int) -> None:
    found = capture_graph(lambda x, ids: torch.index_select(x, dim, ids), (X, torch.tensor([1])), {})
    assert found is not None
    gm, inputs = found
    code, nodes = gm.code, list(gm.graph.nodes)
    assert hoist_row_gather(gm, inputs) is gm
    assert gm.code == code and list(gm.graph.nodes) == nodes


def test_running_it_twice_changes_nothing_more() -> None:
    gm = compiled_graph(Block(), X, IDS)
    once = str(gm.graph)
    assert str(hoist_row_gather(gm).graph) == once


# --- attention


class Picked(Stack):
    def forward(self, x: Tensor, batch: MLABatch, ids: Tensor) -> Tensor:
        return torch.index_select(super().forward(x, batch), 0, ids)


@pytest.mark.parametrize("q_lens", [None, [4, 2, 0]], ids=["full rows", "ragged rows"])
@pytest.mark.parametrize("unbacked", [False, True], ids=["static", "unbacked"])
def test_the_last_layers_query_attention_and_o_proj_run_on_the_kept_tokens_only(
    q_lens: list[int] | None, unbacked: bool
) -> None:
    x, batch = make_inputs(rows=3, q_len=4, q_lens=q_lens, unbacked=unbacked)
    gm = compiled_graph(Picked(2), x, batch, torch.tensor([1, 7]))
    first, last = nodes_of(gm, "mla_decode")
    assert (shape(last.args[0])[0], last.args[6], last.args[5]) == (2, 1, None)
    assert first.args[6] == 4, "the first layer's output is needed by the last one's append"
    full = shape(first)[0]
    assert [shape(append.args[0])[0] == full for append in nodes_of(gm, "mla_append")] == [True, True]
    linears = [shape(node)[0] for node in nodes_of(gm, "linear")]
    assert [rows == 2 for rows in linears] == [False] * 4 + [True] * 2, (
        "q, kv, o of layer 0; kv, then q, o of layer 1"
    )


def test_in_a_mixed_batch_it_stops_at_the_cat_of_the_segments() -> None:
    gm = compiled_graph(Picked(1), *make_inputs(rows=2, q_len=3, chunks=(4,)), torch.tensor([1, 5, 9]))
    assert shape(nodes_of(gm, "mla_decode")[0].args[0])[0] == 6
    (joined,) = [node for node in nodes_of(gm, "cat") if shape(node)[2:] == (V,)]
    assert [user.target for user in joined.users] == [torch.index_select]
    assert shape(nodes_of(gm, "linear")[-1])[0] == 3, "o_proj"


def test_it_does_not_cross_a_later_append_to_the_same_cache() -> None:
    class Twice(Layer):
        """Writes two tokens a row, then one more over the first of them: what an MTP chain does."""

        def forward(self, x: Tensor, batch: MLABatch, ids: Tensor) -> Tensor:
            first = super().forward(x, batch)
            second = super().forward(x.flip(0), batch)
            return torch.index_select(first, 0, ids) + torch.index_select(second, 0, ids)

    torch.manual_seed(0)
    gm = compiled_graph(Twice().requires_grad_(False), *make_inputs(rows=2, q_len=2), torch.tensor([1, 2]))
    assert [node.args[6] for node in nodes_of(gm, "mla_decode")] == [2, 1]


@pytest.mark.parametrize(
    ("read", "written"), [(0, 1), (1, 0), (1, 1)], ids=["view written", "view read", "views of it"]
)
def test_it_does_not_cross_a_later_append_to_the_same_memory(read: int, written: int) -> None:
    def function(cache: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        caches = [cache, cache.view(2, 2, -1)]
        y = x + caches[read][0, 0]
        append_op(x[:, :RANK], x[:, RANK:], caches[written], torch.tensor([0, 1, 2]))
        return torch.index_select(y.cos(), 0, ids)

    x = torch.randn(3, RANK + ROPE)
    gm = compiled_graph(function, torch.randn(2, 2, RANK + ROPE), x, torch.tensor([2, 0]))
    assert rows_computed(gm)["add"] == {3} and rows_computed(gm)["cos"] == {2}


def test_it_crosses_a_later_append_to_other_memory() -> None:
    def function(cache: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        y = x.sin()
        append_op(x[:, :RANK], x[:, RANK:], cache[0], torch.tensor([0, 1, 2]))
        return torch.index_select(y, 0, ids)

    x = torch.randn(3, RANK + ROPE)
    gm = compiled_graph(function, torch.randn(1, 2, 2, RANK + ROPE), x, torch.tensor([2, 0]))
    assert rows_computed(gm)["sin"] == {2}


def test_a_graph_without_an_op_of_ours_is_left_alone_unless_the_pass_was_asked_for() -> None:
    found = capture_graph(lambda x, ids: F.silu(x).index_select(0, ids), (X, IDS), {})
    assert found is not None
    gm, inputs = found
    code, nodes = gm.code, list(gm.graph.nodes)
    assert pipeline.run(gm, inputs) is gm
    assert gm.code == code and list(gm.graph.nodes) == nodes
    assert ops(pipeline.run(gm, inputs, [hoist_row_gather])) == ["index_select", "silu"]


def test_reduced_nodes_keep_their_provenance_and_carry_example_values() -> None:
    gm = compiled_graph(Picked(1), *make_inputs(rows=3, q_len=4), torch.tensor([1, 7]))
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            assert "example_value" in node.meta and "stack_trace" in node.meta
    (decode,) = nodes_of(gm, "mla_decode")
    assert module_path(decode) == "layers.0"
    assert shape(decode) == (2, 3, RANK) and shape(decode.args[1])[-1] == ROPE


# --- the step that it is for


@pytest.mark.long
def test_in_a_speculative_step_only_the_latents_of_the_mtp_layer_are_made_for_all_tokens() -> None:
    model = tiny_model(torch.float32)
    allocate(model.cache_specs(), 9, 4)
    rows, k = 2, 3
    decoder = SpeculativeDecoder(model, k, page_size=4, decode_backend="reference")
    found = capture_graph(decoder, (DecodeState.allocate(rows, k, max_pages=4),), {})
    assert found is not None
    gm = pipeline.run(*found)
    mtp = [n for n in nodes_of(gm, "linear") if ".mtp." in f".{module_path(n)}."]
    appended = {shape(node.args[0])[0] for node in nodes_of(gm, "mla_append")}
    all_tokens = next(size for size in appended if str(size).startswith("4*"))
    for_all = {module_path(n).split("mtp.")[1] for n in mtp if shape(n)[0] == all_tokens}
    assert for_all == {"eh_proj", "layer.self_attn.kv_a_proj_with_mqa"}
    tokens = [shape(node.args[0])[0] == all_tokens for node in nodes_of(gm, "mla_decode")]
    assert tokens == [True, True, False, False, False], (
        "two trunk layers verify; the MTP layer drafts three times"
    )
    assert {node.args[8] for node in nodes_of(gm, "mla_decode")} == {"reference"}
