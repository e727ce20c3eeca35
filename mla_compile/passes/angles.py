"""Cos and sin in the layout of our ops, and tensors that all layers read, materialised in memory.

Inductor would recompute them in each layer.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.materialize import materialize_op
from mla_compile.passes.effects import made_of, may_write, memory
from mla_compile.passes.emit import copy_provenance, set_example_value
from mla_compile.passes.nodes import is_tensor, namespace_of, tensor_of
from mla_compile.torch_internals import overload_of, statically_known_true


def cos_and_sin(angles: Sequence[Any]) -> tuple[Any, Any]:
    """Both as `[tokens, columns]`, from two proxies, or from one of complex numbers."""
    if len(angles) == 1:
        parts = torch.view_as_real(angles[0])
        angles = parts[..., 0], parts[..., 1]
    cos, sin = map(by_token, angles)
    return cos, sin


def by_token(x: Any) -> Any:
    """`x` as `[tokens, columns]`, with all dimensions before the last flattened."""
    return x if len(x.shape) == 2 else x.flatten(0, -2)


def are_alike(first: fx.Node, second: fx.Node) -> bool:
    """Whether two tensors are the same view of one tensor."""
    a, b = tensor_of(first), tensor_of(second)
    places = [(x.storage_offset(), x.stride(), x.shape[1:]) for x in (a, b)]
    same = made_of(first) is made_of(second) and places[0] == places[1]
    return same and statically_known_true(a.shape[0] == b.shape[0])


def materialize(nodes: Iterable[fx.Node]) -> None:
    """Compute the bases of these views once for all readers, except bases that a node writes to."""
    for node in sorted({made_of(node) for node in nodes}):
        if not _is_computed(node) or tensor_of(node).is_complex() or _is_written(node):
            continue
        views = [
            other for other in node.graph.nodes if other is not node and memory([other]) == memory([node])
        ]
        with node.graph.inserting_after(node), torch.no_grad():
            kept = node.graph.call_function(materialize_op, (node,))
            copy_provenance(node, kept)
            set_example_value(kept)
        node.replace_all_uses_with(kept)
        kept.args = (node,)
        for view in views:  # they share the memory of their new base
            set_example_value(view)


def _is_computed(node: fx.Node) -> bool:
    """Whether Inductor may compute a tensor inside its readers. The results of our ops are in memory already."""
    maker: Any = node.args[0] if node.target is operator.getitem else node
    ours = namespace_of(overload_of(maker.target)) == "mla_compile"
    return node.op in ("call_function", "call_method") and is_tensor(node) and not ours


def _is_written(node: fx.Node) -> bool:
    return any(not memory([node]).isdisjoint(memory(may_write(other))) for other in node.graph.nodes)
