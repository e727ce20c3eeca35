"""Normalise, rotate and append the new latents of a step in one launch.

    before                                                        after

    kv_a_proj ─> split ─┬─> RMSNorm ─┐                            kv_a_proj ─> mla_norm_rope_append ─> (cache)
                        └─> RoPE ────┴─> mla_append ─> (cache)

The pass recognises norm and rotation by what they compute, in any spelling: it cuts out the operations between
projection and append (`cone.py`), runs them on random tokens, and compares the results with formulas (`recognise.py`).

The op must have a kernel: on the CPU, Inductor fuses norm and rotation with the nodes around them, which the op would
prevent.

`TORCH_LOGS="+mla_compile"` logs each fusion, and the reason for each append that was not fused.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from mla_compile.ops.attention.append import append_op
from mla_compile.ops.attention.norm_rope import NORM_ROPE_APPEND, norm_rope_append_op
from mla_compile.ops.dispatch import first_serves
from mla_compile.passes import recognise
from mla_compile.passes.angles import by_token, cos_and_sin, materialize
from mla_compile.passes.cone import Recognition, cut, made_of_both
from mla_compile.passes.effects import memory, writer_between
from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import is_call, is_tensor, op_arguments, tensor_of
from mla_compile.passes.rewrite import Refusal, first_match, rewrite
from mla_compile.torch_internals import statically_known_true


def fuse_norm_rope_append(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without appends that can be fused is left untouched."""
    known = Recognition()
    read_by_all: set[fx.Node] = set()

    def fuse(append: fx.Node) -> str:
        given = op_arguments(append)
        eps, rotation, args = first_match(
            _sources(append),
            lambda source: _match(append, source, known),
            "kv_c and k_pe are not two parts of one tensor",
        )

        def emit(source: Any, weight: Any, angles: Sequence[Any], kv_cache: Any, slot_mapping: Any) -> None:
            tokens, weight = by_token(source), weight if len(weight.shape) == 1 else weight.flatten()
            to = kv_cache, slot_mapping
            norm_rope_append_op(tokens, weight, *cos_and_sin(angles), *to, eps, *rotation.layout)

        inline(append, emit, (*args, given["kv_cache"], given["slot_mapping"]))
        append.graph.erase_node(append)
        read_by_all.update(args[2], [given["slot_mapping"]])
        return f"RMSNorm with eps {eps:g}, {rotation}"

    rewrite(gm.graph, lambda node: is_call(node, append_op) and _pays(node), fuse)
    materialize(read_by_all)
    return gm


def _pays(append: fx.Node) -> bool:
    """Whether the op has a kernel."""
    return first_serves(NORM_ROPE_APPEND, tensor_of(_parts(append)[0]))


def _match(
    append: fx.Node, source: fx.Node, known: Recognition
) -> tuple[float, recognise.Rotation, tuple[Any, ...]]:
    """How an append's inputs are computed from `source`, the projection's output: the norm's epsilon, the rotation, and
    the op's tensors (the source, the norm's weight, and cos and sin)."""
    normed, rotated = (cut(source, part) for part in _parts(append))
    try:
        eps = known.of(recognise.norm, normed)
    except Refusal as reason:
        raise Refusal(f"kv_c is not the RMSNorm of the projection's first part: {reason}") from None
    try:
        rotation = known.of(recognise.rotation, rotated)
    except Refusal as reason:
        raise Refusal(f"k_pe is not the rotation of the projection's second part: {reason}") from None
    nodes = {*normed.nodes, *rotated.nodes}
    for node in sorted(nodes):
        others = [user for user in node.users if user not in nodes and user is not append]
        if others and not memory([node]) <= memory([source]):  # views of the source cost nothing
            raise Refusal(f"kv_c or k_pe is also used by `{others[0].name}`")
    # The cones have run without a write, so their nodes are skipped.
    writer = writer_between(source, append, [source, *nodes, *normed.tensors, *rotated.tensors], nodes)
    if writer is not None:
        raise Refusal(f"`{writer.name}` writes in place between the projection and the append")
    return eps, rotation, (source, *normed.tensors, rotation.angles(rotated))


def _parts(append: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The appended normalised latents and rotated keys."""
    given = op_arguments(append)
    return given["kv_c"], given["k_pe"]


def _sources(append: fx.Node) -> Iterator[fx.Node]:
    """Tensors as wide as `kv_c` and `k_pe` together on which both depend, the nearest first."""
    width = sum(tensor_of(part).shape[1] for part in _parts(append))
    return (n for n in made_of_both(_parts(append)) if is_tensor(n) and _last_is(tensor_of(n), width))


def _last_is(x: Tensor, width: int) -> bool:
    return x.dim() > 1 and statically_known_true(x.shape[-1] == width)  # the size may depend on data
