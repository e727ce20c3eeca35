"""Which nodes of a Dynamo graph work row by row along dimension 0, and which of their inputs carry the rows."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mla_compile.ops.decode import decode_op
from mla_compile.ops.moe import moe_experts_op
from mla_compile.torch_internals import statically_known_true

RESHAPES = {"view", "reshape", torch.reshape}
_Carriers = list[fx.Node] | None


def first_value(node: fx.Node) -> Any:
    """The node's example tensor, the first one of a tuple; None where there is none."""
    value = node.meta.get("example_value")
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, Tensor) and value.dim() > 0 else None


def row_inputs(node: fx.Node, rows: Any) -> _Carriers:
    """The inputs whose row i alone decides row i of the result, or None where the node is not known to be row-wise.

    As often as they occur: `F.linear(x, x)` needs all rows of its second `x`, so it is not row-wise.
    """
    rule = _RULES.get(node.target)
    if rule is None or not node.args or not _has_rows(node, rows):
        return None
    carriers = rule(node, rows)
    if not carriers or not all(_has_rows(carrier, rows) for carrier in carriers):
        return None
    device = first_value(node).device  # a gather does not cross devices
    inputs = _inputs(node)
    only_there = all(inputs.count(carrier) == carriers.count(carrier) for carrier in carriers)
    return carriers if only_there and all(first_value(c).device == device for c in carriers) else None


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Every occurrence of a node among the arguments; `all_input_nodes` has each one once."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def reshape_sizes(node: fx.Node) -> Sequence[Any]:
    """The sizes of `x.view(2, 3)` or `x.view((2, 3))`; -1 stays at the front only.

    Anywhere else it is written out: with 0 rows kept, `x.view(0, 2, -1)` would be ambiguous.
    """
    sizes: Any = node.args[1:]
    sizes = sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes
    shape = first_value(node).shape
    return [shape[dim] if dim and size == -1 else size for dim, size in enumerate(sizes)]


def _has_rows(node: Any, rows: Any) -> bool:
    value = first_value(node) if isinstance(node, fx.Node) else None
    return value is not None and statically_known_true(value.shape[0] == rows)


def _pointwise(node: fx.Node, rows: Any) -> _Carriers:
    """Operands of full rank with all rows are aligned with the result's rows; any other one is broadcast."""
    rank = first_value(node).dim()
    return [n for n in _inputs(node) if _has_rows(n, rows) and first_value(n).dim() == rank]


def _first_argument(node: fx.Node, rows: Any) -> _Carriers:
    return [node.args[0]] if isinstance(node.args[0], fx.Node) else None


def _last_dim(node: fx.Node, rows: Any) -> _Carriers:
    """The op works along the last dimension, or the last ones (`normalized_shape`), of its first argument."""
    source = node.args[0]
    shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
    worked_on = len(shape) if isinstance(shape, (tuple, list)) else 1
    return [source] if isinstance(source, fx.Node) and worked_on < first_value(source).dim() else None


def _reshape(node: fx.Node, rows: Any) -> _Carriers:
    """Sizes, not a dtype: where the leading size stays, every row is reshaped by itself.

    Not where -1 stands for a dynamic size, which is no node and cannot be written out.
    """
    given = all(isinstance(size, (int, fx.Node)) for size in reshape_sizes(node))
    return _first_argument(node, rows) if reshape_sizes(node) and given else None


def _first(count: int) -> Callable[[fx.Node, Any], _Carriers]:
    """The op's first `count` arguments, where none is passed by name: who moves the gather rewrites the others."""

    def rule(node: fx.Node, rows: Any) -> _Carriers:
        if node.kwargs:
            return None
        carriers = [n for n in node.args[:count] if isinstance(n, fx.Node)]
        return carriers if len(carriers) == count else None

    return rule


def _along(position: int, default: int | None) -> Callable[[fx.Node, Any], _Carriers]:
    """The op works along its `dim` argument (at `position`, else `default`), which must not be the rows."""

    def rule(node: fx.Node, rows: Any) -> _Carriers:
        dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
        inputs = _inputs(node)
        rank = max(first_value(n).dim() for n in inputs if first_value(n) is not None)
        crosses_rows = not isinstance(dim, int) or dim in (0, -rank) or (dim < 0 and rank == 1)
        return None if crosses_rows else inputs

    return rule


def _einsum(node: fx.Node, rows: Any) -> _Carriers:
    """The first operand's leading label is the result's, and no other operand has it."""
    inputs, _, output = str(node.args[0]).replace(" ", "").partition("->")
    first, *others = inputs.split(",")
    label = first[:1]
    elsewhere = "".join((first[1:], *others))
    row_wise = label.isalpha() and output.startswith(label) and label not in elsewhere
    return [node.args[1]] if row_wise and isinstance(node.args[1], fx.Node) else None


def _getitem(node: fx.Node, rows: Any) -> _Carriers:
    """An element of a tuple of results, or an index that leaves dimension 0 whole."""
    source: Any = node.args[0]
    index: Any = node.args[1]
    if isinstance(source, fx.Node) and isinstance(source.meta.get("example_value"), (tuple, list)):
        return [source]
    first = index[0] if isinstance(index, tuple) and index else None
    rank = first_value(source).dim() if isinstance(source, fx.Node) else 0
    keeps_rows = first == slice(None) or (first is Ellipsis and len(index) <= rank)
    return [source] if keeps_rows and len(node.all_input_nodes) == 1 else None


_RULES: dict[Any, Callable[[fx.Node, Any], _Carriers]] = {
    **dict.fromkeys((operator.add, operator.sub, operator.mul, operator.truediv, operator.pow), _pointwise),
    **dict.fromkeys(
        (operator.and_, operator.or_, operator.ge, operator.gt, operator.le, operator.lt), _pointwise
    ),
    **dict.fromkeys((operator.eq, operator.ne, operator.neg, operator.invert, torch.where), _pointwise),
    **dict.fromkeys((torch.add, torch.sub, torch.mul, torch.div, torch.rsqrt, torch.sigmoid), _pointwise),
    **dict.fromkeys((torch.sin, torch.cos, F.silu, F.gelu, F.relu), _pointwise),
    **dict.fromkeys(("add", "sub", "mul", "div", "neg", "pow", "square", "rsqrt", "sigmoid"), _pointwise),
    **dict.fromkeys(("sin", "cos", "masked_fill", "contiguous", "clamp"), _pointwise),
    **dict.fromkeys(("to", "type", "type_as", "float", "double", "bfloat16", "half", "bool"), _pointwise),
    # Dynamo inlines `F.rms_norm` down to `torch.rms_norm`.
    **dict.fromkeys((F.linear, F.rms_norm, torch.rms_norm, F.layer_norm), _last_dim),
    **dict.fromkeys((torch.mean, torch.sum, "mean", "sum"), _along(1, None)),
    **dict.fromkeys((torch.softmax, F.softmax, "softmax"), _along(1, None)),
    **dict.fromkeys((torch.gather, "gather", torch.scatter, "scatter"), _along(1, None)),
    **dict.fromkeys((torch.unsqueeze, "unsqueeze"), _along(1, None)),
    **dict.fromkeys((torch.cat, "unflatten", torch.unflatten, "flatten", torch.flatten), _along(1, 0)),
    **dict.fromkeys((torch.topk, "topk"), _along(2, -1)),
    **dict.fromkeys((torch.split, "split", torch.chunk, "chunk"), _along(2, 0)),
    **dict.fromkeys(RESHAPES, _reshape),
    F.embedding: _first_argument,
    operator.getitem: _getitem,
    torch.einsum: _einsum,
    moe_experts_op: _first(3),  # the padding that it is told of is the caller's to tell anew
    decode_op: _first(2),
}
