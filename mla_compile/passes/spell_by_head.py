"""Spell products by head as what they are computed with.

    before                                       after

    x, w ──> einsum("thk,hkn->thn") ──> o        x ──> transpose ─┬─> bmm ──> transpose ──> o
                                                 w ───────────────┘

Torch takes an einsum apart whenever a graph is traced, into eleven operations, of which most are views that do nothing.
Each asks for sizes that are symbols, so the two einsums of a layer took a twentieth of the time that Python spends on
compiling it. The other passes see the einsum: its rows are dimension 0 before and after, as nowhere else on the way.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.passes.emit import inline, product_by_head
from mla_compile.passes.nodes import calls, is_by_head


def spell_by_head(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; the last pass of all, which finds the others' einsums."""
    for node in calls(gm.graph, torch.einsum):
        if is_by_head(node):
            node.replace_all_uses_with(inline(node, product_by_head, node.args[1:]))
            gm.graph.erase_node(node)
    return gm
