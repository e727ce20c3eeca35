"""Normalise, rotate and append the new latents of a step in one launch.

    before                                                        after

    kv_a_proj ─> split ─┬─> RMSNorm ─┐                            kv_a_proj ─> mla_norm_rope_append ─> (cache)
                        └─> RoPE ────┴─> mla_append ─> (cache)

Norm and rotation are found by what they compute, not by how they are written: the operations between the projection
and the append are cut out (`cone.py`), run on a few random tokens, and compared with the formulas (`recognise.py`).

Only where the op has a kernel: on the CPU, Inductor fuses norm and rotation with what is around them, which the op's
torch code would give up.

The log, `TORCH_LOGS="+mla_compile"`, says what was fused, and why every other append was not.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.ops.append import append_op
from mla_compile.ops.implementations import first_serves
from mla_compile.ops.norm_rope_append import NORM_ROPE_APPEND, norm_rope_append_op
from mla_compile.passes.angles import by_token, cos_and_sin, materialize
from mla_compile.passes.cone import cut
from mla_compile.passes.effects import erase, live_nodes, memory, writer_between
from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import calls, is_tensor, op_arguments, tensor_of
from mla_compile.passes.provenance import where
from mla_compile.passes.recognise import Norm, Rotation, recognise_norm, recognise_rotation, remembered
from mla_compile.torch_internals import statically_known_true

log = logging.getLogger(__name__)

_MOST_SOURCES = 3
"""Tensors as wide as both parts that are tried: the projection's output, and what was made of all of it."""


@dataclass(frozen=True)
class _Match:
    """An append, and what it appends in terms of `source`, the projection's output."""

    append: fx.Node
    source: fx.Node
    nodes: frozenset[fx.Node]
    norm: Norm
    weight: fx.Node
    rotation: Rotation
    angles: tuple[fx.Node, ...]
    """cos and sin, or one complex tensor."""


def fuse_norm_rope_append(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, everywhere: bool = False
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without appends that can be fused is left untouched.

    everywhere: also where the op has no kernel.
    """
    appends = [
        node
        for node in calls(gm.graph, append_op)
        if everywhere or first_serves(NORM_ROPE_APPEND, tensor_of(_cache(node)))
    ]
    if not appends:
        return gm
    search = _Search(gm.graph)
    superseded: set[fx.Node] = set()
    read_by_all: set[fx.Node] = set()
    for append in appends:
        name, found = where(append), search.match(append)
        if isinstance(found, str):
            log.info("not fused: %s: %s", name, found)
            continue
        read_by_all |= {*found.angles, op_arguments(append)["slot_mapping"]}
        _replace(found)
        superseded |= found.nodes
        log.info("fused: %s: RMSNorm with eps %g, %s", name, found.norm.eps, found.rotation)
    if superseded:
        erase(gm.graph, search.live, superseded)
    materialize(read_by_all)
    return gm


class _Search:
    """What the appends of one graph have in common: which nodes matter, and what was recognised before."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.live = live_nodes(graph)
        self.norms: dict[str, Norm | str] = {}
        self.rotations: dict[str, Rotation | str] = {}

    def match(self, append: fx.Node) -> _Match | str:
        """What is appended, or why it is not what the op computes."""
        reason = None
        for source in islice(_sources(append), _MOST_SOURCES):
            found = self._match(append, source)
            if isinstance(found, _Match):
                return found
            reason = reason or found
        return reason or "kv_c and k_pe are not two parts of one tensor"

    def _match(self, append: fx.Node, source: fx.Node) -> _Match | str:
        cones = [cut(source, part) for part in _parts(append)]
        nodes = frozenset(node for cone in cones for node in cone.nodes)
        norm = remembered(self.norms, cones[0], recognise_norm)
        if isinstance(norm, str):
            return f"kv_c is not the RMSNorm of the projection's first part: {norm}"
        rotation = remembered(self.rotations, cones[1], recognise_rotation)
        if isinstance(rotation, str):
            return f"k_pe is not the rotation of the projection's second part: {rotation}"
        user = self._other_user(append, source, nodes)
        if user is not None:
            return f"kv_c or k_pe is also used by `{user.name}`"
        (weight,), angles = cones[0].tensors, cones[1].tensors
        # What the cones were run to compute wrote to nothing.
        writer = writer_between(source, append, [source, *nodes, weight, *angles], nodes)
        if writer is not None:
            return f"`{writer.name}` writes in place between the projection and the append"
        ordered = reversed(angles) if rotation.sin_first else angles
        return _Match(append, source, nodes, norm, weight, rotation, tuple(ordered))

    def _other_user(self, append: fx.Node, source: fx.Node, nodes: frozenset[fx.Node]) -> fx.Node | None:
        """Who else needs something that is computed on the way. Views of the source cost nothing."""
        free = memory([source])
        for node in sorted(nodes):
            if memory([node]) <= free:
                continue
            for user in node.users:
                if user in self.live and user not in nodes and user is not append:
                    return user
        return None


def _cache(node: fx.Node) -> fx.Node:
    """The cache that an append is given."""
    cache: fx.Node = op_arguments(node)["kv_cache"]
    return cache


def _parts(append: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What is appended: normalised latents and rotated keys."""
    given = op_arguments(append)
    return given["kv_c"], given["k_pe"]


def _sources(append: fx.Node) -> Iterator[fx.Node]:
    """Tensors as wide as `kv_c` and `k_pe` together that both are made of, the nearest first."""
    parts = _parts(append)
    width = sum(tensor_of(part).shape[1] for part in parts)
    above = [{part} for part in parts]
    node = append.prev
    while node.op != "root":
        both = [nodes for nodes in above if node in nodes]
        if len(both) == 2 and is_tensor(node) and _last_is(tensor_of(node), width):
            yield node
        for nodes in both:
            nodes.update(node.all_input_nodes)
        node = node.prev


def _last_is(x: Tensor, width: int) -> bool:
    return x.dim() > 1 and statically_known_true(x.shape[-1] == width)  # it may depend on data


def _replace(match: _Match) -> None:
    rotation = match.rotation

    def append(source: Any, weight: Any, angles: Sequence[Any], kv_cache: Any, slot_mapping: Any) -> None:
        norm_rope_append_op(
            by_token(source),
            weight if len(weight.shape) == 1 else weight.flatten(),
            *cos_and_sin(angles),
            kv_cache,
            slot_mapping,
            match.norm.eps,
            rotation.interleaved_in,
            rotation.interleaved_out,
        )

    given = op_arguments(match.append)
    arguments = (match.source, match.weight, match.angles, given["kv_cache"], given["slot_mapping"])
    # The new node replaces one that needs no gradient, whatever the mode is now.
    with torch.no_grad():
        inline(match.append, append, arguments)
    match.append.graph.erase_node(match.append)
