"""The passes of the `mla` backend, in order. Each is `name(gm, example_inputs) -> gm`, in a file of its own."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from mla_compile.passes.absorb_mla import absorb_mla
from mla_compile.passes.drop_trivial_topk import drop_trivial_topk
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.passes.hoist_row_gather import hoist_row_gather
from mla_compile.passes.split_prefill_decode import split_prefill_decode

Pass = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]

PASSES: list[Pass] = [
    absorb_mla,  # first: it reads the graph as the user wrote it
    split_prefill_decode,
    hoist_row_gather,  # after the split: it reduces decode segments too
    fuse_norm_rope_append,  # after the split, which makes appends
    drop_trivial_topk,  # after the gathers: they climb over `topk`, not over what it becomes
]


def default_passes(gm: fx.GraphModule) -> Sequence[Pass]:
    """`PASSES` for a graph with an op of ours; any other graph is searched for MLA written without it, and no more."""
    ours = any(getattr(node.target, "namespace", "") == "mla_compile" for node in gm.graph.nodes)
    return PASSES if ours else (absorb_mla,)


def run(
    gm: fx.GraphModule, example_inputs: Sequence[Any], passes: Sequence[Pass] | None = None
) -> fx.GraphModule:
    """Run `passes` on a Dynamo graph, in place; by default those of `default_passes`."""
    for graph_pass in default_passes(gm) if passes is None else passes:
        gm = graph_pass(gm, example_inputs)
    return gm
