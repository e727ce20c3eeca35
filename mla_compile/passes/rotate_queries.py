"""Rotate queries in place, in the output of their projection.

    before                                           after

    q_proj ─> view ─┬─> q_nope ─────────┬─> cat      q_proj ─> mla_rotate_queries (in place) ─> view
                    └─> RoPE ───> q_pe ─┘

Nothing is copied. A head's parts are adjacent in memory, as prefill expects them, so the pass removes the `cat`. If
`mla_norm_rope_append` follows with the same angles, it rotates the queries in its launch.

The pass recognises rotations by what they compute, as in `fuse_norm_rope_append`, between the projection's output and
the queries of `mla_decode` and `mla_prefill`. A rotation that joins the parts itself, as in models of transformers, is
replaced together with its `cat`.

The op must have a kernel: on the CPU, Inductor fuses the rotation with the nodes around it.

`TORCH_LOGS="+mla_compile"` logs each rotation in place, and the reason for other queries.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.ops.attention.decode import decode_op
from mla_compile.ops.attention.norm_rope import ROTATE_QUERIES, norm_rope_append_op, rotate_queries_op
from mla_compile.ops.attention.prefill import prefill_op
from mla_compile.ops.dispatch import first_serves
from mla_compile.passes.angles import are_alike, cos_and_sin, materialize
from mla_compile.passes.cone import Cone, Recognition, cut, made_of_both
from mla_compile.passes.effects import made_of, memory, writer_between
from mla_compile.passes.emit import inline, set_example_value
from mla_compile.passes.nodes import (
    argument,
    calls,
    function_name,
    is_call,
    is_tensor,
    op_arguments,
    tensor_of,
    with_arguments,
)
from mla_compile.passes.recognise import Rotation, query_rotation
from mla_compile.passes.rewrite import Refusal, first_match, rewrite
from mla_compile.passes.strides import is_contiguous, views_of
from mla_compile.torch_internals import statically_known_true


def rotate_queries(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without queries that can be rotated in place is left untouched."""
    parts = filter(is_tensor, map(_rotated_part, calls(gm.graph, decode_op, prefill_op)))
    # The base keeps a head's columns in its last dimension, although the rotation may view them as pairs.
    rotated = {
        made_of(q_pe, columns=tensor_of(q_pe).shape[2]): tensor_of(q_pe) for q_pe in parts if _pays(q_pe)
    }
    known = Recognition()
    wholes: dict[frozenset[int], fx.Node] = {}
    angles: set[fx.Node] = set()

    def fuse(result: fx.Node) -> Rotation:
        match = _match(result, rotated[result], known)
        queries = _replace(match)
        wholes[frozenset(memory([queries]))] = queries
        angles.update(match.rotation.angles(match.cone))
        return match.rotation

    # `rewrite` removes dead nodes. It comes before the appends, as a dead `cat` of the parts would read the queries.
    rewrite(gm.graph, rotated.__contains__, fuse)
    for node in calls(gm.graph, rotate_queries_op):
        _move_to_append(node)
    for node in calls(gm.graph, prefill_op):
        cat = op_arguments(node)["q"]
        whole = wholes.get(frozenset(memory(_joined(cat) or [])))
        if whole is not None:
            _use_joined(cat, whole)
    materialize(angles)
    return gm


def _pays(q_pe: fx.Node) -> bool:
    """Whether the op has a kernel."""
    return first_serves(ROTATE_QUERIES, tensor_of(q_pe))


@dataclass(frozen=True)
class _Match:
    """Queries, or their rotated parts, that are a rotation of some columns of `cone.source`."""

    cone: Cone
    heads: int
    rope: int
    rotation: Rotation


def _rotated_part(node: fx.Node) -> Any:
    """The rotated part of the queries of an attention op; None if the parts cannot be distinguished."""
    given = op_arguments(node)
    if is_call(node, decode_op):
        return given["q_pe"]
    parts = _joined(given["q"])
    return parts[1] if parts else None


def _joined(q: fx.Node) -> Any:
    """The two parts that `lower_mla_attention` joins for prefill."""
    parts = argument(q, 0, "tensors") if q.target is torch.cat else ()
    return parts if len(parts) == 2 and argument(q, 1, "dim") == -1 else None


def _match(result: fx.Node, q_pe: Tensor, known: Recognition) -> _Match:
    """The rotation whose result is a node, if it can be done in place."""
    heads, rope = q_pe.shape[1:]
    if not type(heads) is type(rope) is int:
        raise Refusal("the number of heads is unknown at compile time")
    formula = partial(query_rotation, heads=heads, rope=rope)

    def rotation_of(source: fx.Node) -> _Match:
        cone = cut(source, result)
        return _Match(cone, heads, rope, known.of(formula, cone))

    # Tensors with separate memory that may have all columns of all heads.
    sources = (
        node
        for node in made_of_both([result])
        if is_tensor(node) and _has_heads(tensor_of(node), heads, rope) and _has_memory_of_its_own(node)
    )
    match = first_match(sources, rotation_of, "no projection has all parts of all heads")
    _check_readers(match)
    return match


def _has_heads(x: Tensor, heads: int, rope: int) -> bool:
    columns = x.shape[-1] if x.dim() > 1 and is_contiguous(x) else 0
    return type(columns) is int and columns > heads * rope and columns % heads == 0


def _has_memory_of_its_own(node: fx.Node) -> bool:
    return node.op == "call_function" and memory([node]).isdisjoint(memory(node.all_input_nodes))


def _check_readers(match: _Match) -> None:
    """Raises `Refusal` if another node would read columns of the projection's output that the rotation overwrites."""
    cone = match.cone
    nodes = {cone.source, *cone.nodes}
    for node in sorted(nodes - {cone.result}):
        for user in node.users:
            if user not in nodes and not _excludes_rotated(user, match):
                raise Refusal(f"the rotated columns are also used by `{user.name}`")
    writer = writer_between(cone.source, cone.result, [cone.source, *cone.nodes, *cone.tensors])
    if writer is not None:
        raise Refusal(f"`{writer.name}` writes in place before it")


def _excludes_rotated(node: fx.Node, match: _Match) -> bool:
    """Whether a node is a view of the projection's output without the columns that are rotated."""
    if not is_tensor(node) or memory([node]) != memory([match.cone.source]):
        return False
    view, source = tensor_of(node), tensor_of(match.cone.source)
    width = source.shape[-1] // match.heads
    steps = view.stride()[:-1]
    if _is_read_by_strides(node) or not all(type(step) is int and step % width == 0 for step in steps):
        return False
    return view.stride(-1) == 1 and view.storage_offset() % width + view.shape[-1] <= width - match.rope


def _is_read_by_strides(view: fx.Node) -> bool:
    """Whether a node reads memory of a view's base outside the view, by `as_strided`."""
    return any(
        function_name(user).startswith("as_strided")
        or (memory([user]) == memory([view]) and _is_read_by_strides(user))
        for user in view.users
    )


def _replace(match: _Match) -> fx.Node:
    """Insert a rotation in place and return its queries, `[tokens, heads, qk_head_dim]`."""
    cone, heads, rope, rotation = match.cone, match.heads, match.rope, match.rotation
    result, joined = cone.result, tensor_of(cone.result).shape[-1] > rope

    def queries_of(source: Any) -> Any:
        return source.view(-1, heads, source.shape[-1] // heads)

    def as_before(queries: Any) -> Any:
        queries = queries if joined else queries[..., -rope:]
        for _ in tensor_of(result).shape[:-3]:
            queries = queries.unsqueeze(0)
        return queries.transpose(-3, -2) if rotation.heads_first else queries

    def rotated(source: Any, angles: Sequence[Any]) -> Any:
        queries = queries_of(source)
        rotate_queries_op(queries[..., -rope:], *cos_and_sin(angles), *rotation.layout)
        return queries, as_before(queries)

    views = views_of(result, as_before(queries_of(tensor_of(cone.source))))
    if isinstance(views, fx.Node):
        raise Refusal(f"`{views.name}` may depend on the strides of the queries")
    queries: fx.Node
    queries, same = inline(result, rotated, (cone.source, rotation.angles(cone)))
    result.replace_all_uses_with(same)
    for view in views:
        set_example_value(view)
    return queries


def _move_to_append(rotation: fx.Node) -> None:
    """Fuse a rotation into the append that follows, which saves a launch, if no node reads the queries before it."""
    given, node = op_arguments(rotation), rotation.next
    queries = memory([given["q_pe"]])
    while not is_call(node, norm_rope_append_op):
        is_user = not queries.isdisjoint(memory(node.all_input_nodes))
        is_view_or_size = memory([node]) == queries or function_name(node) in ("size", "sym_size")
        if (is_user and not is_view_or_size) or node.op == "output":
            return
        node = node.next
    if writer_between(rotation, node, [given["q_pe"], given["cos"], given["sin"]]) is not None:
        return
    others = op_arguments(node)
    alike = all(are_alike(given[name], others[name]) for name in ("cos", "sin"))
    same = all(given[name] == others[name] for name in ("interleaved_in", "interleaved_out"))
    if alike and same and others["q_pe"] is None:
        node.args, node.kwargs = with_arguments(node, q_pe=given["q_pe"])
        rotation.graph.erase_node(rotation)


def _use_joined(cat: fx.Node, queries: fx.Node) -> None:
    """Replace a `cat` of the two parts, which may have the prefill tokens alone, with queries that have both parts."""
    q_nope, q_pe = _joined(cat)
    split = None
    if q_pe.target is operator.getitem and q_pe.args[0].target is torch.split and len(q_pe.args[0].args) == 2:
        split, place = q_pe.args  # made by `lower_mla_attention` or by the user
    # Check that the parts, before the split, are the columns of these queries.
    q, rotated, first, second = (
        tensor_of(n) for n in (queries, split.args[0] if split else q_pe, q_nope, q_pe)
    )
    width = first.shape[-1] + second.shape[-1]
    apart = second.storage_offset() - first.storage_offset(), rotated.storage_offset() - q.storage_offset()
    same = (
        rotated.dim() == 3
        and q.stride() == rotated.stride() == second.stride() == first.stride()
        and q.shape[1:] == (*rotated.shape[1:2], width)
        and all(statically_known_true(gap == first.shape[-1]) for gap in apart)
        and statically_known_true(q.shape[0] == rotated.shape[0])
    )
    if not same:
        return
    whole = queries
    if split is not None:
        whole = inline(cat, lambda q, sizes: torch.split(q, sizes)[place], (queries, split.args[1]))
    cat.replace_all_uses_with(whole)
    cat.graph.erase_node(cat)
