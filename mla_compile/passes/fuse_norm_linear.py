"""Norm the tokens in the launch of the product that alone reads them.

    before                                                   after

    x ────────┬─> fused_add_rms_norm ─┬─> fused_linear       x ────────┬─> norm_linear ─┬─> product
    residual ─┘                       └─> total              residual ─┘                └─> total

For one or two tokens the op is one launch, for more it is the two that it was. Norms without an addition, and products
by FP8 weights, likewise. A norm that others read too, as a router and experts do, stays.
"""

import logging
import operator
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
from mla_compile.passes.nodes import (
    calls,
    is_call,
    op_arguments,
    rows_viewed,
    tensor_of,
    torch_name,
)
from mla_compile.passes.provenance import where

log = logging.getLogger(__name__)


def fuse_norm_linear(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, everywhere: bool = False
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without such a product is left untouched.

    everywhere: also where the op has no kernel.
    """
    for product in calls(gm.graph, fused_linear_op, fp8_linear_op):
        steps = _steps_of_norm(product)
        if steps and (everywhere or _pays(steps[0])):
            norm, weights = steps[-1], [value for value in _weights(product) if value is not None]
            if max(weights) < norm and at_once(norm, product, weights):
                log.info("fused: %s: RMSNorm and the product in %s", where(norm), where(product))
                _replace(product, steps)
    return gm


def _pays(x: fx.Node) -> bool:
    """Whether the op has a kernel for few tokens, and there may be few."""
    tokens = tensor_of(x).shape[0]
    few = type(tokens) is not int or tokens <= MOST_TOKENS
    return few and first_serves(NORM_LINEAR, tensor_of(x))


def _weights(product: fx.Node) -> list[fx.Node | None]:
    given = op_arguments(product)
    return [given.get(name) for name in ("first", "first_scale", "second", "second_scale")]


def _steps_of_norm(product: fx.Node) -> list[fx.Node]:
    """From what a product is of, back to the norm that gives it: nodes that are there for the product alone. Empty for
    a product of something else."""
    steps: list[fx.Node] = []
    node: fx.Node | None = op_arguments(product)["x"]
    reader = product
    while node is not None and _users(node) == [reader]:
        steps.append(node)
        if is_call(node, rms_norm_op):
            return steps
        norm: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and node.args[1] == 0 and is_call(norm, add_rms_norm_op):
            others = (user for user in norm.users if user is not node)
            return [*steps, norm] if all(user.args[1] == 1 for user in others) else []
        reader = node
        node = rows_viewed(reader)
    return []


def _users(node: fx.Node) -> list[fx.Node]:
    """Without those that ask for a size which nobody uses, or which is known without the node."""
    return [user for user in node.users if not _is_size(user) or (user.users and _size(user) is None)]


def _is_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


def _size(node: fx.Node) -> fx.Node | None:
    """The size that a node asks for, where what it asks was given that size."""
    shaped, dim = node.args
    assert isinstance(shaped, fx.Node) and isinstance(dim, int)
    if torch_name(shaped) not in ("reshape", "view") or len(shaped.args) < 2:
        return None
    given: Any = shaped.args[1] if isinstance(shaped.args[1], (tuple, list)) else shaped.args[1:]
    return given[dim] if isinstance(given[dim], fx.Node) else None


def _replace(product: fx.Node, steps: list[fx.Node]) -> None:
    norm = steps[-1]
    given = op_arguments(norm)
    args = (given["x"], given.get("residual"), given["weight"], given["eps"], *_weights(product))
    args += (op_arguments(product)["batch_invariant"],)

    def emit(*given: Any) -> Any:
        result, total = norm_linear_op(*given)
        return result, total

    with torch.no_grad():  # neither needs a gradient, whatever the mode is now
        result, total = inline(norm, emit, args)
    product.replace_all_uses_with(result)
    for node in (product, *steps):
        for size in filter(_is_size, list(node.users)):
            known = _size(size)
            if known is not None:
                size.replace_all_uses_with(known)
            node.graph.erase_node(size)
        if node is not norm:
            node.graph.erase_node(node)
    replace_results(norm, [None, total])
