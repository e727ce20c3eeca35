"""Which nodes of a Dynamo graph work row by row along dimension 0, and which of their inputs carry the rows.

A node is taken to mix rows unless its rule says that it does not. So are ops without a rule, calls with an argument
that the rule does not name, and indices whose dimensions may change places.
"""

import operator
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mla_compile.ops.collectives import all_gather_op, all_reduce_op
from mla_compile.ops.decode import decode_op
from mla_compile.ops.fp8_linear import fp8_linear_op
from mla_compile.ops.matmul import matmul_by_head_op
from mla_compile.ops.moe import moe_experts_op
from mla_compile.passes.nodes import arguments, is_tuple, op_arguments, rows_of, tensor_of, value_of
from mla_compile.torch_internals import overload_of, statically_known_true

RESHAPES = {"view", "reshape", torch.reshape}
_Carriers = list[fx.Node] | None
_Rule = Callable[[fx.Node, Any], _Carriers]
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def row_inputs(node: fx.Node, rows: Any) -> _Carriers:
    """The inputs whose row i alone decides row i of the result, or None where the node is not known to be row-wise.

    As often as they occur: `F.linear(x, x)` needs all rows of its second `x`, so it is not row-wise.
    """
    rule = _RULES.get(overload_of(node.target))
    if rule is None or not _has_rows(node, rows):
        return None
    carriers = rule(node, rows)
    if not carriers or not all(_has_rows(carrier, rows) for carrier in carriers):
        return None
    device = tensor_of(node).device  # a gather does not cross devices
    inputs = _inputs(node)
    only_there = all(inputs.count(carrier) == carriers.count(carrier) for carrier in carriers)
    return carriers if only_there and all(tensor_of(c).device == device for c in carriers) else None


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
    shape = tensor_of(node).shape
    return [shape[dim] if dim and size == -1 else size for dim, size in enumerate(sizes)]


def _has_rows(node: Any, rows: Any) -> bool:
    own = rows_of(node)
    return own is not None and statically_known_true(own == rows)


def _rank(node: Any) -> int:
    """The number of dimensions of a node's tensor; 0 where there is none."""
    return 0 if rows_of(node) is None else tensor_of(node).dim()


def _spares_rows(dims: Any, rank: int) -> bool:
    """Whether a dim, or each of some, is known and is another one than the rows, counted from either end."""
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return rank > 0 and len(dims) > 0 and all(isinstance(dim, int) and dim % rank != 0 for dim in dims)


def _pointwise(node: fx.Node, rows: Any) -> _Carriers:
    """Each operand is aligned with the rows of the result or is the same for all of them."""
    rank = tensor_of(node).dim()
    carriers: list[fx.Node] = []
    for operand in _inputs(node):
        value = value_of(operand)
        if isinstance(value, _NUMBERS):
            continue
        if not isinstance(value, Tensor):
            return None
        if value.dim() == rank and _has_rows(operand, rows):
            carriers.append(operand)
        elif value.dim() == rank and not statically_known_true(value.shape[0] == 1):
            return None
    return carriers


def _op(*names: str) -> _Rule:
    """These arguments of an op of ours; `hoist_row_gather` tells the others anew."""

    def rule(node: fx.Node, rows: Any) -> _Carriers:
        given = op_arguments(node)
        return [given[name] for name in names]

    return rule


def _only_first(node: fx.Node, rows: Any) -> _Carriers:
    """The first argument; the others say of what dtype or layout the result is."""
    first = node.args[0] if node.args else None
    return [first] if isinstance(first, fx.Node) else None


def _where(node: fx.Node, rows: Any) -> _Carriers:
    """Elementwise where it has three operands; with one alone it gives indices."""
    return _pointwise(node, rows) if len(node.args) == 3 else None


def _linear(node: fx.Node, rows: Any) -> _Carriers:
    """Along the last dimension, by a matrix; a bias of more than one dimension could be of each row."""
    given = arguments(node, ("input", "weight", "bias")) or {}
    source, weight, bias = (_rank(given.get(name)) for name in ("input", "weight", "bias"))
    return [given["input"]] if source > 1 and weight == 2 and bias < 2 else None


def _norm(*names: str) -> _Rule:
    """Along the last dimensions, those of `normalized_shape`."""

    def rule(node: fx.Node, rows: Any) -> _Carriers:
        given = arguments(node, ("input", "normalized_shape", *names)) or {}
        shape = given.get("normalized_shape")
        behind_rows = isinstance(shape, (tuple, list)) and len(shape) < _rank(given["input"])
        return [given["input"]] if behind_rows else None

    return rule


def _embedding(node: fx.Node, rows: Any) -> _Carriers:
    """A row of the table for each id."""
    given = arguments(node, ("input", "weight", "padding_idx")) or {}
    return [given["input"]] if isinstance(given.get("input"), fx.Node) else None


def _reshape(node: fx.Node, rows: Any) -> _Carriers:
    """Sizes, not a dtype: where the leading size stays, every row is reshaped by itself.

    Not where -1 stands for a dynamic size, which is no node and cannot be written out.
    """
    sizes = reshape_sizes(node)
    given = all(isinstance(size, (int, fx.Node)) for size in sizes)
    return _only_first(node, rows) if sizes and given and not node.kwargs else None


def _along(*names: str, dim: str = "dim", default: int | None = None, new: int = 0) -> _Rule:
    """The op works along the dimensions in its argument `dim`, none of which may be the rows.

    names: its arguments after the tensor; new: how many dimensions more the result has than the tensor.
    """

    def rule(node: fx.Node, rows: Any) -> _Carriers:
        given = arguments(node, ("input", *names)) or {}
        rank = _rank(given.get("input"))
        return [given["input"]] if rank and _spares_rows(given.get(dim, default), rank + new) else None

    return rule


def _picking(*names: str) -> _Rule:
    """`gather` and `scatter`: tensors of one rank, each with all rows."""

    def rule(node: fx.Node, rows: Any) -> _Carriers:
        given = arguments(node, ("input", "dim", "index", *names))
        if given is None or not _spares_rows(given["dim"], _rank(node)):
            return None
        return _all_of_one_rank([x for name, x in given.items() if name != "dim" and isinstance(x, fx.Node)])

    return rule


def _cat(node: fx.Node, rows: Any) -> _Carriers:
    """Along another dimension than the rows, which all parts have."""
    given = arguments(node, ("tensors", "dim")) or {}
    parts = given.get("tensors")
    listed = isinstance(parts, (tuple, list)) and _spares_rows(given.get("dim", 0), _rank(node))
    return _all_of_one_rank(given["tensors"]) if listed else None


def _all_of_one_rank(nodes: Sequence[fx.Node]) -> _Carriers:
    return list(nodes) if len({_rank(node) for node in nodes}) == 1 else None


def _getitem(node: fx.Node, rows: Any) -> _Carriers:
    """An element of a tuple of results, or slices, single indices and new dimensions behind dimension 0.

    Not behind it: what takes several elements (a list, a tensor, a mask), for dimensions may then change places.
    """
    source: Any = node.args[0]
    index: Any = node.args[1]
    if not isinstance(source, fx.Node):
        return None
    if is_tuple(source):
        return [source] if isinstance(index, int) else None
    first, *others = index if isinstance(index, tuple) and index else (index,)
    if not all(other is None or other is Ellipsis or _takes_one_or_a_range(other) for other in others):
        return None
    indexed = sum(isinstance(other, (int, slice)) for other in others)
    keeps_rows = first == slice(None) or (first is Ellipsis and indexed < _rank(source))
    return [source] if keeps_rows else None


def _takes_one_or_a_range(index: Any) -> bool:
    if isinstance(index, slice):
        return all(isinstance(end, (int, NoneType)) for end in (index.start, index.stop, index.step))
    return isinstance(index, int) and not isinstance(index, bool)


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys((operator.add, operator.sub, operator.mul, operator.truediv, operator.pow), _pointwise),
    **dict.fromkeys(
        (operator.and_, operator.or_, operator.ge, operator.gt, operator.le, operator.lt), _pointwise
    ),
    **dict.fromkeys((operator.eq, operator.ne, operator.neg, operator.invert), _pointwise),
    **dict.fromkeys((torch.add, torch.sub, torch.mul, torch.div, torch.rsqrt, torch.sigmoid), _pointwise),
    **dict.fromkeys((torch.sin, torch.cos, F.silu, F.gelu, F.relu), _pointwise),
    **dict.fromkeys(("add", "sub", "mul", "div", "neg", "pow", "square", "rsqrt", "sigmoid"), _pointwise),
    **dict.fromkeys(("sin", "cos", "masked_fill", "clamp"), _pointwise),
    torch.where: _where,
    **dict.fromkeys(("to", "type", "type_as", "float", "double", "bfloat16", "half", "bool"), _only_first),
    "contiguous": _only_first,
    F.linear: _linear,
    F.layer_norm: _norm("weight", "bias", "eps"),
    # Dynamo inlines `F.rms_norm` down to `torch.rms_norm`.
    **dict.fromkeys((F.rms_norm, torch.rms_norm), _norm("weight", "eps")),
    **dict.fromkeys((torch.mean, torch.sum, "mean", "sum"), _along("dim", "keepdim", "dtype")),
    **dict.fromkeys((torch.softmax, "softmax"), _along("dim", "dtype")),
    F.softmax: _along("dim", "_stacklevel", "dtype"),
    **dict.fromkeys((torch.gather, "gather"), _picking()),
    **dict.fromkeys((torch.scatter, "scatter"), _picking("src")),
    **dict.fromkeys((torch.unsqueeze, "unsqueeze"), _along("dim", new=1)),
    **dict.fromkeys(("unflatten", torch.unflatten), _along("dim", "sizes")),
    **dict.fromkeys(("flatten", torch.flatten), _along("start_dim", "end_dim", dim="start_dim", default=0)),
    torch.cat: _cat,
    **dict.fromkeys((torch.topk, "topk"), _along("k", "dim", "largest", "sorted", default=-1)),
    **dict.fromkeys((torch.split, "split"), _along("split_size", "dim", default=0)),
    **dict.fromkeys((torch.chunk, "chunk"), _along("chunks", "dim", default=0)),
    **dict.fromkeys(RESHAPES, _reshape),
    F.embedding: _embedding,
    operator.getitem: _getitem,
    moe_experts_op: _op("x", "topk_weights", "topk_ids"),
    fp8_linear_op: _op("x"),
    matmul_by_head_op: _op("x"),
    all_reduce_op: _op("x"),
    all_gather_op: _op("x"),
    decode_op: _op("q_latent", "q_pe"),
}
