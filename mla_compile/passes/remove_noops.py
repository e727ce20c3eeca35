"""Leave out what nobody reads, and views that are what they are views of.

    before                                                                after

    x ──> flatten ──> fused_linear ──> view ──> flatten ──> norm_linear   x ──> fused_linear ──> norm_linear

Models see tokens as `[1, tokens, width]` and our ops as rows, so what the passes put in has views on both sides, and
sizes for them. Torch runs each on fake tensors, four times in all. In a layer of GLM-4.7-Flash that was half of the
nodes, and a tenth of the time of compiling it.
"""

from collections.abc import Sequence
from typing import Any

from torch import SymInt, Tensor, fx

from mla_compile.passes.effects import erase_dead
from mla_compile.passes.nodes import function_name, value_of
from mla_compile.passes.strides import is_contiguous
from mla_compile.torch_internals import statically_known_true

_VIEWS = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"}
"""They give a view of a contiguous tensor, or the tensor itself, where what they give is contiguous."""


def remove_noops(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it."""
    # Symbols that are equal have one expression; the first node that has it comes before all who read another.
    sizes: dict[Any, fx.Node] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, SymInt):
            same = sizes.setdefault(value.node.expr, node)
        else:
            same = _viewed(node)
        if same is not node:
            node.replace_all_uses_with(same)
    erase_dead(gm.graph)
    return gm


def _viewed(node: fx.Node) -> fx.Node:
    """The first node on the way to a view that has the same tensor; the node itself where there is none."""
    found = base = node
    while _is_view(base):
        base = base.all_input_nodes[0]
        if _lie_alike(value_of(base), value_of(node)):
            found = base
    return found


def _is_view(node: fx.Node) -> bool:
    if not node.op.startswith("call_") or function_name(node) not in _VIEWS:
        return False
    given, read = value_of(node), value_of(node.all_input_nodes[0])
    tensors = isinstance(given, Tensor) and isinstance(read, Tensor)
    return tensors and given.dtype == read.dtype and is_contiguous(given) and is_contiguous(read)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have the same sizes."""
    return one.dim() == other.dim() and all(
        statically_known_true(a == b) for a, b in zip(one.shape, other.shape)
    )
