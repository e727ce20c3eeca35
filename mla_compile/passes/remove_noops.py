"""Remove nodes without a reader, and views that have the sizes of their source.

    before                                                                after

    x ──> flatten ──> fused_linear ──> view ──> flatten ──> norm_linear   x ──> fused_linear ──> norm_linear

Models see tokens as `[1, tokens, width]` and our ops see `[tokens, width]`, so the passes insert views on both sides of
an op, and nodes for the views' sizes. Torch runs each of them on fake tensors four times. In a layer of GLM-4.7-Flash
they were half of the nodes, and took a tenth of the compile time.
"""

from collections.abc import Sequence, Set
from typing import Any

from torch import SymInt, Tensor, fx

from mla_compile.passes.effects import erase_dead, may_write, memory
from mla_compile.passes.nodes import function_name, value_of
from mla_compile.passes.strides import is_contiguous, same_sizes

_VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"}
"""Given a contiguous tensor, they return a view or the tensor itself if their result is contiguous."""


def remove_noops(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it."""
    # Equal sizes have one symbolic expression. The first node with it precedes all readers of the others.
    sizes: dict[Any, fx.Node] = {}
    written = memory(target for node in gm.graph.nodes for target in may_write(node))
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, SymInt):
            same = sizes.setdefault(value.node.expr, node)
        else:
            same = _viewed(node, written)
        if same is not node:
            node.replace_all_uses_with(same)
    erase_dead(gm.graph)
    return gm


def _viewed(node: fx.Node, written: Set[int]) -> fx.Node:
    """The earliest node in a chain of views with the same tensor; the node itself if there is none.

    A pass replaces a node by an op and its view, and only the view has the memory of the replaced node's views. If they
    are `written` to, it stays: otherwise, no reader of the op would seem to read what they write.
    """
    found = base = node
    own = memory([node])
    while _is_view(base):
        base = base.all_input_nodes[0]
        may_stand_in = written.isdisjoint(own) or memory([base]) == own
        if may_stand_in and same_sizes(value_of(base), value_of(node)):
            found = base
    return found


def _is_view(node: fx.Node) -> bool:
    if not node.op.startswith("call_") or function_name(node) not in _VIEWS:
        return False
    result, source = value_of(node), value_of(node.all_input_nodes[0])
    tensors = isinstance(result, Tensor) and isinstance(source, Tensor)
    return tensors and result.dtype == source.dtype and is_contiguous(result) and is_contiguous(source)
