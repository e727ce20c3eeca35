"""Where the elements of a tensor come from: layout ops followed backwards through a Dynamo graph.

A walk ends where it does not know an op, or where elements are computed rather than moved; its views are right
wherever it ends. What is written in place on the way is not its business: a `View` keeps the nodes that it `passed`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mla_compile.passes.absorption.index_map import (
    Index,
    Sizes,
    cut_at,
    expanded,
    furthest,
    index_of,
    reshaped,
    same,
)
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name, value_of

Nodes = tuple[fx.Node, ...]


@dataclass(frozen=True)
class View:
    """The elements `node[indices]`."""

    node: fx.Node
    indices: tuple[Index, ...]
    passed: Nodes = ()

    @property
    def labels(self) -> set[str]:
        return set().union(*(index.labels for index in self.indices))

    def onto(self, node: fx.Node, indices: Sequence[Index], *between: fx.Node) -> "View":
        return View(node, tuple(indices), (*self.passed, self.node, *between))


def read(node: fx.Node, labels: Sequence[str]) -> View:
    """The whole of a node with a label for every dimension; those of size 1 are read at 0 and have none."""
    return View(node, tuple(index_of(label, size) for label, size in zip(labels, tensor_of(node).shape)))


def walk(view: View, sizes: Sizes) -> Iterator[View]:
    """A view, then the same elements one layout op further up each time."""
    source: View | None = view
    while source is not None:
        yield source
        source = _source(source, sizes)


def trace(view: View, sizes: Sizes) -> View:
    """Follow layout ops backwards as far as they go."""
    *_, view = walk(view, sizes)
    return view


_PROPERTIES = {"T", "mT"}
_MOVES = _PROPERTIES | {"transpose", "permute", "t"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"}
_EXPANSIONS = {"expand", "expand_as", "repeat"}
_COPIES = {"contiguous", "clone", "to", "type_as"}
_SPLITS = {"split", "split_with_sizes", "chunk", "unbind"}
_CUTS = {"getitem", "narrow", "select"}


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
    elif name in _EXPANSIONS:
        indices = expanded(view.indices, tensor_of(node).shape, tensor_of(source).shape)
    elif name in _COPIES:
        indices = view.indices
    elif name in _CUTS:
        indices = _cut(view, source)
    return None if indices is None else view.onto(source, indices)


def _moved(view: View, source: fx.Node) -> Sequence[Index]:
    """Run the permutation on a tensor whose sizes tell its dimensions apart."""
    node, name = view.node, torch_name(view.node)
    probe = torch.empty(tuple(range(2, 2 + tensor_of(source).dim())), device="meta")
    moved = getattr(probe, name)
    if name not in _PROPERTIES:
        moved = moved(*node.args[1:], **node.kwargs)
    order = [size - 2 for size in moved.shape]
    return [view.indices[order.index(dim)] for dim in range(len(order))]


def _split(view: View, source: fx.Node) -> View | None:
    """An element of `split`, `chunk` or `unbind`."""
    origin, position = source.args[0], view.node.args[1]
    if not isinstance(origin, fx.Node) or not is_tensor(origin) or not isinstance(position, int):
        return None
    if torch_name(source) == "unbind":
        indices = _cut_along(view, origin, argument(source, 1, "dim", 0), position)
    else:
        dim, position = argument(source, 2, "dim", 0), position % len(value_of(source))
        start = sum(part.shape[dim] for part in value_of(source)[:position])
        indices = _cut_along(view, origin, dim, slice(start, None))
    return None if indices is None else view.onto(origin, indices, source)


def _cut(view: View, source: fx.Node) -> list[Index] | None:
    """Slices, single indices and new dimensions: `x[:, None, 2:]`, `narrow`, `select`."""
    node, name = view.node, torch_name(view.node)
    if name == "getitem":
        return cut_at(view.indices, node.args[1], tensor_of(source).shape)
    start = argument(node, 2, "index" if name == "select" else "start")
    return _cut_along(
        view, source, argument(node, 1, "dim"), start if name == "select" else slice(start, None)
    )


def _cut_along(view: View, source: fx.Node, dim: int, key: Any) -> list[Index] | None:
    shape = tensor_of(source).shape
    return cut_at(view.indices, (*[slice(None)] * (dim % len(shape)), key), shape)


# --- tensors that are joined of parts

CATS = ("cat", "concat")


@dataclass(frozen=True)
class Part:
    """`size` positions of a label from `start` on, and the view that has them at 0, 1, ...."""

    start: int
    size: int
    view: View


def parts_of(view: View, sizes: Sizes, label: str) -> list[Part]:
    """The parts that a tensor is joined of along `label`; itself where it is not."""
    view = trace(view, sizes)
    joined = joined_parts(view.node)
    dims = [dim for dim, index in enumerate(view.indices) if index == Index(0, ((label, 1),))]
    if joined is None or dims != [joined[0]] or sizes[label] != tensor_of(view.node).shape[dims[0]]:
        return [Part(0, sizes[label], view)]
    parts, start = [], 0
    for source, between in joined[1]:
        width = tensor_of(source).shape[dims[0]]
        index = index_of(label, width)
        indices = (*view.indices[: dims[0]], index, *view.indices[dims[0] + 1 :])
        parts.append(Part(start, width, view.onto(source, indices, *between)))
        start += width
    return parts


def joined_parts(node: fx.Node) -> tuple[int, list[tuple[fx.Node, Nodes]]] | None:
    """Dimension and parts of a `cat`, or of an empty tensor that is filled slice by slice, and what fills it."""
    if torch_name(node) in ("new_empty", "empty"):
        return _filled(node)
    if torch_name(node) not in CATS:
        return None
    parts, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", 0) % tensor_of(node).dim()
    alike = all(is_tensor(part) and _alike(part, node) for part in parts)
    static = alike and all(isinstance(tensor_of(part).shape[dim], int) for part in parts)
    return (dim, [(part, ()) for part in parts]) if static else None


def _alike(node: fx.Node, other: fx.Node) -> bool:
    return tensor_of(node).dtype == tensor_of(other).dtype and tensor_of(node).dim() == tensor_of(other).dim()


def _filled(buffer: fx.Node) -> tuple[int, list[tuple[fx.Node, Nodes]]] | None:
    """The slices along the last dimension that `buffer[..., a:b].copy_(x)` writes.

    None unless they cover all of it, each once, before anything reads it. Sources must have the slice's shape.
    """
    shape = tensor_of(buffer).shape
    last = len(shape) - 1
    labels = [Index(0, ((str(dim), 1),)) for dim in range(len(shape))]
    found: list[tuple[int, fx.Node, Nodes]] = []
    source: Any
    for user in buffer.users:
        write = next(iter(user.users), user)
        if torch_name(user) != "getitem" or torch_name(write) != "copy_" or len(user.users) != 1:
            continue
        source, region = write.args[1], cut_at(labels, user.args[1], shape)
        if region is None or not is_tensor(source) or not _alike(source, buffer):
            return None
        rows = region[:-1] == labels[:-1] and all(map(same, tensor_of(source).shape[:-1], shape[:-1]))
        if not rows or region[last].terms != labels[last].terms:
            return None
        found.append((region[last].offset, source, (write, user)))
    found.sort(key=lambda part: part[0])
    widths = [tensor_of(source).shape[-1] for _, source, _ in found]
    tiled = [start for start, _, _ in found] == [sum(widths[:i]) for i in range(len(widths))]
    written = {node for _, _, path in found for node in path}
    in_time = all(write < user for write in written for user in buffer.users if user not in written)
    if not tiled or sum(widths) != shape[-1] or not in_time:
        return None
    return last, [(source, path) for _, source, path in found]


# --- reading what a view says


@dataclass(frozen=True)
class Reader:
    """A tensor that is read by methods called on `node`, `steps`."""

    node: fx.Node
    steps: tuple[tuple[Any, ...], ...]
    passed: Nodes = field(default=(), compare=False)

    def __call__(self, x: Any) -> Any:
        for name, *arguments in self.steps:
            x = getattr(x, name)(*arguments)
        return x


def reader(view: View, sizes: Sizes, term: str) -> Reader | None:
    """Read a view, or what it is a layout of, with its dimensions in the order of `term`.

    A letter that the view does not depend on has size 1. None where slicing and `unflatten` cannot do it.
    """
    return next((found for source in walk(view, sizes) if (found := _reader(source, sizes, term))), None)


def _reader(view: View, sizes: Sizes, term: str) -> Reader | None:
    steps: list[tuple[Any, ...]] = []
    found: list[str] = []
    for dim in range(len(view.indices) - 1, -1, -1):
        taken = _take(dim, view.indices[dim], tensor_of(view.node).shape[dim], sizes)
        if taken is None:
            return None
        steps += taken[0]
        found = taken[1] + found
    if len(set(found)) != len(found) or not set(found) <= set(term):
        return None
    order = [found.index(label) for label in term if label in found]
    if order != sorted(order):
        steps.append(("permute", order))
    steps += [("unsqueeze", dim) for dim, label in enumerate(term) if label not in found]
    return Reader(view.node, tuple(steps), view.passed)


def _take(dim: int, index: Index, size: Any, sizes: Sizes) -> tuple[list[tuple[Any, ...]], list[str]] | None:
    """Steps that leave of one dimension what `index` reads, as one dimension for each of its labels, and the labels.

    `24 * head + feature` becomes `unflatten(dim, (heads, 24))` with the features cut out of the 24.
    """
    if not index.terms:
        return [("select", dim, index.offset)], []
    (label, step), *rest = sorted(index.terms, key=lambda term: -term[1])
    count = sizes[label]
    if step == 1 and not rest and index.offset == 0 and same(count, size):
        return [], [label]
    if step < 1 or not isinstance(count, int) or not isinstance(size, int):
        return None
    inner = Index(0, tuple(rest))
    width = furthest(inner, sizes)
    if width is None or width >= step:
        return None
    inner = inner.shifted(index.offset % step if index.offset % step + width < step else 0)
    first = index.offset - inner.offset
    if first + count * step > size:
        return None
    cut: list[tuple[Any, ...]] = [] if count * step == size else [("narrow", dim, first, count * step)]
    if step == 1:
        return cut, [label]
    below = _take(dim + 1, inner, step, sizes)
    return below and ([*cut, ("unflatten", dim, (count, step)), *below[0]], [label, *below[1]])
