"""Let products by FP8 weights quantise their input to FP8 too, where that is faster.

    before                                  after

    x ─> fp8_linear ─> moe_experts          x ─> fp8_linear(fp8_activations=True) ─> moe_experts(fp8_activations=True)

It runs with `options={"fp8_activations": True}` only, after the passes that make or join these calls. The op decides in
each call: a call of few tokens keeps its input as it is.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.passes.nodes import namespace_of, with_arguments
from mla_compile.torch_internals import overload_of, schema_arguments

FLAG = "fp8_activations"


def quantize_activations(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it."""
    for node in gm.graph.nodes:
        target = overload_of(node.target)
        if namespace_of(target) == "mla_compile" and any(a.name == FLAG for a in schema_arguments(target)):
            node.args, node.kwargs = with_arguments(node, **{FLAG: True})
    return gm
