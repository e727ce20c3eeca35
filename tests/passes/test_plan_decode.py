"""`plan_decode`: which calls get the backend and its plan, and what it refuses."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx
from torch.library import opcheck

from mla_compile import MLABatch, MLAError
from mla_compile.ops.attention import decode_backends
from mla_compile.ops.attention.decode import decode_op, decode_plan_op, decode_torch
from mla_compile.ops.attention.decode_backends import DecodeBackend, Planner, select_backend
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.passes import pipeline
from mla_compile.passes.nodes import op_arguments
from mla_compile.passes.plan_decode import plan_decode
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
    monkeypatch.setattr(decode_backends, "DECODE_BACKENDS", (*decode_backends.DECODE_BACKENDS, mine))
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
    operands = decode_case([5, 3]).operands()
    opcheck(decode_plan_op, (*operands, 0, "planned"))
