"""Tensors that are joined of parts along one dimension: by `cat`, or filled slice by slice."""

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from mla_compile.passes.absorption.index_map import Index, Sizes, cut_at, same
from mla_compile.passes.absorption.trace import Steps, View, trace
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name

FILLS = ("copy_", "setitem")
_EMPTY = {"new_empty", "empty", "empty_like", "new_zeros", "zeros", "zeros_like"}


@dataclass(frozen=True)
class Piece:
    """`size` positions of the split label from `start` on, and the view that has them at 0, 1, ...."""

    start: int
    size: int
    view: View


def trace_pieces(view: View, sizes: Sizes, label: str) -> list[Piece]:
    """As `trace`, and through concatenations along `label` too: one piece for each part, in order."""
    view = trace(view, sizes)
    parts = joined_parts(view.node) if isinstance(sizes[label], int) else None
    if parts is None or view.indices[parts[0]].terms != ((label, 1),):
        return [Piece(0, sizes[label], view)]
    dim, sources = parts
    first = view.indices[dim].offset
    pieces, low = [], 0
    for source, fill in sources:
        width = tensor_of(source).shape[dim]
        start, stop = max(low, first), min(low + width, first + sizes[label])
        if start < stop:
            indices = list(view.indices)
            indices[dim] = Index(start - low, ((label, 1),)) if stop - start > 1 else Index(start - low)
            part = View(source, tuple(indices), (*view.steps, (view.node, source), *fill))
            inner = trace_pieces(part, {**sizes, label: stop - start}, label)
            pieces += [replace(piece, start=piece.start + start - first) for piece in inner]
        low += width
    return pieces


def joined_parts(node: fx.Node) -> tuple[int, list[tuple[fx.Node, Steps]]] | None:
    """Dimension and parts of a `cat`, or of an empty tensor that is filled slice by slice (with the steps of that)."""
    if torch_name(node) in ("cat", "concat", "concatenate"):
        parts = argument(node, 0, "tensors")
        dim = argument(node, 1, "dim", 0)
        alike = all(is_tensor(part) and _alike(part, node) for part in parts)
        static = alike and all(isinstance(tensor_of(part).shape[dim], int) for part in parts)
        return (dim % tensor_of(node).dim(), [(part, ()) for part in parts]) if static else None
    return _filled(node) if torch_name(node) in _EMPTY else None


def _alike(node: fx.Node, other: fx.Node) -> bool:
    return tensor_of(node).dtype == tensor_of(other).dtype and tensor_of(node).dim() == tensor_of(other).dim()


def _filled(buffer: fx.Node) -> tuple[int, list[tuple[fx.Node, Steps]]] | None:
    """The slices along the last dimension that `buffer[..., a:b].copy_(x)` or `buffer[..., a:b] = x` write.

    None unless they cover all of it, each once, before anything reads it. Sources must have the slice's shape.
    """
    shape = tensor_of(buffer).shape
    last = len(shape) - 1
    labels = [Index(0, ((str(dim), 1),)) for dim in range(len(shape))]
    found: list[tuple[int, fx.Node, Steps]] = []
    written: list[fx.Node] = []
    source: Any
    path: Steps
    for user in buffer.users:
        write = next(iter(user.users), user) if torch_name(user) == "getitem" else user
        if torch_name(write) == "copy_" and write.args[0] is user and len(user.users) == 1:
            source, key, path = write.args[1], user.args[1], ((write, user), (user, buffer))
        elif torch_name(write) == "setitem" and write.args[0] is buffer:
            source, key, path = write.args[2], write.args[1], ((write, buffer),)
        else:
            continue
        region = cut_at(labels, key, shape)
        if region is None or not is_tensor(source) or not _alike(source, buffer):
            return None
        rows = region[:-1] == labels[:-1] and all(map(same, tensor_of(source).shape[:-1], shape[:-1]))
        if not rows or region[last].terms != labels[last].terms:
            return None
        found.append((region[last].offset, source, path))
        written += [node for node, _ in path]
    found.sort(key=lambda part: part[0])
    widths = [tensor_of(source).shape[-1] for _, source, _ in found]
    tiled = [start for start, _, _ in found] == [sum(widths[:i]) for i in range(len(widths))]
    later = [user for user in buffer.users if user not in written]
    in_time = all(write < user for write in written for user in later)
    if not found or not tiled or sum(widths) != shape[-1] or not in_time:
        return None
    return last, [(source, path) for _, source, path in found]
