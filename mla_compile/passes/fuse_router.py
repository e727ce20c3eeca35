"""Fuse the choice and the weights of each token's experts into one op.

    before                                                                   after

    x ─> linear ─> sigmoid ─┬──────────────> gather ─> normalise ─┐          x ─> moe_router ─> moe_experts
                            └─> + bias ─> topk ───────────────────┴─> moe_experts

The pass recognises the choice by what it computes, in any spelling. It cuts out the operations between the scores'
product and `moe_experts` (`cone.py`), runs them on a few random logits, and compares the results with the formula
(`recognise.py`). One of seven launches is left, and one node of fifteen.

The op must have a kernel: on the CPU, Inductor fuses most of the operations.

`TORCH_LOGS="+mla_compile"` logs each fusion, and the reason for each router that was not fused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.dispatch import FLOATS, HALF, first_serves
from mla_compile.ops.experts.moe import moe_experts_op
from mla_compile.ops.experts.routing import MOE_ROUTER, moe_router_op
from mla_compile.passes import recognise
from mla_compile.passes.cone import Recognition, cut, made_of_both
from mla_compile.passes.effects import may_write, memory, writer_between
from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import argument, is_call, is_tensor, op_arguments, tensor_of, torch_name
from mla_compile.passes.rewrite import Refusal, rewrite

_CASTS = ("to", "type", "float", "type_as")


def fuse_router(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without routers that can be fused is left untouched."""
    known = Recognition()
    rewrite(
        gm.graph,
        lambda node: is_call(node, moe_experts_op) and _pays(node),
        lambda experts: _fuse(experts, known),
    )
    return gm


def _pays(experts: fx.Node) -> bool:
    """Whether the op has a kernel for the device and the number of experts of a call."""
    given = op_arguments(experts)
    return first_serves(MOE_ROUTER, tensor_of(given["x"]), experts=tensor_of(given["w_down"]).shape[0])


def _fuse(experts: fx.Node, known: Recognition) -> recognise.ExpertChoice:
    """Replace the router of a call of experts with the op."""
    given = op_arguments(experts)
    weights, ids = _before_casts(given["topk_weights"], HALF), given["topk_ids"]
    logits = _product_above(weights, ids)
    if tensor_of(logits).dtype != torch.float32 or tensor_of(logits).dim() != 2:
        raise Refusal(f"the scores are {tensor_of(logits).dtype}, {tensor_of(logits).dim()} dimensions")
    cones = cut(logits, weights, fills=True), cut(logits, ids, fills=True)
    routing = known.of(recognise.routing, *cones)
    nodes = {node for cone in cones for node in cone.nodes}
    x, weight = (_before_casts(factor, [torch.float32]) for factor in logits.args)
    (bias,) = {tensor for cone in cones for tensor in cone.tensors} or (None,)
    read = [node for node in (x, weight, logits, bias) if node is not None]
    writer = writer_between(min(x, logits), max(weights, ids), read, nodes)
    user = writer or _user_of_what_is_filled(nodes, {weights, ids})
    if user is not None:
        raise Refusal(f"`{user.name}` writes to or reads tensors of the router in between")

    def route(x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
        both = moe_router_op(x, weight, bias, *routing)
        return both[0], both[1]

    for old, new in zip((weights, ids), inline(min(weights, ids), route, (x, weight, bias))):
        old.replace_all_uses_with(new)
    return routing


def _before_casts(node: Any, result: Sequence[torch.dtype]) -> Any:
    """The source of a cast to one of these dtypes from a dtype that kernels accept; the node itself if it is none."""
    while (
        torch_name(node) in _CASTS
        and is_tensor(node.args[0])
        and tensor_of(node).dtype in result
        and tensor_of(node.args[0]).dtype in FLOATS
    ):
        node = node.args[0]
    return node


def _product_above(*results: fx.Node) -> fx.Node:
    """The last product with a weight, without a bias, on which all of these depend."""
    for node in made_of_both(results):
        if torch_name(node) == "linear" and argument(node, 2, "bias") is None and len(node.args) == 2:
            return node
    raise Refusal("weights and ids do not depend on one product")


def _user_of_what_is_filled(nodes: set[fx.Node], results: set[fx.Node]) -> fx.Node | None:
    """A node outside `nodes` that reads memory to which some of these write: the pass removes the writers."""
    filled = memory([target for node in nodes for target in may_write(node)])
    for node in sorted(nodes - results):
        if not filled.isdisjoint(memory([node])):
            for user in node.users:
                if user not in nodes:
                    return user
    return None
