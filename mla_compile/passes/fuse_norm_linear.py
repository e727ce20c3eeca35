"""Fuse a norm into the launch of the product that is its only reader.

    before                                                   after

    x ────────┬─> fused_add_rms_norm ─┬─> fused_linear       x ────────┬─> norm_linear ─┬─> product
    residual ─┘                       └─> total              residual ─┘                └─> total

For one or two tokens the op is one launch, for more it is the same two as before. The pass also fuses norms without an
addition. A norm with other readers stays, such as a router and experts. Products by FP8 weights stay too: one token
takes as long with the fused norm.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.ops.dispatch import first_serves
from mla_compile.ops.linear.matmul import fused_linear_op
from mla_compile.ops.linear.norm_linear import MAX_TOKENS, NORM_LINEAR, norm_linear_op
from mla_compile.ops.norm.rms_norm import add_rms_norm_op, rms_norm_op
from mla_compile.passes.effects import at_once
from mla_compile.passes.emit import inline, replace_results
from mla_compile.passes.nodes import call_of_result, is_call, op_arguments, tensor_of
from mla_compile.passes.rewrite import rewrite


def fuse_norm_linear(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without such a product is left untouched."""

    def fuse(product: fx.Node) -> str | None:
        norm, of_product = _norm_of(product), op_arguments(product)
        if norm is None or not _pays(norm):
            return None
        weights = of_product["first"], of_product["second"]
        read = [weight for weight in weights if weight is not None]
        if not max(read) < norm or not at_once(norm, product, read):
            return None
        given = op_arguments(norm)
        args = (given["x"], given.get("residual"), given["weight"], given["eps"], *weights)
        result, total = inline(norm, _emit, (*args, of_product["batch_invariant"]))
        product.replace_all_uses_with(result)
        if not is_call(norm, rms_norm_op):
            replace_results(norm, [None, total])
        return "RMSNorm and the product that reads it"

    rewrite(gm.graph, lambda node: is_call(node, fused_linear_op), fuse)
    return gm


def _emit(*args: Any) -> Any:
    result, total = norm_linear_op(*args)
    return result, total


def _pays(norm: fx.Node) -> bool:
    """Whether the op has a kernel for few tokens, and their number may be small."""
    x = tensor_of(op_arguments(norm)["x"])
    tokens = x.shape[0]
    few = type(tokens) is not int or tokens <= MAX_TOKENS
    return few and first_serves(NORM_LINEAR, x)


def _norm_of(product: fx.Node) -> fx.Node | None:
    """The norm whose only reader is this product; None if there is none."""
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
