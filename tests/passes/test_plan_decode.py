"""`plan_decode`: which calls get the backend and its plan, and what it refuses."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.library import opcheck

from mla_compile import MLABatch, MLAError
from mla_compile.ops.attention import decode_backends
from mla_compile.ops.attention.decode import decode_op, decode_plan_op, decode_torch
from mla_compile.ops.attention.decode_backends import QUERIES, DecodeBackend, Planner, select_backend
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.passes import pipeline
from mla_compile.passes.nodes import op_arguments
from mla_compile.passes.plan_decode import plan_decode
from mla_compile.repeated_layers import find_repetition
from tests.kernel_cases import decode_case
from tests.passes.capture import Stack, graph_of, make_inputs, nodes_of


def captured(passes: list | None = None, backend: str | None = None) -> fx.GraphModule:
    x, batch = make_inputs(rows=2, q_len=3)
    return pipeline.run(*graph_of(Stack(2), x, MLABatch(replace(batch.decode, backend=backend))), passes)


def chosen(gm: fx.GraphModule, op: str = "mla_decode") -> list[str | None]:
    name = {"mla_decode": "backend", "mla_attention": "decode_backend"}[op]
    return [op_arguments(node)[name] for node in nodes_of(gm, op)]


def test_every_decode_call_gets_the_name() -> None:
    gm = captured()
    assert chosen(gm) == [None, None]
    assert chosen(plan_decode(gm, backend="reference")) == ["reference"] * 2


def test_a_call_that_names_its_backend_keeps_it_through_all_passes() -> None:
    gm = captured(backend="reference")
    assert chosen(gm) == ["reference"] * 2
    assert chosen(plan_decode(gm, backend="triton")) == ["reference"] * 2


def test_a_call_without_the_argument_gets_it() -> None:
    gm, _ = graph_of(decode_op, *decode_case([5, 3]).args())
    assert len(nodes_of(gm, "mla_decode")[0].args) == 8
    assert chosen(plan_decode(gm, backend="reference")) == ["reference"]


def test_a_unified_call_that_no_pass_has_split_gets_it_too() -> None:
    gm = plan_decode(captured(passes=[]), backend="reference")
    assert chosen(gm, "mla_attention") == ["reference"] * 2


@pytest.mark.parametrize("passes", [None, []], ids=["split", "unsplit"])
def test_a_backend_that_cannot_serve_is_refused_with_its_reason(passes: list | None) -> None:
    gm = captured(passes)
    with pytest.raises(MLAError, match=r"^\w*backend: .*reference.*triton.*cuda.*cpu"):
        plan_decode(gm, backend="triton")


def test_a_graph_without_decode_calls_is_left_alone() -> None:
    gm, _ = graph_of(torch.sin, torch.randn(3))
    code = gm.code
    assert plan_decode(gm, backend="triton").code == code


PLANS: list[tuple[DecodeOperands, int]] = []


def plan(operands: DecodeOperands, place: int) -> list[Tensor]:
    PLANS.append((operands, place))
    return [operands.seq_lens * 2, torch.tensor([place])]


def run_planned(operands: DecodeOperands, plan: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    assert plan is not None and torch.equal(plan[0], operands.seq_lens * 2), "the plan of other rows"
    return decode_torch(operands)


PLANNER = Planner(
    plan, lambda operands: [torch.empty_like(operands.seq_lens), torch.empty(1, dtype=torch.int64)]
)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    here = f"{__name__}:"
    mine = DecodeBackend(
        "planned", "plans on the host", f"{here}run_planned", capturable=False, planner=f"{here}PLANNER"
    )
    of_many = replace(
        mine, name="of_many", capturable=True, constraints={"page_size": (4,), QUERIES: ("many",)}
    )
    monkeypatch.setattr(decode_backends, "DECODE_BACKENDS", (of_many, *decode_backends.DECODE_BACKENDS, mine))
    monkeypatch.setattr(decode_backends, "MANY_QUERIES", 30)
    monkeypatch.setattr(decode_backends, "MANY_QUERIES_OF_ROW", 3)
    select_backend.cache_clear()
    PLANS.clear()
    yield
    select_backend.cache_clear()


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("by", ["option", "segment"])
def test_a_backend_that_plans_does_so_once_a_step_for_all_layers(by: str) -> None:
    x, batch = make_inputs(rows=2, q_len=3)
    decode = batch.decode
    assert decode is not None
    model, options = Stack(3), {}
    expected = copy.deepcopy(model)(x, MLABatch(decode))
    if by == "option":
        options = {"decode_backend": "planned"}
    else:
        batch = MLABatch(replace(decode, backend="planned"))
    compiled = torch.compile(model, backend="mla", fullgraph=True, options=options)
    for _ in range(2):
        PLANS.clear()
        torch.testing.assert_close(compiled(x, batch), expected)
        assert [(operands.q_len, place) for operands, place in PLANS] == [(3, 0)], "three layers"


@torch.no_grad()
@pytest.mark.usefixtures("planned")
def test_a_call_after_a_write_to_the_lengths_gets_a_plan_of_its_own() -> None:
    def twice(backend: str, *args: Any) -> list[Tensor]:
        lengths = args[4].clone()
        operands = *args[:4], lengths, *args[5:]
        outs = [decode_op(*operands, backend)[0] for _ in range(2)]
        lengths.sub_(1)
        return [*outs, decode_op(*operands, backend)[0]]

    args = decode_case([5, 3], page_size=4).args()
    found = torch.compile(twice, backend="mla", fullgraph=True)("planned", *args)
    torch.testing.assert_close(found, twice("reference", *args))
    assert [place for _, place in PLANS] == [0, 1]


@torch.no_grad()
@pytest.mark.usefixtures("planned")
def test_layers_that_share_a_plan_are_compiled_once() -> None:
    gm = pipeline.run(*graph_of(Stack(6), *make_inputs(rows=5, q_len=3)))
    assert len(nodes_of(gm, "mla_decode_plan")) == 1
    found = find_repetition(
        [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")], captured=True
    )
    assert found is not None and found.times >= 4


@pytest.mark.usefixtures("planned")
def test_a_plan_on_the_host_is_refused_where_a_cuda_graph_is_captured() -> None:
    with pytest.raises(MLAError, match=r"backend: .*planned.*host"):
        captured(backend="planned")
    x, batch = make_inputs(rows=2)
    compiled = torch.compile(Stack(1), backend="mla", mode="reduce-overhead", fullgraph=True)
    with pytest.raises(Exception, match=r"backend: .*planned.*host"):
        compiled(x, MLABatch(replace(batch.decode, backend="planned")))


@pytest.mark.usefixtures("planned")
def test_contract_of_the_plan_op() -> None:
    few, many = (decode_case([5] * rows, page_size=4).operands() for rows in (2, 20))
    for operands, backend in ((few, "planned"), (many, None)):
        opcheck(decode_plan_op, (*operands, 0, backend))
    # What nothing reads is not written, so it differs from call to call.
    opcheck(decode_plan_op, (*few, 0, None), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.usefixtures("planned")
def test_one_graph_plans_for_many_queries_and_leaves_few_to_other_backends() -> None:
    model = Stack(3)
    compiled = torch.compile(model, backend="mla", fullgraph=True, dynamic=True)
    for rows in (2, 4, 3, 5):  # each has 3 tokens x 3 heads
        x, batch = make_inputs(rows=rows, q_len=3)
        named = MLABatch(replace(batch.decode, backend="reference"))
        expected = copy.deepcopy(model)(x, named)
        PLANS.clear()
        with torch.compiler.set_stance("default" if rows == 2 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(x, batch), expected)
        assert [place for _, place in PLANS] == [0] * (rows > 3), rows


@pytest.mark.usefixtures("planned")
def test_calls_that_another_backend_serves_get_no_plan() -> None:
    x, batch = make_inputs(rows=5, q_len=3)
    assert len(nodes_of(pipeline.run(*graph_of(Stack(2), x, batch)), "mla_decode_plan")) == 1
    few, few_batch = make_inputs(rows=2, q_len=3)
    named = MLABatch(replace(batch.decode, backend="reference"))
    exact = pipeline.passes_for(graph_of(Stack(2), x, batch)[0], batch_invariant=True)
    for graph, passes in (
        (graph_of(Stack(2), few, few_batch), None),
        (graph_of(Stack(2), x, named), None),
        (graph_of(Stack(2), x, batch), exact),
    ):
        assert not nodes_of(pipeline.run(*graph, passes), "mla_decode_plan")


@pytest.mark.usefixtures("planned")
def test_calls_whose_page_size_is_symbolic_get_no_plan() -> None:
    for symbolic in (False, True):
        *tensors, q_lens, q_len, scale = decode_case([5, 3], rank=8, rope=4, heads=20, page_size=4).args()
        if symbolic:
            torch._dynamo.mark_dynamic(tensors[2], 1)
        gm, _ = graph_of(decode_op, *tensors, q_lens, q_len, scale)
        assert len(nodes_of(plan_decode(gm), "mla_decode_plan")) == (not symbolic)
