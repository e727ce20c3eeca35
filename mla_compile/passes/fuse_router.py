"""Choose and weigh each token's experts in one call.

    before                                                                   after

    x ─> linear ─> sigmoid ─┬──────────────> gather ─> normalise ─┐          x ─> moe_router ─> moe_experts
                            └─> + bias ─> topk ───────────────────┴─> moe_experts

The choice is found by what it computes, not by how it is written: the operations between the scores' product and
`moe_experts` are cut out (`cone.py`), run on a few random logits, and compared with the formula
(`recognise_routing.py`). One of seven launches is left, and one node of fifteen.

Only where the op has a kernel: on the CPU, Inductor fuses most of the operations.

The log, `TORCH_LOGS="+mla_compile"`, says what was fused, and why every other router was not.
"""

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import fx

from mla_compile.ops.implementations import FLOATS, HALF, first_serves
from mla_compile.ops.moe import moe_experts_op
from mla_compile.ops.routing import MOE_ROUTER, moe_router_op
from mla_compile.passes.cone import cut
from mla_compile.passes.effects import erase, live_nodes, may_write, memory, writer_between
from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import argument, calls, is_tensor, op_arguments, tensor_of, torch_name
from mla_compile.passes.provenance import where
from mla_compile.passes.recognise_routing import ExpertChoice, recognise_routing

log = logging.getLogger(__name__)

_CASTS = ("to", "type", "float", "type_as")


@dataclass(frozen=True)
class _Match:
    """A router: `x` times `weight` are logits, of which `routing` makes `weights` and `ids`."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    routing: ExpertChoice
    weights: fx.Node
    ids: fx.Node
    nodes: frozenset[fx.Node]


def fuse_router(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, everywhere: bool = False
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without routers that can be fused is left untouched.

    everywhere: also where the op has no kernel.
    """
    layers = [node for node in calls(gm.graph, moe_experts_op) if everywhere or _has_kernel(node)]
    if not layers:
        return gm
    live = live_nodes(gm.graph)
    known: dict[tuple[str, str], ExpertChoice | str] = {}
    superseded: set[fx.Node] = set()
    for experts in layers:
        name, found = where(experts), _match(experts, live, known)
        if isinstance(found, str):
            log.info("not fused: %s: %s", name, found)
            continue
        _replace(found)
        superseded |= found.nodes
        log.info("fused: %s: %s", name, found.routing)
    if superseded:
        erase(gm.graph, live, superseded)
    return gm


def _has_kernel(experts: fx.Node) -> bool:
    """Whether the op has one where the experts of a call are, for as many."""
    given = op_arguments(experts)
    return first_serves(MOE_ROUTER, tensor_of(given["x"]), experts=tensor_of(given["w_down"]).shape[0])


def _match(
    experts: fx.Node, live: set[fx.Node], known: dict[tuple[str, str], ExpertChoice | str]
) -> _Match | str:
    """The router of a call of experts, or why there is none."""
    given = op_arguments(experts)
    (weights, _), ids = _before_casts(given["topk_weights"], HALF), given["topk_ids"]
    logits = _product_above(weights, ids)
    if logits is None:
        return "weights and ids are not made of one product"
    if tensor_of(logits).dtype != torch.float32 or tensor_of(logits).dim() != 2:
        return f"the scores are {tensor_of(logits).dtype}, {tensor_of(logits).dim()} dimensions"
    cones = cut(logits, weights, fills=True), cut(logits, ids, fills=True)
    key = cones[0].signature(), cones[1].signature()
    if key not in known:
        known[key] = recognise_routing(*cones)
    routing = known[key]
    if isinstance(routing, str):
        return routing
    nodes = frozenset(node for cone in cones for node in cone.nodes)
    (x, weight), casts = zip(*(_before_casts(factor, [torch.float32]) for factor in logits.args))
    (bias,) = {tensor for cone in cones for tensor in cone.tensors} or (None,)
    read = [node for node in (x, weight, logits, bias) if node is not None]
    writer = writer_between(min(x, logits), max(weights, ids), read, nodes)
    user = _user_of_what_is_filled(nodes, {weights, ids}, live)
    if writer is not None or user is not None:
        return f"`{(writer or user).name}` writes or reads on the way"  # type: ignore[union-attr]
    return _Match(x, weight, bias, routing, weights, ids, nodes.union({logits}, *casts))


def _before_casts(node: Any, result: Sequence[torch.dtype]) -> tuple[Any, set[fx.Node]]:
    """What a node is a cast of, to one of these dtypes from one that kernels take, and the nodes that cast."""
    casts = set()
    while (
        torch_name(node) in _CASTS
        and is_tensor(node.args[0])
        and tensor_of(node).dtype in result
        and tensor_of(node.args[0]).dtype in FLOATS
    ):
        casts.add(node)
        node = node.args[0]
    return node, casts


def _product_above(*results: fx.Node) -> fx.Node | None:
    """The last product with a weight, without a bias, of which all of these are made."""
    above = [{result} for result in results]
    node = max(results)
    while node.op != "root":
        both = [nodes for nodes in above if node in nodes]
        if len(both) == len(above) and torch_name(node) == "linear" and argument(node, 2, "bias") is None:
            return node if len(node.args) == 2 else None
        for nodes in both:
            nodes.update(node.all_input_nodes)
        node = node.prev
    return None


def _user_of_what_is_filled(
    nodes: frozenset[fx.Node], results: set[fx.Node], live: set[fx.Node]
) -> fx.Node | None:
    """Who else reads what some of the nodes write to: the writers are about to go."""
    filled = memory([target for node in nodes for target in may_write(node)])
    for node in sorted(nodes - results):
        if not filled.isdisjoint(memory([node])):
            for user in node.users:
                if user in live and user not in nodes:
                    return user
    return None


def _replace(match: _Match) -> None:
    def route(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        both = moe_router_op(x, weight, bias, *astuple(match.routing))
        return both[0], both[1]

    # The new nodes replace ones that need no gradient, whatever the mode is now.
    with torch.no_grad():
        both = inline(min(match.weights, match.ids), route, (match.x, match.weight, match.bias))
    for old, new in zip((match.weights, match.ids), both):
        old.replace_all_uses_with(new)
