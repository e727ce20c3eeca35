"""`split_prefill_decode`: the rewritten graph, which computes what the unified op does."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from mla_compile import MLABatch
from mla_compile.ops.attention.mla_attention import attention_op
from mla_compile.passes.split_prefill_decode import split_prefill_decode
from tests.passes.capture import (
    DECODE,
    HEADS,
    KINDS,
    NOPE,
    PREFILL,
    RANK,
    ROPE,
    Capture,
    Stack,
    V,
    counts,
    graph_of,
    make_inputs,
    nodes_of,
    ops,
    shape,
)


def split(num_layers: int = 1, **batch: Any) -> fx.GraphModule:
    return split_prefill_decode(graph_of(Stack(num_layers), *make_inputs(**batch))[0])


@pytest.mark.parametrize("q_len", [1, 2, 6])
def test_a_batch_of_mtp_rows_is_decode_whatever_its_query_length(q_len: int) -> None:
    gm = split(3, rows=3, q_len=q_len)
    assert counts(gm) == {"mla_append": 3, "mla_decode": 3, "split": 6}  # the splits are the model's own
    assert nodes_of(gm, "mla_decode")[0].args[6] == q_len


def test_a_batch_of_prompt_chunks_has_no_decode_segment() -> None:
    assert counts(split(3, **PREFILL)) == {"mla_append": 3, "mla_prefill": 3, "cat": 3, "split": 6}


def test_a_mixed_batch_has_one_append_and_one_result_of_two_segments_a_layer() -> None:
    gm = split(2, **DECODE, **PREFILL)
    joined_slots, queries = 1, 2
    assert counts(gm) == {
        "mla_append": 2,
        "mla_decode": 2,
        "mla_prefill": 2,
        "cat": joined_slots + queries,
        "split": 4 + 2 * 2,  # the model's own; q_nope and q_pe of each layer
    }


def test_three_layers_share_one_joined_slot_mapping() -> None:
    appends = nodes_of(split(3, **DECODE, **PREFILL), "mla_append")
    assert len(appends) == 3 and len({node.args[3] for node in appends}) == 1


def test_segments_have_the_shapes_of_their_own_tokens() -> None:
    gm = split(**DECODE, **PREFILL)
    decode, prefill, append = (nodes_of(gm, f"mla_{name}")[0] for name in ("decode", "prefill", "append"))
    assert [shape(n) for n in decode.args[:2]] == [(6, HEADS, RANK), (6, HEADS, ROPE)]
    assert shape(prefill.args[0]) == (7, HEADS, NOPE + ROPE) and shape(prefill) == (13, HEADS, V)
    assert [shape(append.args[i]) for i in (0, 1, 3)] == [(13, RANK), (13, ROPE), (13,)]


def test_split_sizes_are_numbers_where_static_and_sizes_of_metadata_where_not() -> None:
    static = split(**DECODE, **PREFILL)
    sizes = [node.args[1] for node in nodes_of(static, "split") if node.target is torch.split]
    assert sizes == [[6, 7]] * 2

    dynamic = split(**DECODE, **PREFILL, unbacked=True)
    for node in nodes_of(dynamic, "split"):
        if node.target is torch.split:
            sources = [size.args[0].name for size in node.args[1]]
            assert [("decode" in name, "slot_mapping" in name) for name in sources] == [
                (True, True),
                (False, True),
            ]
    assert ops(dynamic).count("sym_size.int") == 2, "every layer and tensor asks for the same two sizes"


def test_nothing_is_sliced_at_a_symbolic_bound() -> None:
    gm = split(**DECODE, **PREFILL, unbacked=True)
    assert not any(isinstance(node.args[1], slice) for node in nodes_of(gm, "getitem"))


def test_only_the_outputs_that_are_used_are_unpacked() -> None:
    assert all(node.users for node in nodes_of(split(**DECODE, **PREFILL), "getitem"))


@pytest.mark.parametrize("unbacked", [False, True], ids=["static", "unbacked"])
def test_new_nodes_carry_example_values_of_the_same_fake_mode_and_the_calls_provenance(
    unbacked: bool,
) -> None:
    before, _ = graph_of(Stack(2), *make_inputs(**DECODE, **PREFILL, unbacked=unbacked))
    unified = before.graph.find_nodes(op="call_function", target=attention_op)
    modes = {id(node.meta["example_value"].fake_mode) for node in unified}
    lines = {node.meta["stack_trace"] for node in unified}
    modules = {str(node.meta["nn_module_stack"]) for node in unified}
    old = {node.name for node in before.graph.nodes}
    new = [node for node in split_prefill_decode(before).graph.nodes if node.name not in old]
    assert len(new) > 20
    for node in new:
        assert "example_value" in node.meta, f"AOTAutograd bypasses its cache for lack of one: {node.name}"
        assert node.meta["stack_trace"] in lines
        assert str(node.meta["nn_module_stack"]) in modules
        values = node.meta["example_value"]
        for value in values if isinstance(values, tuple) else [values]:
            assert not isinstance(value, Tensor) or id(value.fake_mode) in modes


@pytest.mark.parametrize("kind", KINDS)
def test_running_it_twice_changes_nothing_more(kind: str) -> None:
    gm = split(2, **KINDS[kind])
    once = str(gm.graph)
    assert str(split_prefill_decode(gm).graph) == once


def test_a_graph_without_mla_is_the_same_object_with_the_same_code_and_nodes() -> None:
    gm, _ = graph_of(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.randn(2, 4))
    code, nodes, metadata = gm.code, list(gm.graph.nodes), [dict(node.meta) for node in gm.graph.nodes]
    assert split_prefill_decode(gm) is gm
    assert gm.code == code
    assert list(gm.graph.nodes) == nodes
    assert [dict(node.meta) for node in gm.graph.nodes] == metadata


def test_a_result_that_is_used_twice_is_replaced_in_both_places() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor, batch: MLABatch) -> tuple[Tensor, Tensor]:
            y = super().forward(x, batch)
            return y, y * 2

    gm = split_prefill_decode(graph_of(Twice(1), *make_inputs(**DECODE, **PREFILL))[0])
    gm.graph.lint()
    assert "mla_attention" not in ops(gm)


# --- results, with the eager unified op as the oracle

SHAPES: dict[str, dict[str, Any]] = {
    **{f"{rows} rows": {"rows": rows, "q_len": 3} for rows in range(1, 9)},
    "mixed": {"rows": 2, "q_len": 3, "chunks": (4, 1)},
    "prefill only": {"chunks": (7, 2)},
    "a prompt of exactly q_len tokens": {"chunks": (3,)},
}


def run_over_shapes(
    model: nn.Module, compiled: nn.Module, shapes: Sequence[dict[str, Any]], unbacked: bool
) -> None:
    for batch in shapes:
        x, metadata = make_inputs(**batch, unbacked=unbacked)
        torch.testing.assert_close(
            compiled(x, metadata), model(x, metadata), msg=lambda m, b=batch: f"{b}: {m}"
        )
        for mine, theirs in zip(compiled.buffers(), model.buffers()):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.long
def test_eleven_batch_shapes_compile_three_graphs_and_equal_the_unified_op() -> None:
    model, capture = Stack(2), Capture()
    compiled = torch.compile(copy.deepcopy(model), backend=capture, fullgraph=True)
    run_over_shapes(model, compiled, list(SHAPES.values()), unbacked=True)
    found = [
        tuple(name for name in counts(gm) if name in ("mla_decode", "mla_prefill")) for gm in capture.after
    ]
    assert sorted(found) == [("mla_decode",), ("mla_decode", "mla_prefill"), ("mla_prefill",)]


def test_mark_dynamic_rows_compile_once_from_two_rows_up() -> None:
    model, capture = Stack(1), Capture()
    compiled = torch.compile(copy.deepcopy(model), backend=capture, fullgraph=True)
    for rows in (3, 2, 7, 5):
        x, metadata = make_inputs(rows=rows, q_len=2)
        decode = metadata.decode
        for tensor in (x, decode.seq_lens, decode.block_table, decode.slot_mapping):
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.testing.assert_close(compiled(x, metadata), model(x, metadata))
    assert len(capture.after) == 1


@pytest.mark.parametrize("q_lens", [[2, 1, 0], [1, 1, 2]], ids=["an inactive row", "ragged rows"])
def test_rows_with_fewer_valid_tokens_equal_the_unified_op(q_lens: list[int]) -> None:
    model = Stack(2)
    compiled = torch.compile(copy.deepcopy(model), backend=Capture(), fullgraph=True)
    run_over_shapes(model, compiled, [{**DECODE, "q_lens": q_lens, **PREFILL}], unbacked=False)


@pytest.mark.long
def test_the_mla_backend_with_inductor_equals_the_unified_op_on_a_mixed_batch_of_unknown_sizes() -> None:
    model = Stack(1)
    compiled = torch.compile(copy.deepcopy(model), backend="mla", fullgraph=True)
    larger = {"rows": 4, "q_len": 3, "chunks": (2, 6)}
    run_over_shapes(model, compiled, [SHAPES["mixed"], larger], unbacked=True)
