"""`drop_trivial_topk`: routers with one group choose once, and nothing else changes."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.utils import run_and_get_code

from mla_compile.passes import PASSES, pipeline
from mla_compile.passes.drop_trivial_topk import drop_trivial_topk
from mla_compile.torch_internals import capture_graph
from tests.integrations.families import stock_model
from tests.passes.capture import compiled_graph, nodes_of, ops

GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "mistral4")


def router(family: str, num_groups: int) -> Callable[[Tensor], Tensor]:
    """The choice of experts of a family's first router: ids `[tokens, k]`, in ascending order."""
    model = stock_model(family, n_group=num_groups, topk_group=1)
    gate = next(module.gate for module in model.modules() if hasattr(module, "experts"))
    return lambda x: gate(x)[-1].sort(dim=-1).values


def compiled_code(function: Callable[[Tensor], Tensor], x: Tensor, passes: list) -> str:
    """Inductor's code of a function of rows, which gives what it gives eagerly."""
    torch.compiler.reset()
    mark_unbacked(x, 0)
    compiled = torch.compile(function, backend="mla", options={"passes": passes}, fullgraph=True)
    out, codes = run_and_get_code(compiled, x)
    assert torch.equal(out, function(x))
    return "\n".join(codes)


@pytest.mark.parametrize("family", GROUPED)
def test_a_router_with_one_group_does_not_choose_its_group(family: str) -> None:
    """What is left chooses experts, and scores the group that nobody chooses."""
    left = nodes_of(compiled_graph(router(family, 1), torch.randn(7, 64)), "topk")
    assert len(left) == (1 if family == "deepseek_v2" else 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [f if f == "deepseek_v2" else pytest.param(f, marks=pytest.mark.slow) for f in GROUPED],
)
def test_a_router_with_one_group_launches_one_topk(family: str) -> None:
    choose, x = router(family, 1), torch.randn(7, 64)
    before, after = (compiled_code(choose, x, passes) for passes in ([], [drop_trivial_topk]))
    launches = before.count("aten.topk.default("), after.count("aten.topk.default(")
    # DeepSeek-V2 scores a group by its best expert, the others by the two best.
    assert launches == ((2, 1) if family == "deepseek_v2" else (3, 1))
    assert after.count(" = async_compile.") <= 2, "the mask is fused into the scores"


def unchanged(function: Callable, *inputs: Tensor) -> bool:
    found = capture_graph(function, inputs, {})
    assert found is not None
    gm, example_inputs = found
    code, nodes = gm.code, list(gm.graph.nodes)
    return drop_trivial_topk(gm, example_inputs) is gm and (gm.code, list(gm.graph.nodes)) == (code, nodes)


@pytest.mark.parametrize("family", GROUPED)
def test_a_router_with_two_groups_is_left_alone(family: str) -> None:
    assert unchanged(router(family, 2), torch.randn(7, 64))


X = torch.tensor([[3.0, -1.0, torch.nan, torch.inf]])
SPELLINGS = {
    "of rows": lambda x: torch.topk(x, 1, 0),
    "of a negative dim": lambda x: torch.topk(x, 1, dim=-2),
    "of the last dim, left out": lambda x: torch.topk(x.T, 1),
    "of a middle dim": lambda x: x.view(2, 1, 2).topk(k=1, dim=1),
    "as a keyword": lambda x: torch.topk(input=x, k=1, dim=0),
    "of the smallest, unsorted": lambda x: x.topk(1, 0, False, sorted=False),
    "of integers": lambda x: x.nan_to_num().long().topk(1, 0),
    "values": lambda x: torch.topk(x, 1, 0).values,
    "indices": lambda x: torch.topk(x, 1, 0).indices,
    "used twice": lambda x: (lambda top: (top[0] + 1, top[0] * 2, top[1], top[1] + 1))(torch.topk(x, 1, 0)),
    "of columns apart": lambda x: (lambda top: (top.values.stride(), *top))(x[:, ::2].T.topk(1)),
}


def results(function: Callable, x: Tensor) -> list:
    out = function(x)
    return list(out) if isinstance(out, tuple) else [out]


@pytest.mark.parametrize("function", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_the_one_element_and_index_0_are_what_topk_gives(function: Callable) -> None:
    gm, compiled = graph_of(function)
    assert not nodes_of(gm, "topk")
    for got, expected in zip(results(compiled, X), results(function, X), strict=True):
        if isinstance(expected, Tensor):
            assert got.dtype == expected.dtype and got.stride() == expected.stride()
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        else:
            assert got == expected


def graph_of(function: Callable) -> tuple[fx.GraphModule, Callable]:
    """The graph after the pass, and the function compiled to it."""
    seen: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        seen.append(pipeline.run(gm, example_inputs, [drop_trivial_topk]))
        return gm.forward

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    compiled(X)
    return seen[0], compiled


def test_whoever_writes_to_the_values_writes_to_no_other_tensor() -> None:
    def function(x: Tensor) -> Tensor:
        values, indices = x.topk(1, dim=0)
        values /= 2
        indices += 1
        return values + indices

    assert not nodes_of(compiled_graph(function, torch.randn(1, 4)), "topk")


LEFT_ALONE = {
    "of two elements": (lambda x: x.topk(1, dim=0), torch.randn(2, 4)),
    "of nothing": (lambda x: x.topk(0, dim=0), torch.randn(1, 4)),
    "of two elements, as numpy would name them": (lambda x: x.topk(1, axis=0), torch.randn(2, 1)),
    "of a number": (lambda x: torch.topk(x, 1), torch.tensor(3.0)),
    "into given tensors": (
        lambda x: torch.topk(x, 1, 0, out=(torch.empty(1, 4), torch.empty(1, 4, dtype=torch.int64))),
        torch.randn(1, 4),
    ),
}


@pytest.mark.parametrize(("function", "x"), LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_any_other_topk_is_left_alone(function: Callable, x: Tensor) -> None:
    assert unchanged(function, x)


def test_a_dynamic_size_is_left_alone() -> None:
    x = torch.randn(1, 4)
    mark_unbacked(x, 0)
    assert unchanged(lambda x: x.topk(1, dim=0), x)


def test_a_number_of_elements_that_is_dynamic_is_left_alone() -> None:
    def function(x: Tensor, counted: Tensor) -> Tensor:
        return x.topk(counted.shape[0], dim=0).values

    counted = torch.randn(1)
    mark_unbacked(counted, 0)
    assert unchanged(function, torch.randn(1, 4), counted)


def test_running_it_twice_changes_nothing_more_and_nodes_keep_their_provenance() -> None:
    gm = compiled_graph(lambda x: x.sin().topk(1, dim=0), torch.randn(1, 4))
    assert ops(gm) == ["sin", "clone", "zeros_like"]
    assert all(
        "example_value" in n.meta and "stack_trace" in n.meta for n in gm.graph.nodes if "call" in n.op
    )
    once = str(gm.graph)
    assert str(drop_trivial_topk(gm).graph) == once


def test_the_log_says_what_was_dropped(caplog: pytest.LogCaptureFixture) -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.topk(1, dim=0).values

    with caplog.at_level(logging.INFO, "mla_compile"):
        compiled_graph(nn.Sequential(Router()), torch.randn(1, 4))
    assert "topk of one element dropped: 0 (test_drop_trivial_topk.py" in caplog.text


def test_it_is_one_of_the_passes() -> None:
    assert drop_trivial_topk in PASSES
