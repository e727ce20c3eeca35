"""What a node of a Dynamo graph writes to, and which nodes share memory."""

import operator
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from mla_compile.ops.append import append_op
from mla_compile.ops.norm_rope_append import norm_rope_append_op
from mla_compile.torch_internals import is_mutable, storage_key

_OPERATORS_IN_PLACE = {
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem),
    *(operator.ilshift, operator.irshift),
}
"""What `x += y` and `x[i] = y` become. By name, `and_` and `or_` would look like them."""

_CACHE_POSITION: dict[Any, int] = {append_op: 2, norm_rope_append_op: 4}


def appended_cache(node: fx.Node) -> fx.Node | None:
    """The cache to which a node appends latents; None where it is no append."""
    position = _CACHE_POSITION.get(node.target)
    return None if position is None else node.args[position]  # type: ignore[return-value]


def memory(nodes: Sequence[Any]) -> set[int]:
    """What tells apart the memory of tensors: a view, or a second input, may be the same cache."""
    values = [node.meta.get("example_value") for node in nodes]
    flat = [v for value in values for v in (value if isinstance(value, (tuple, list)) else (value,))]
    return {storage_key(value) for value in flat if isinstance(value, Tensor)}


def mutates(node: fx.Node) -> bool:
    """Whether a node that moves must not cross this one.

    It may write in place, or it is called for its effect only and may decide how later nodes compute (autocast).
    Appends do not count: callers tell them apart by `appended_cache`.
    """
    if node.target in _CACHE_POSITION:
        return False
    called = node.op.startswith("call_")
    if node.op == "call_module" or is_mutable(node.target) or _renormalizes(node):
        return True
    if called and node.meta.get("example_value") is None:
        return True
    if getattr(node.target, "__module__", "") == "_operator":
        return node.target in _OPERATORS_IN_PLACE
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    flagged = any(value is True for value in (node.kwargs.get("inplace"), *node.args[1:]))
    return called and (in_place or flagged or "out" in node.kwargs)


def may_write(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node may write to: the first argument of `x.add_(y)`, `x[i] = y` and `x += y`."""
    cache = appended_cache(node)
    if cache is not None:
        return [cache]
    if not mutates(node):
        return []
    return [node.args[0]] if _writes_to_first(node) else node.all_input_nodes  # type: ignore[list-item]


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that outputs, inputs or effects need. Dynamo leaves others in, such as keys expanded for nobody.

    A tensor that is made, filled and read by nobody is not live, nor are the writes that fill it.
    """
    live: set[fx.Node] = set()
    read = memory([node for node in graph.nodes if node.op in ("placeholder", "get_attr")])
    for node in reversed(graph.nodes):
        if _writes_to_first(node):
            needed = not read.isdisjoint(memory(may_write(node)))
        else:
            needed = node.op == "output" or appended_cache(node) is not None or mutates(node)
        if needed or not live.isdisjoint(node.users):
            live.add(node)
            read |= memory(node.all_input_nodes)
    return live


def _writes_to_first(node: fx.Node) -> bool:
    """Whether all that a node may write to is its first argument."""
    by_method = node.op == "call_method" and str(node.target).endswith("_") and mutates(node)
    return (by_method or node.target in _OPERATORS_IN_PLACE) and isinstance(node.args[0], fx.Node)


def _renormalizes(node: fx.Node) -> bool:
    """Whether an embedding has a `max_norm`, to which it cuts rows of its weight in place."""
    max_norm = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
    return node.target in (F.embedding, F.embedding_bag) and max_norm is not None
