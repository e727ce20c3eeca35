"""`choose_decode_backend`: which calls get the name, and what happens where that backend cannot serve them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from mla_compile import MLABatch, MLAError
from mla_compile.ops.decode import decode_op
from mla_compile.passes import pipeline
from mla_compile.passes.choose_decode_backend import choose_decode_backend
from mla_compile.passes.nodes import op_arguments
from mla_compile.torch_internals import capture_graph
from tests.kernel_cases import decode_case
from tests.passes.capture import Stack, make_inputs, nodes_of


class Picked(Stack):
    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        return torch.index_select(super().forward(x, batch), 0, torch.tensor([1, 2]))


def captured(passes: list | None = None, backend: str | None = None) -> fx.GraphModule:
    x, batch = make_inputs(rows=2, q_len=3)
    found = capture_graph(Picked(2), (x, MLABatch(replace(batch.decode, backend=backend))), {})
    assert found is not None
    return pipeline.run(*found, passes)


def chosen(gm: fx.GraphModule, op: str = "mla_decode") -> list[str | None]:
    name = {"mla_decode": "backend", "mla_attention": "decode_backend"}[op]
    return [op_arguments(node)[name] for node in nodes_of(gm, op)]


def test_every_decode_call_gets_the_name() -> None:
    gm = captured()
    assert chosen(gm) == [None, None]
    assert chosen(choose_decode_backend(gm, backend="reference")) == ["reference"] * 2


def test_a_call_that_names_its_backend_keeps_it_through_all_passes() -> None:
    gm = captured(backend="reference")
    assert [node.args[6] for node in nodes_of(gm, "mla_decode")] == [3, 1], "the last one was hoisted"
    assert chosen(gm) == ["reference"] * 2
    assert chosen(choose_decode_backend(gm, backend="triton")) == ["reference"] * 2


def test_a_call_without_the_argument_gets_it() -> None:
    found = capture_graph(decode_op, decode_case([5, 3]).args(), {})
    assert found is not None
    assert len(nodes_of(found[0], "mla_decode")[0].args) == 8
    assert chosen(choose_decode_backend(found[0], backend="reference")) == ["reference"]


def test_a_unified_call_that_no_pass_has_split_gets_it_too() -> None:
    gm = choose_decode_backend(captured(passes=[]), backend="reference")
    assert chosen(gm, "mla_attention") == ["reference"] * 2


@pytest.mark.parametrize("passes", [None, []], ids=["split", "unsplit"])
def test_a_backend_that_cannot_serve_is_refused_with_its_reason(passes: list | None) -> None:
    gm = captured(passes)
    with pytest.raises(MLAError, match=r"\(.*reference.*\), got triton, which runs on cuda, got cpu"):
        choose_decode_backend(gm, backend="triton")


def test_a_graph_without_decode_calls_is_left_alone() -> None:
    found = capture_graph(torch.sin, (torch.randn(3),), {})
    assert found is not None
    code = found[0].code
    assert choose_decode_backend(found[0], backend="triton").code == code
