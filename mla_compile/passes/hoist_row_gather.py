"""Compute row-wise work only for the rows that a later gather keeps.

    before                                           after

    x ─┬─> norm ─> mlp ─> (+) ─> index_select(ids)   x ─> index_select(ids) ─┬─> norm ─> mlp ─> (+)
       └──────────────────┘                                                  └──────────────────┘
    q ─> mla_decode ─> o_proj ─> index_select(ids)   q ─> index_select(ids) ─> mla_decode' ─> o_proj

A node can be reduced when it works row by row along dimension 0 and everything that uses it is reduced or is the
gather itself. So the gather climbs over lm_head, norms, residual adds, MLP, MoE, `o_proj` and decode attention and
stops where somebody else needs all rows: at the latest where the layer appends its latents. `mla_decode'` serves
the kept tokens as rows of one query token, each with the keys that it saw before (`flatten_to_single`), and
`moe_experts` is told anew which of them are padding.

Only `index_select` along dimension 0 is such a gather. `x[ids]` is not: its ids may be negative or a mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.ops.decode import decode_op
from mla_compile.ops.moe import moe_experts_op, no_padding
from mla_compile.ops.paging import flatten_to_single
from mla_compile.passes.effects import appended_cache, memory, mutates
from mla_compile.passes.emit import copy_provenance, fake_mode_of, inline, set_example_value
from mla_compile.passes.nodes import (
    arguments,
    is_call,
    is_tuple,
    op_arguments,
    rows_of,
    tensor_of,
    with_arguments,
)
from mla_compile.passes.rowwise import RESHAPES, reshape_sizes, row_inputs
from mla_compile.torch_internals import statically_known_true


def hoist_row_gather(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without such a gather is left untouched."""
    for node in list(gm.graph.nodes):
        if node.target in (torch.index_select, "index_select"):
            _hoist(node)
    return gm


def _hoist(gather: fx.Node) -> None:
    operands = _operands(gather)
    if operands is None:
        return
    source, ids = operands
    rows = rows_of(source)
    if statically_known_true(rows_of(ids) >= rows):
        return
    reducible = _reducible(gather, source, rows)
    if reducible:
        _rewrite(gather, source, ids, reducible)


def _operands(gather: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Source and row ids of a gather of rows; None for any other gather and for one that writes to an `out`."""
    given = arguments(gather, ("input", "dim", "index"))
    if given is None or given["dim"] != 0:
        return None
    source, ids = given["input"], given["index"]
    if source is ids or rows_of(source) is None or rows_of(ids) is None:
        return None
    return source, ids


def _reducible(gather: fx.Node, source: fx.Node, rows: Any) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that the gather can climb over, last first, each with its inputs that carry rows."""
    reducible: dict[fx.Node, list[fx.Node]] = {}
    appended_later: set[int] = set()
    node = gather.prev
    while node.op != "root" and not mutates(node):
        cache = appended_cache(node)
        if cache is not None:
            appended_later |= memory([cache])
        carriers = None
        if node.users and all(_reduced_in(user, node, gather, source, reducible) for user in node.users):
            carriers = row_inputs(node, rows)
        if carriers and appended_later.isdisjoint(memory(node.all_input_nodes)):
            reducible[node] = carriers
        node = node.prev
    # A tuple cannot be gathered: its elements come with it, or are gathered where they are taken out.
    return {
        node: carriers
        for node, carriers in reducible.items()
        if not any(is_tuple(n) and n not in reducible for n in carriers)
    }


def _reduced_in(
    user: fx.Node, node: fx.Node, gather: fx.Node, source: fx.Node, reducible: dict[fx.Node, list[fx.Node]]
) -> bool:
    if user is gather:
        return node is source
    return node in reducible.get(user, ())


def _rewrite(gather: fx.Node, source: fx.Node, ids: fx.Node, reducible: dict[fx.Node, list[fx.Node]]) -> None:
    graph = gather.graph
    fake_mode = fake_mode_of(gather)
    reduced: dict[fx.Node, fx.Node] = {}

    def place(node: fx.Node, target: Any, args: Any, kwargs: Any, op: str) -> fx.Node:
        with graph.inserting_before(gather):
            new = graph.create_node(op, target, args, kwargs)
        copy_provenance(node, new)
        set_example_value(new, fake_mode)
        return new

    def kept_rows(node: fx.Node) -> fx.Node:
        if node not in reduced:
            reduced[node] = place(gather, torch.index_select, (node, 0, ids), {}, "call_function")
        return reduced[node]

    for node in reversed(reducible):
        kept = {carrier: kept_rows(carrier) for carrier in reducible[node]}
        args, kwargs = _for_kept(node, gather, ids)
        args, kwargs = _substitute((args, kwargs), kept)
        reduced[node] = place(node, node.target, args, kwargs, node.op)

    value = kept_rows(source)
    if not _same_strides(value, gather):  # a slice, say; a later `view` counts on the gather's strides
        value = place(gather, "contiguous", (value,), {}, "call_method")
    gather.replace_all_uses_with(value)
    graph.erase_node(gather)
    for node in reducible:
        graph.erase_node(node)


def _same_strides(node: fx.Node, other: fx.Node) -> bool:
    pairs = zip(tensor_of(node).stride(), tensor_of(other).stride(), strict=True)
    return all(statically_known_true(mine == theirs) for mine, theirs in pairs)


def _substitute(arguments: Any, nodes: dict[fx.Node, fx.Node]) -> Any:
    return fx.map_arg(arguments, lambda node: nodes.get(node, node))


def _for_kept(node: fx.Node, gather: fx.Node, ids: fx.Node) -> tuple[Any, Any]:
    """The arguments of a reduced node that say which rows there are, told anew; those that carry rows as they were."""
    if is_call(node, decode_op):
        given = op_arguments(node)
        bounds = (given[name] for name in ("block_table", "seq_lens", "q_lens", "q_len"))
        table, seq_lens = inline(gather, flatten_to_single, (ids, *bounds))
        return with_arguments(node, block_table=table, seq_lens=seq_lens, q_lens=None, q_len=1)
    if is_call(node, moe_experts_op):
        given = op_arguments(node)
        if given["row_lens"] is None or statically_known_true(rows_of(given["row_lens"]) == 0):
            return node.args, node.kwargs
        row_lens = inline(gather, _kept_lens, (ids, given["row_lens"], given["q_len"]))
        return with_arguments(node, row_lens=row_lens, q_len=1)
    if node.target in RESHAPES:
        first, *others = reshape_sizes(node)
        count = first if first == -1 else inline(gather, lambda kept: kept.shape[0], (ids,))
        return (node.args[0], (count, *others)), {}
    return node.args, node.kwargs


def _kept_lens(ids: Tensor, row_lens: Tensor, q_len: int) -> Tensor:
    """`row_lens` of the kept tokens, rows of one token each: 1, or 0 for padding."""
    return no_padding(ids, row_lens, q_len).to(torch.int32)
