"""Sum the parts of a model's ranks in the launch that adds the residual and computes the norm.

    before                                              after

    linear ─> all_reduce ─┐                             linear ───┐
                          ├─> fused_add_rms_norm        residual ─┴─> all_reduce_add_rms_norm ─┬─> normed
    residual ─────────────┘    ├─> normed                                                      └─> total
                               └─> total

The norm must be the only reader of the sum of the parts. A sum that is added to a residual without a norm stays.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.ops.collectives.collectives import all_reduce_op
from mla_compile.ops.norm.rms_norm import add_rms_norm_op, all_reduce_add_rms_norm_op
from mla_compile.passes.effects import at_once
from mla_compile.passes.emit import inline, replace_uses
from mla_compile.passes.nodes import is_call, op_arguments
from mla_compile.passes.rewrite import rewrite


def fuse_all_reduce(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without a sum that can be fused is left untouched."""
    rewrite(gm.graph, lambda node: is_call(node, add_rms_norm_op), _fuse)
    return gm


def _fuse(norm: fx.Node) -> str | None:
    x, residual, weight, eps = op_arguments(norm).values()
    if _is_for(norm, x):
        total, other = x, residual
    elif _is_for(norm, residual):  # x + residual is residual + x
        total, other = residual, x
    else:
        return None
    parts = op_arguments(total)["x"]
    replace_uses(norm, inline(norm, all_reduce_add_rms_norm_op, (parts, other, weight, eps)))
    return "all_reduce, + and RMSNorm"


def _is_for(norm: fx.Node, total: fx.Node) -> bool:
    """Whether a node is an all-reduce that only this norm reads, and can be computed at its place."""
    if not is_call(total, all_reduce_op) or list(total.users) != [norm] or norm.args.count(total) != 1:
        return False
    return at_once(total, norm, [op_arguments(total)["x"]])
