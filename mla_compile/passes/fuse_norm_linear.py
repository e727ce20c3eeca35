"""Norm the tokens in the launch of the product that alone reads them.

    before                                                   after

    x ────────┬─> fused_add_rms_norm ─┬─> fused_linear       x ────────┬─> norm_linear ─┬─> product
    residual ─┘                       └─> total              residual ─┘                └─> total

For one or two tokens the op is one launch, for more it is the two that it was. Norms without an addition, and products
by FP8 weights, likewise. A norm that others read too, as a router and experts do, stays.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.fp8_linear import fp8_linear_op
from mla_compile.ops.implementations import first_serves
from mla_compile.ops.matmul import fused_linear_op
from mla_compile.ops.norm_linear import MOST_TOKENS, NORM_LINEAR, norm_linear_op
from mla_compile.ops.rms_norm import add_rms_norm_op, rms_norm_op
from mla_compile.passes.effects import at_once
from mla_compile.passes.emit import inline, replace_results
from mla_compile.passes.nodes import call_of_result, calls, is_call, op_arguments, tensor_of
from mla_compile.passes.provenance import where

log = logging.getLogger(__name__)


def fuse_norm_linear(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, everywhere: bool = False
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without such a product is left untouched.

    everywhere: also where the op has no kernel.
    """
    for product in calls(gm.graph, fused_linear_op, fp8_linear_op):
        norm = _norm_of(product)
        if norm is not None and (everywhere or _pays(norm)):
            weights = [value for value in _weights(product) if value is not None]
            if max(weights) < norm and at_once(norm, product, weights):
                log.info("fused: %s: RMSNorm and the product in %s", where(norm), where(product))
                _replace(norm, product)
    return gm


def _pays(norm: fx.Node) -> bool:
    """Whether the op has a kernel for few tokens, and there may be few."""
    x = tensor_of(op_arguments(norm)["x"])
    tokens = x.shape[0]
    few = type(tokens) is not int or tokens <= MOST_TOKENS
    return few and first_serves(NORM_LINEAR, x)


def _weights(product: fx.Node) -> list[fx.Node | None]:
    given = op_arguments(product)
    return [given.get(name) for name in ("first", "first_scale", "second", "second_scale")]


def _norm_of(product: fx.Node) -> fx.Node | None:
    """The norm whose rows a product alone reads; None where there is none."""
    normed: Any = op_arguments(product)["x"]
    if list(normed.users) != [product]:
        return None
    norm: fx.Node | None = normed
    if not is_call(normed, rms_norm_op):
        norm = call_of_result(normed, 0, add_rms_norm_op)
        others = [] if norm is None else [user for user in norm.users if user is not normed]
        if any(user.args[1] != 1 for user in others):
            return None
    return norm


def _replace(norm: fx.Node, product: fx.Node) -> None:
    given = op_arguments(norm)
    args = (given["x"], given.get("residual"), given["weight"], given["eps"], *_weights(product))
    args += (op_arguments(product)["batch_invariant"],)

    def emit(*given: Any) -> Any:
        result, total = norm_linear_op(*given)
        return result, total

    with torch.no_grad():  # neither needs a gradient, whatever the mode is now
        result, total = inline(norm, emit, args)
    product.replace_all_uses_with(result)
    product.graph.erase_node(product)
    if is_call(norm, rms_norm_op):
        norm.graph.erase_node(norm)
    else:
        replace_results(norm, [None, total])
