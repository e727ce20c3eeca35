"""Replace the `topk` of a dimension of size 1 by what it is: the only element, and index 0.

    before                                                     after

    scores ─> topk(2) ─> sum ─> topk(1 of 1) ─> scatter ─┐     scores ─> topk(k)
       └──────────────────────────────────> masked_fill ─┴─> topk(k)

Routers of the DeepSeek kind choose groups of experts before experts. Where a model has one group, the first two of
their three `topk`, each a launch of its own, choose nothing. Without this one the scores of the groups are dead and
Inductor folds the mask of ones, so the pass does nothing about them.

The log, `TORCH_LOGS="+mla_compile"`, says which calls are gone.
"""

import logging
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import argument, arguments, tensor_of
from mla_compile.passes.provenance import where

log = logging.getLogger(__name__)


def drop_trivial_topk(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without such a `topk` is left untouched."""
    trivial = [node for node in gm.graph.nodes if _is_trivial(node)]
    for node in trivial:
        # Not the input itself: whoever gets the values may write to them. `topk` gives contiguous tensors.
        results = inline(node, _only_element, (argument(node, 0, "input"),))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            gm.graph.erase_node(user)
        for result in results:
            if not result.users:
                gm.graph.erase_node(result)
        gm.graph.erase_node(node)
        log.info("topk of one element dropped: %s", where(node))
    return gm


def _is_trivial(node: fx.Node) -> bool:
    """Whether a node is `topk(x, 1)` along a dimension of size 1, of which values and indices are taken one by one."""
    if node.target not in (torch.topk, "topk"):
        return False
    named = arguments(node, ("input", "k", "dim", "largest", "sorted"))
    if named is None:
        return False
    value = tensor_of(named["input"])
    one_by_one = all(user.target is operator.getitem and user.args[1] in (0, 1) for user in node.users)
    size = value.shape[named.get("dim", -1)] if value.dim() else None
    # A dynamic size compares with 1 only at the price of a guard.
    return one_by_one and type(named["k"]) is int and named["k"] == 1 and type(size) is int and size == 1


def _only_element(x: Tensor) -> tuple[Tensor, Tensor]:
    """The values and indices of `topk(x, 1)` along a dimension of size 1."""
    contiguous = torch.contiguous_format
    return torch.clone(x, memory_format=contiguous), torch.zeros_like(
        x, dtype=torch.int64, memory_format=contiguous
    )
