"""Fuse a norm into the launch of the router's scores.

    before                                                            after

    x ────────┬─> fused_add_rms_norm ─┬─> moe_router            x ────────┬─> norm_router ─┬─> weights, ids
    residual ─┘                       ├─> moe_experts           residual ─┘                ├─> moe_experts
                                      └─> total                                            └─> total

For few tokens that is one launch fewer. For more tokens the op runs the same launches as before.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.ops.dispatch import first_serves
from mla_compile.ops.experts.norm_router import MAX_TOKENS, NORM_ROUTER, norm_router_op
from mla_compile.ops.experts.routing import moe_router_op
from mla_compile.ops.norm.rms_norm import add_rms_norm_op
from mla_compile.passes.effects import at_once
from mla_compile.passes.emit import inline, replace_results
from mla_compile.passes.nodes import call_of_result, is_call, op_arguments, tensor_of
from mla_compile.passes.rewrite import rewrite


def fuse_norm_router(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without such a router is left untouched."""

    def fuse(router: fx.Node) -> str | None:
        x, *of_router = op_arguments(router).values()
        weight, bias = of_router[:2]
        norm = call_of_result(x, 0, add_rms_norm_op)
        if norm is None or not _pays(x, weight):
            return None
        read = [weight] if bias is None else [weight, bias]
        if not max(read) < norm or not at_once(norm, router, [*read, x]):
            return None
        normed, total, weights, ids = inline(norm, _emit, (*op_arguments(norm).values(), *of_router))
        replace_results(norm, [normed, total])
        replace_results(router, [weights, ids])
        return "RMSNorm and router"

    rewrite(gm.graph, lambda node: is_call(node, moe_router_op), fuse)
    return gm


def _emit(*args: Any) -> Any:
    normed, total, weights, ids = norm_router_op(*args)
    return normed, total, weights, ids


def _pays(x: fx.Node, weight: fx.Node) -> bool:
    """Whether the op has a kernel for few tokens, and their number may be small."""
    tokens, (experts, hidden) = tensor_of(x).shape[0], tensor_of(weight).shape
    few = type(tokens) is not int or tokens <= MAX_TOKENS
    return few and first_serves(NORM_ROUTER, tensor_of(x), experts=experts, hidden=hidden)
