"""Where the elements of a tensor come from: layout ops followed backwards through a Dynamo graph.

`trace` stops where it does not know an op, or where elements are computed rather than moved; the view that it gives is
right wherever it stops. What is written in place on the way is not its business: a `View` keeps its `steps`, by which
`checks` finds writes in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mla_compile.passes.absorption.index_map import Index, Sizes, cut_at, expanded, index_of, reshaped
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name, value_of
from mla_compile.torch_internals import storage_key

Steps = tuple[tuple[fx.Node, fx.Node], ...]
"""Nodes that were passed, each with the one that it reads."""


@dataclass(frozen=True)
class View:
    """The elements `node[indices]`. `steps` are the nodes passed on the way here, each with the one it read."""

    node: fx.Node
    indices: tuple[Index, ...]
    steps: Steps = field(default=(), compare=False)

    @property
    def labels(self) -> set[str]:
        return set().union(*(index.labels for index in self.indices)) if self.indices else set()

    def onto(self, node: fx.Node, indices: Sequence[Index]) -> "View":
        return View(node, tuple(indices), (*self.steps, (self.node, node)))


def read(node: fx.Node, labels: Sequence[str]) -> tuple[View, dict[str, Any]]:
    """The whole of a node with a label for every dimension, and the sizes. Dimensions of size 1 need no label."""
    shape = tensor_of(node).shape
    sizes = dict(zip(labels, shape))
    return View(node, tuple(index_of(label, size) for label, size in zip(labels, shape))), sizes


def trace(view: View, sizes: Sizes) -> View:
    """Follow layout ops backwards as far as they go."""
    while (source := _source(view, sizes)) is not None:
        view = source
    return view


def rereads(view: View) -> list[fx.Node]:
    """The nodes on the way that copied or computed: what the view's node held at the first of them is what counts."""
    return [node for node, source in view.steps if _moves_data(node, source)]


def _moves_data(node: fx.Node, source: fx.Node) -> bool:
    if not is_tensor(node) or not is_tensor(source):
        return False
    return storage_key(tensor_of(node)) != storage_key(tensor_of(source))


_PROPERTIES = {"T", "mT", "H", "mH"}
_MOVES = _PROPERTIES | {
    "transpose",
    "swapaxes",
    "swapdims",
    "permute",
    "movedim",
    "moveaxis",
    "t",
    "adjoint",
}
_RESHAPES = {
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "squeeze",
    "unsqueeze",
    "view_as",
    "reshape_as",
    "ravel",
}
_EXPANSIONS = {"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"}
_COPIES = {"contiguous", "clone", "to", "type", "type_as", "float", "double", "half", "bfloat16", "detach"}
_SPLITS = {"split", "chunk", "unbind", "tensor_split", "split_with_sizes"}
_CUTS = {"getitem", "narrow", "select"}


def is_layout(node: fx.Node) -> bool:
    """Whether an op only moves elements, one that `trace` cannot always follow perhaps."""
    return torch_name(node) in _MOVES | _RESHAPES | _EXPANSIONS | _CUTS


def _source(view: View, sizes: Sizes) -> View | None:
    """The view one node further up; None where `view.node` computes its elements or is not understood."""
    node, name = view.node, torch_name(view.node)
    source = node.args[0] if node.args else None
    if name == "getitem" and isinstance(source, fx.Node) and torch_name(source) in _SPLITS:
        return _split(view, source)
    if not isinstance(source, fx.Node) or not is_tensor(source) or not is_tensor(node):
        return None
    if tensor_of(source).dtype != tensor_of(node).dtype or tensor_of(source).device != tensor_of(node).device:
        return None  # a cast rounds
    indices: Sequence[Index] | None = None
    if name in _MOVES:
        indices = _moved(view, source)
    elif name in _RESHAPES:
        indices = reshaped(view.indices, tensor_of(node).shape, tensor_of(source).shape, sizes)
    elif name in _EXPANSIONS and _repeats_all_alike(node):
        indices = expanded(view.indices, tensor_of(node).shape, tensor_of(source).shape)
    elif name in _COPIES:
        indices = view.indices
    elif name in _CUTS:
        indices = _cut(view, source)
    return None if indices is None else view.onto(source, indices)


def _repeats_all_alike(node: fx.Node) -> bool:
    """Not `repeat_interleave` with a number of its own for each element."""
    return torch_name(node) != "repeat_interleave" or isinstance(argument(node, 1, "repeats"), int)


def _moved(view: View, source: fx.Node) -> Sequence[Index]:
    """Run the permutation on a tensor whose sizes tell its dimensions apart."""
    node, name = view.node, torch_name(view.node)
    probe = torch.empty(tuple(range(2, 2 + tensor_of(source).dim())), device="meta")
    if name in _PROPERTIES:
        moved = getattr(probe, name)
    elif node.op == "call_method":
        moved = getattr(probe, name)(*node.args[1:], **node.kwargs)
    else:
        assert callable(node.target)
        moved = node.target(probe, *node.args[1:], **node.kwargs)
    order = [size - 2 for size in moved.shape]
    return [view.indices[order.index(dim)] for dim in range(len(order))]


def _split(view: View, source: fx.Node) -> View | None:
    """An element of `split`, `chunk` or `unbind`."""
    (origin, *_), position = source.args, view.node.args[1]
    if not isinstance(origin, fx.Node) or not is_tensor(origin) or not isinstance(position, int):
        return None
    by_rows = torch_name(source) == "unbind"
    dim = argument(source, 1 if by_rows else 2, "dim", 0) % tensor_of(origin).dim()
    position %= len(value_of(source))
    indices = list(view.indices)
    if by_rows:
        indices.insert(dim, Index(position))
    else:
        before = [part.shape[dim] for part in value_of(source)[:position]]
        if not all(isinstance(width, int) for width in before):
            return None
        indices[dim] = indices[dim].shifted(sum(before))
    return replace(view, steps=(*view.steps, (view.node, source))).onto(origin, indices)


def _cut(view: View, source: fx.Node) -> list[Index] | None:
    """Slices, single indices and new dimensions: `x[:, None, 2:]`, `narrow`, `select`."""
    node, shape = view.node, tensor_of(source).shape
    name = torch_name(node)
    if name == "getitem":
        return cut_at(view.indices, node.args[1], shape)
    dim = argument(node, 1, "dim") % len(shape)
    start = argument(node, 2, "index" if name == "select" else "start")
    if not isinstance(start, int) or not isinstance(shape[dim], int):
        return None
    start = start + shape[dim] if start < 0 else start
    if name == "select":
        return [*view.indices[:dim], Index(start), *view.indices[dim:]]
    return [index.shifted(start) if i == dim else index for i, index in enumerate(view.indices)]
