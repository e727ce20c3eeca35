"""Spell products by head as what they are computed with.

    before                                       after, on a GPU

    x, w ──> einsum("thk,hkn->thn") ──> o        x, w ──> matmul_by_head ──> o

                                                 after, on the CPU

                                                 x ──> transpose ─┬─> bmm ──> transpose ──> o
                                                 w ───────────────┘

Torch takes an einsum apart whenever a graph is traced, into eleven operations, of which most are views that do nothing.
Each asks for sizes that are symbols, so the two einsums of a layer took a twentieth of the time that Python spends on
compiling it. The other passes see the einsum: its rows are dimension 0 before and after, as nowhere else on the way.

What comes after attention reads a token's heads side by side, and `bmm` has heads first: Inductor would copy them in a
launch of its own. `matmul_by_head` writes them where they are read, and has a kernel for few tokens, of use to queries
too. Only on GPUs: on the CPU Inductor fuses the copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.ops.matmul import matmul_by_head_op
from mla_compile.passes.emit import fake_mode_of, inline, product_by_head, set_example_value
from mla_compile.passes.nodes import calls, is_by_head, tensor_of
from mla_compile.passes.strides import views_of
from mla_compile.torch_internals import is_wrapper


def spell_by_head(
    gm: fx.GraphModule, example_inputs: Sequence[Any] = (), *, everywhere: bool = False
) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; the last pass of all, which finds the others' einsums.

    everywhere: as on a GPU.
    """
    for node in calls(gm.graph, torch.einsum):
        if is_by_head(node):
            if not ((everywhere or tensor_of(node).is_cuda) and _written_by_token(node)):
                node.replace_all_uses_with(inline(node, product_by_head, node.args[1:]))
            gm.graph.erase_node(node)
    return gm


def _written_by_token(node: fx.Node) -> bool:
    """Put `matmul_by_head` in the place of an einsum, where nobody counts on heads that come first in memory."""
    operands: Any = node.args[1:]
    (x, w), value = operands, tensor_of(node)
    plain = not value.requires_grad and value.dtype == tensor_of(x).dtype == tensor_of(w).dtype  # autocast
    if not plain or is_wrapper(tensor_of(w)):
        return False
    with torch.no_grad():  # it needs no gradient, whatever the mode is now
        views = views_of(node, value.new_empty(value.shape))
        if isinstance(views, fx.Node):
            return False
        node.replace_all_uses_with(inline(node, matmul_by_head_op, (x, w)))
        for view in views:
            set_example_value(view, fake_mode_of(view))
    return True
