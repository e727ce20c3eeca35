"""Find every attention call of a graph, and the ops that replace it after the passes."""

import operator
from dataclasses import dataclass, replace
from itertools import groupby

from torch import fx

from mla_compile.explanation.shapes import Shapes
from mla_compile.ops.attention.decode import decode_op
from mla_compile.ops.attention.mla_attention import attention_op
from mla_compile.ops.attention.prefill import prefill_op
from mla_compile.ops.linear.matmul import matmul_by_head_op
from mla_compile.passes.effects import appended_cache
from mla_compile.passes.nodes import calls, is_call, op_arguments, op_name, tensor_of, value_of
from mla_compile.passes.provenance import module_path


@dataclass(frozen=True)
class Decode:
    """Shapes of a decode segment."""

    rows: str
    q_len: str
    tokens: str
    q_nope: str
    q_pe: str
    q_latent: str
    out: str


@dataclass(frozen=True)
class Prefill:
    """Shapes of a prefill segment."""

    chunks: str
    tokens: str
    q: str
    keys: str
    out: str


@dataclass(frozen=True)
class Layer:
    """One attention call: the shapes of the unified op, and of the segments that replace it after the passes."""

    name: str
    tokens: str
    q_nope: str
    q_pe: str
    kv_c: str
    k_pe: str
    kv_cache: str
    w_uk: str
    w_uv: str
    out: str
    append: str
    """The op that appends after the passes."""
    decode: Decode | None
    prefill: Prefill | None


@dataclass(frozen=True)
class Group:
    """Consecutive attention calls that differ only in their names."""

    names: tuple[str, ...]
    layer: Layer

    @property
    def title(self) -> str:
        """`layers.0.self_attn ... layers.9.self_attn: 10 calls, all the same`."""
        first, last, number = self.names[0], self.names[-1], len(self.names)
        if number == 1:
            return first
        name = first if first == last else f"{first} ... {last}"
        return f"{name}: {number} calls, all the same"


@dataclass(frozen=True)
class Layers:
    """The attention calls of a graph. `groups` covers all of the `calls`, or is empty."""

    calls: int
    groups: list[Group]
    hints: dict[str, int]
    """The value of each symbolic size in the captured call, if known."""

    @property
    def why_none(self) -> str:
        """The reason why there are no groups."""
        if self.calls:
            return "Not every mla_attention is one decode and one prefill segment after the passes."
        return "The graph has no mla_attention, so the split pass does not change it."


@dataclass
class _Call:
    """The nodes of one attention call in a split graph."""

    append: fx.Node
    decode: fx.Node | None = None
    prefill: fx.Node | None = None


def find_layers(graphs: dict[str, fx.GraphModule]) -> Layers:
    """Pair the unified ops of the first graph with the segments in the later ones, in order."""
    *_, last = graphs.values()
    first = graphs["captured"]
    unified = calls(first.graph, attention_op)
    split = next((gm for gm in graphs.values() if _calls(gm)), last)
    stages = unified, _calls(split), _calls(last)
    shapes = Shapes()
    # A user's passes may keep the unified op, or add segments: calls without a counterpart are not drawn.
    paired = zip(*stages) if len({len(stage) for stage in stages}) == 1 else ()
    layers = [_layer(shapes, f"call {i}", *nodes) for i, nodes in enumerate(paired)]
    groups = [
        Group(tuple(one.name for one in same), layer)
        for layer, same in groupby(layers, key=lambda layer: replace(layer, name=""))
    ]
    return Layers(len(unified), groups, shapes.hints)


def _calls(gm: fx.GraphModule) -> list[_Call]:
    """An append begins an attention call; the segments that read its cache, up to the next append, belong to the call.

    `mla_decode` on a cache without appends belongs to no call: `absorb_mla` made it from plain attention.
    """
    found: list[_Call] = []
    current: dict[fx.Node, _Call] = {}
    for node in gm.graph.nodes:
        appended = appended_cache(node)
        if appended is not None:
            found.append(_Call(node))
            current[appended] = found[-1]
        elif is_call(node, decode_op, prefill_op):
            call = current.get(op_arguments(node)["kv_cache"])
            if call is not None and is_call(node, decode_op):
                call.decode = node
            elif call is not None:
                call.prefill = node
    return found


def _layer(shapes: Shapes, default_name: str, unified: fx.Node, split: _Call, final: _Call) -> Layer:
    given = op_arguments(unified)
    inputs = ("q_nope", "q_pe", "kv_c", "k_pe", "kv_cache", "w_uk", "w_uv")
    return Layer(
        name=module_path(unified) or default_name,
        tokens=shapes.first_size(unified),
        **{name: shapes.shape(given[name]) for name in inputs},
        out=shapes.shape(unified),
        append=op_name(final.append),
        decode=_decode(shapes, split.decode, final.decode),
        prefill=_prefill(shapes, final.prefill),
    )


def _decode(shapes: Shapes, before: fx.Node | None, after: fx.Node | None) -> Decode | None:
    if before is None or after is None:
        return None
    given, split = op_arguments(after), op_arguments(before)
    q_latent, q_len = given["q_latent"], split["q_len"]
    return Decode(
        rows=shapes.first_size(split["seq_lens"]),
        q_len=shapes.size(value_of(q_len) if isinstance(q_len, fx.Node) else q_len),
        tokens=shapes.first_size(after),
        q_nope=shapes.shape(_absorbed(q_latent)),
        q_pe=shapes.shape(given["q_pe"]),
        q_latent=shapes.shape(q_latent),
        out=shapes.shape(_up_projected(after)),
    )


def _prefill(shapes: Shapes, node: fx.Node | None) -> Prefill | None:
    if node is None:
        return None
    given = op_arguments(node)
    tokens, (_, heads, width) = shapes.first_size(given["q"]), tensor_of(node).shape
    return Prefill(
        chunks=shapes.size(tensor_of(given["cu_seqlens_q"]).shape[0] - 1),
        tokens=tokens,
        q=shapes.shape(given["q"]),
        keys=shapes.size(tensor_of(given["key_slots"]).shape[1]),
        out=f"[{tokens}, {shapes.size(heads)}, {shapes.size(width)}]",
    )


def _absorbed(node: fx.Node) -> fx.Node:
    """The input of the `matmul_by_head` that computed a node; the node itself if a pass has fused that op away.

    A pass may have inserted ops with one input in between, for example a clamp.
    """
    product = node
    while not is_call(product, matmul_by_head_op) and len(product.all_input_nodes) == 1:
        (product,) = product.all_input_nodes
    return product.all_input_nodes[0] if is_call(product, matmul_by_head_op) else node


def _up_projected(decode: fx.Node) -> fx.Node:
    """The product with w_uv that follows a decode op."""
    for out in decode.users:
        if out.target is operator.getitem and out.args[1] == 0:
            return next((user for user in out.users if is_call(user, matmul_by_head_op)), out)
    return decode
