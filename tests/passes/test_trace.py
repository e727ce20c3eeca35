"""`trace`: a view says where the elements of a tensor come from, whatever chain of layout ops brought them there."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from mla_compile.passes.absorption.index_map import Index
from mla_compile.passes.absorption.trace import View, parts_of, read, trace
from mla_compile.passes.nodes import tensor_of
from mla_compile.torch_internals import capture_graph

LABELS = "abcdefgh"
PROPERTIES = {"T", "mT"}
Op = Callable[[Tensor], Tensor]


def traced(function: Op, x: Tensor) -> tuple[View, dict[str, int]]:
    """The view of the graph's output, traced back."""
    captured = capture_graph(function, (x,), {})
    assert captured is not None
    (output,) = captured[0].graph.find_nodes(op="output")
    sizes = dict(zip(LABELS, tensor_of(output.args[0][0]).shape))
    return trace(read(output.args[0][0], LABELS), sizes), sizes


def elements(view: View, sizes: dict[str, int], source: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What the view reads of `source`, computed index by index."""
    grids = {
        label: torch.arange(sizes[label]).view([-1 if i == dim else 1 for i in range(len(shape))])
        for dim, label in enumerate(LABELS[: len(shape)])
    }
    indices = [
        index.offset + sum((step * grids[label] for label, step in index.terms), torch.zeros(1).long())
        for index in view.indices
    ]
    return source[tuple(indices)].expand(shape)


@st.composite
def layout_ops(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[list[tuple[str, tuple]], tuple[int, ...]]:
    """Up to six layout ops that apply one after the other to a tensor of this shape."""
    ops: list[tuple[str, tuple]] = []
    x = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(1, 6))):
        dim = draw(st.integers(-x.dim(), x.dim() - 1))
        size = x.shape[dim]
        choices: list[tuple[str, tuple]] = [
            ("transpose", (dim, draw(st.integers(0, x.dim() - 1)))),
            ("permute", tuple(draw(st.permutations(range(x.dim()))))),
            (
                "narrow",
                (
                    dim,
                    start := draw(st.integers(-size, size - 1)),
                    draw(st.integers(1, -start % size or size)),
                ),
            ),
            ("contiguous", ()),
            ("reshape", (draw(st.sampled_from(factorisations(math.prod(x.shape)))),)),
        ]
        if x.dim() > 1:
            choices += [("mT", ())]
            choices += [("T", ())] if x.dim() == 2 else []
            choices += [("flatten", (0, 1)), ("select", (dim, draw(st.integers(0, size - 1))))]
        if x.dim() < 5:
            choices += [("unsqueeze", (dim,))]
            choices += [("unflatten", (dim, (2, size // 2)))] if size % 2 == 0 else []
        if size == 1:
            choices += [("squeeze", (dim,))] if x.dim() > 1 else []
            choices.append(("expand", tuple(3 if i == dim % x.dim() else -1 for i in range(x.dim()))))
        op = draw(st.sampled_from(choices))
        x = apply(x, *op)
        ops.append(op)
    return ops, tuple(x.shape)


def apply(x: Tensor, name: str, arguments: tuple) -> Tensor:
    """A method of a tensor, or one of its properties."""
    return getattr(x, name) if name in PROPERTIES else getattr(x, name)(*arguments)


def factorisations(number: int) -> list[tuple[int, ...]]:
    pairs = [(i, number // i) for i in range(1, number + 1) if number % i == 0]
    return [(number,), *pairs, *((a, 2, b // 2) for a, b in pairs if b % 2 == 0)]


@pytest.mark.long
@settings(max_examples=60)
@given(st.data())
def test_a_traced_view_reads_the_elements_that_the_chain_of_ops_reads(data: st.DataObject) -> None:
    ops, shape = data.draw(layout_ops((2, 6, 4)))
    x = torch.arange(48).view(2, 6, 4)

    def chain(x: Tensor) -> Tensor:
        for op in ops:
            x = apply(x, *op)
        return x

    view, sizes = traced(lambda x: chain(x) + 0, x)  # an output of its own, and never the input itself
    assert view.node.op == "call_function"
    (last,) = view.node.all_input_nodes
    sizes = dict(zip(LABELS, shape))
    view = trace(read(last, LABELS), sizes)
    upstream = fx.Interpreter(module_up_to(view.node), garbage_collect_values=False)
    source = upstream.run(x)
    torch.testing.assert_close(elements(view, sizes, source, shape), chain(x))
    if not {"reshape", "flatten"} & {name for name, _ in ops}:
        assert view.node.op == "placeholder", "nothing here mixes dimensions, so nothing may stop the trace"


def module_up_to(node: fx.Node) -> fx.GraphModule:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for other in node.graph.nodes:
        if other.op != "output":
            values[other] = graph.node_copy(other, values.__getitem__)
        if other is node:
            break
    graph.output(values[node])
    return fx.GraphModule({}, graph)


def sliced(x: Tensor) -> Tensor:
    return x[1:, None, ..., 2:5].mT


def split(x: Tensor) -> Tensor:
    return x.split([1, 5], dim=1)[1].unbind(0)[-1].chunk(2, -1)[1]


def stepped(x: Tensor) -> Tensor:
    return x[..., 1::2][:, -1]


def counted_from_the_end(x: Tensor) -> Tensor:
    return x.narrow(-1, -3, 2).narrow(1, -1, 1).select(0, -1)


def by_numpys_names(x: Tensor) -> Tensor:
    return torch.chunk(torch.narrow(x, axis=2, start=2, length=4), 2, axis=1)[1].unbind(axis=1)[2]


def by_properties(x: Tensor) -> Tensor:
    return x.mT[1].T[:, 2:].mT


@pytest.mark.parametrize(
    "function", [sliced, split, stepped, counted_from_the_end, by_numpys_names, by_properties]
)
def test_slices_and_splits_are_followed_to_the_input(function: Op) -> None:
    x = torch.arange(2 * 6 * 8).view(2, 6, 8)
    view, sizes = traced(function, x)
    assert view.node.op == "placeholder"
    torch.testing.assert_close(
        elements(view, sizes, x, tuple(function(x).shape)), function(x), check_stride=False
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.float(),
        lambda x: x + 1,
        lambda x: x[:, torch.tensor([1, 0])],
        lambda x: x.roll(1, 0),
        lambda x: x.repeat(1, 2, 1),
        lambda x: x.view(torch.int32),
    ],
    ids=["cast", "sum", "gather", "roll", "repeat", "bits"],
)
def test_what_computes_or_gathers_is_not_looked_through(function: Op) -> None:
    view, _ = traced(function, torch.arange(2 * 6 * 8).view(2, 6, 8))
    assert view.node.op != "placeholder" or view.node.name != "x"
    assert view.node.op.startswith("call_")


def filled(x: Tensor) -> Tensor:
    out = x.new_empty(2, 6, 12)
    out[..., 8:].copy_(x[..., :4])
    out[..., :8].copy_(x)
    return out.transpose(0, 1)


def joined(x: Tensor) -> Tensor:
    return torch.cat([x, x[..., :4]], dim=-1).transpose(0, 1)


def joined_by_numpys_name(x: Tensor) -> Tensor:
    return torch.cat([x, x[..., :4]], axis=-1).transpose(0, 1)


@pytest.mark.parametrize("function", [filled, joined, joined_by_numpys_name])
def test_joined_parts_are_pieces_with_their_places(function: Op) -> None:
    x = torch.arange(2 * 6 * 8).view(2, 6, 8)
    captured = capture_graph(function, (x,), {})
    assert captured is not None
    (output,) = captured[0].graph.find_nodes(op="output")
    parts = parts_of(read(output.args[0][0], "abc"), {"a": 6, "b": 2, "c": 12}, "c")
    assert [(part.start, part.size) for part in parts] == [(0, 8), (8, 4)]
    indices = tuple(Index(0, ((label, 1),)) for label in "bac")
    assert all(part.view.indices == indices for part in parts)
    assert all(trace(part.view, {"c": part.size}).node.op == "placeholder" for part in parts)


def written_twice(x: Tensor) -> Tensor:
    out = x.new_empty(2, 6, 12)
    out[..., :8].copy_(x)
    out[..., 4:].copy_(x)
    return out


def partly_written(x: Tensor) -> Tensor:
    out = x.new_empty(2, 6, 12)
    out[..., :8].copy_(x)
    return out


@pytest.mark.parametrize("function", [written_twice, partly_written])
def test_a_tensor_that_is_not_filled_once_and_whole_is_not_looked_into(function: Op) -> None:
    view, sizes = traced(function, torch.arange(2 * 6 * 8).view(2, 6, 8))
    (part,) = parts_of(view, sizes, "c")
    assert part.view.node.op.startswith("call_")
