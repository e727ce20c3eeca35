"""Split every unified MLA call, and every selection of keys, into a decode segment and a prefill segment.

    before                            after

    q, kv ──> mla_attention ──> o     kv ──> mla_append ──> (cache)
                                      q ──> split ─┬─> absorb (w_uk) ──> mla_decode ──> w_uv ──┐
                                                   └─> cat ──> mla_prefill (w_uk, w_uv) <──────┘ ──> o

A segment that the batch lacks (its metadata is None) is not built, and then there is no split. `mla_prefill` writes its
result behind that of the decode rows, as joining two results would copy both. Both segments share one append, one query
projection and one `o_proj`. Absorbing and up-projecting are `matmul_by_head`. `rotate_queries` removes the cat of
queries if their parts are adjacent in memory.

Attention over selected keys is one op for both segments.

The new nodes are those of `lower_mla_attention` and `lower_select_keys`, which eager calls run.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.ops.attention.mla_attention import attention_op, lower_mla_attention
from mla_compile.ops.attention.mla_select_keys import lower_select_keys, select_keys_op
from mla_compile.passes.emit import inline
from mla_compile.passes.nodes import calls, is_call, op_arguments


def split_prefill_decode(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it; a graph without `mla_attention` is left untouched."""
    shared: dict[Any, fx.Node] = {}
    for node in calls(gm.graph, attention_op, select_keys_op):
        lower = lower_mla_attention if is_call(node, attention_op) else lower_select_keys
        arguments = tuple(op_arguments(node).values())
        node.replace_all_uses_with(inline(node, lower, arguments, shared))
        gm.graph.erase_node(node)
    return gm
