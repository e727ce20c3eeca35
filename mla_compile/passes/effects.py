"""What a node of a Dynamo graph writes to, and which nodes share memory."""

import inspect
import operator
from collections.abc import Iterable, Iterator, Set

import torch.nn.functional as F
from torch import Tensor, fx

from mla_compile.ops.attention.append import append_op
from mla_compile.ops.attention.norm_rope import norm_rope_append_op, rotate_queries_op
from mla_compile.passes.nodes import argument, function_name, is_call, op_arguments, value_of, values_of
from mla_compile.torch_internals import is_mutable, storage_key

_NAMES = {*dir(Tensor), *dir(operator)}
_METHODS_IN_PLACE = {"__setitem__"} | {n for n in _NAMES if n.startswith("__i") and f"__{n[3:]}" in _NAMES}
"""`__iadd__` and every other method with an out-of-place form (`__add__`)."""
_OPERATORS_IN_PLACE = {getattr(operator, name) for name in _METHODS_IN_PLACE if hasattr(operator, name)}
"""The functions of `x += y` and `x[i] = y`. A match by name would include `and_` and `or_`."""
_UPDATE_STATISTICS = ("batch_norm", "native_batch_norm", "instance_norm")
"""Norms that write to their running mean and variance arguments."""

_APPENDS = (append_op, norm_rope_append_op)


def appended_cache(node: fx.Node) -> fx.Node | None:
    """The cache to which a node appends latents; None if the node is not an append."""
    return op_arguments(node)["kv_cache"] if is_call(node, *_APPENDS) else None


def memory(nodes: Iterable[fx.Node]) -> set[int]:
    """Keys of the memory of the nodes' tensors, equal for tensors that share it (a view, the same cache twice)."""
    return {storage_key(value) for node in nodes for value in values_of(node) if isinstance(value, Tensor)}


def made_of(node: fx.Node, columns: int = 0) -> fx.Node:
    """The base of a node's view, which is not itself a view.

    columns: the search ends before a tensor whose last dimension has fewer columns.
    """
    while isinstance(before := node.args[0] if node.args else None, fx.Node):
        value = value_of(before)
        too_few = columns > 0 and isinstance(value, Tensor) and value.shape[-1] < columns
        if too_few or memory([node]) != memory([before]):
            break
        node = before
    return node


def mutates(node: fx.Node) -> bool:
    """Whether a pass must not move other nodes across this one.

    The node may write in place, or is called only for an effect that may change how later nodes compute (autocast).
    """
    called = node.op.startswith("call_")
    if node.op == "call_module" or is_mutable(node.target) or _renormalizes(node):
        return True
    if function_name(node) in _UPDATE_STATISTICS:
        return True
    if called and value_of(node) is None:
        return True
    if getattr(node.target, "__module__", "") == "_operator":
        return node.target in _OPERATORS_IN_PLACE
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _METHODS_IN_PLACE
    return called and (in_place or _is_inplace(node) or "out" in node.kwargs)


def _is_inplace(node: fx.Node) -> bool:
    """Whether an argument `inplace` is True. Torch's C++ functions and methods do not have it."""
    if not inspect.isfunction(node.target):
        return False
    names = list(inspect.signature(node.target).parameters)
    place = names.index("inplace") if "inplace" in names else len(node.args)
    return bool([*node.args[place : place + 1], node.kwargs.get("inplace")][0])


def may_write(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node may write to: the first argument of `x.add_(y)`, `x[i] = y` and `x += y`."""
    if is_call(node, *_APPENDS, rotate_queries_op):
        given = op_arguments(node)
        return [given[name] for name in ("kv_cache", "q_pe") if given.get(name) is not None]
    if not mutates(node):
        return []
    return [node.args[0]] if _writes_to_first(node) else node.all_input_nodes  # type: ignore[list-item]


def between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes after `first` and before `last`."""
    node = first.next
    while node is not last:
        yield node
        node = node.next


def writer_between(
    first: fx.Node, last: fx.Node, read: Iterable[fx.Node], passed: Set[fx.Node] = frozenset()
) -> fx.Node | None:
    """A node after `first` and before `last` that may write to the memory of the nodes of `read`.

    passed: nodes to skip, which write to nothing or only fill tensors of their own.
    """
    touched = memory(read)
    for node in between(first, last):
        if node not in passed and not touched.isdisjoint(memory(may_write(node))):
            return node
    return None


def at_once(first: fx.Node, last: fx.Node, read: Iterable[fx.Node]) -> bool:
    """Whether `last` can be computed at `first`'s place from the nodes of `read`: no node between them writes to these,
    or is called only for its effect, which may be to enable gradients."""
    if any(mutates(node) and not memory(node.all_input_nodes) for node in between(first, last)):
        return False
    return writer_between(first, last, read) is None


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that outputs, inputs or effects need. Dynamo leaves others in, such as expanded keys without a reader.

    A tensor that is made and filled but never read is not live, nor are the writes that fill it.
    """
    live: set[fx.Node] = set()
    read = memory([node for node in graph.nodes if node.op in ("placeholder", "get_attr")])
    for node in reversed(graph.nodes):
        if _writes_to_first(node):
            needed = not read.isdisjoint(memory(may_write(node)))
        else:
            needed = node.op == "output" or mutates(node)
        if needed or not live.isdisjoint(node.users):
            live.add(node)
            read |= memory(node.all_input_nodes)
    return live


def erase_dead(graph: fx.Graph) -> None:
    """Remove the calls that are not live."""
    live = live_nodes(graph)
    for node in reversed(graph.nodes):
        if node.op.startswith("call_") and node not in live:
            graph.erase_node(node)


def _writes_to_first(node: fx.Node) -> bool:
    """Whether a node writes to its first argument and to no other."""
    by_method = node.op == "call_method" and str(node.target).endswith("_") and mutates(node)
    return (by_method or node.target in _OPERATORS_IN_PLACE) and isinstance(node.args[0], fx.Node)


def _renormalizes(node: fx.Node) -> bool:
    """Whether an embedding has a `max_norm`, to which it renormalises vectors of its weight in place."""
    return node.target in (F.embedding, F.embedding_bag) and argument(node, 3, "max_norm") is not None
