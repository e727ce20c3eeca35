"""Norm the tokens in the launch of the router's scores.

    before                                                            after

    x ────────┬─> fused_add_rms_norm ─┬─> moe_router            x ────────┬─> norm_router ─┬─> weights, ids
    residual ─┘                       ├─> moe_experts           residual ─┘                ├─> moe_experts
                                      └─> total                                            └─> total

For few tokens that is a launch less. For more the op is the launches that it was.
"""

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.implementations import first_serves
from mla_compile.ops.norm_router import NORM_ROUTER, norm_router_op
from mla_compile.ops.rms_norm import add_rms_norm_op
from mla_compile.ops.routing import moe_router_op
from mla_compile.passes.effects import at_once
from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import calls, is_call, is_view_of_rows, op_arguments, tensor_of, value_of
from mla_compile.passes.provenance import where

log = logging.getLogger(__name__)


def fuse_norm_router(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, everywhere: bool = False
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without such a router is left untouched.

    everywhere: also where the op has no kernel.
    """
    for router in calls(gm.graph, moe_router_op):
        x, weight, bias = list(op_arguments(router).values())[:3]
        norm = _norm_of(x)
        if norm is None or not (everywhere or _pays(x, weight)):
            continue
        read = [weight] if bias is None else [weight, bias]
        if max(read) < norm and at_once(norm, router, read):
            log.info("fused: %s: RMSNorm and router", where(router))
            _replace(norm, router)
    return gm


def _pays(x: fx.Node, weight: fx.Node) -> bool:
    """Whether the op has a kernel for few tokens."""
    experts, hidden = tensor_of(weight).shape
    return first_serves(NORM_ROUTER, tensor_of(x), experts=experts, hidden=hidden)


def _norm_of(x: fx.Node) -> fx.Node | None:
    """The norm whose rows `x` are."""
    while is_view_of_rows(x):
        x = x.args[0]  # type: ignore[assignment]
    before: Any = x.args[0] if x.args else None
    is_norm = x.target is operator.getitem and x.args[1] == 0 and is_call(before, add_rms_norm_op)
    return before if is_norm else None


def _replace(norm: fx.Node, router: fx.Node) -> None:
    _, *of_router = list(op_arguments(router).values())[:-1]  # who asks for bits of its own does so later

    def emit(*given: Any) -> Any:
        normed, total, weights, ids = norm_router_op(*given)
        return normed, total, weights, ids

    with torch.no_grad():  # neither needs a gradient, whatever the mode is now
        normed, total, weights, ids = inline(norm, emit, (*op_arguments(norm).values(), *of_router))
    for old, results in ((norm, [normed, total]), (router, [weights, ids])):
        for user in list(old.users):
            place: Any = user.args[1]
            result = results[place]
            result.meta["example_value"] = value_of(user)  # views of it must be seen to share memory
            user.replace_all_uses_with(result)
            user.graph.erase_node(user)
    router.graph.erase_node(router)
    norm.graph.erase_node(norm)
