"""Let products by FP8 weights quantise their input to FP8 too, where that is faster.

    before                                  after

    x ─> fp8_linear ─> moe_experts          x ─> fp8_linear(fp8_activations=True) ─> moe_experts(fp8_activations=True)

It runs with `options={"fp8_activations": True}` only, after the passes that make or join these calls. The op decides in
each call: a call of few tokens keeps its input as it is.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from mla_compile.passes.nodes import namespace_of, op_arguments, with_arguments
from mla_compile.torch_internals import overload_of

FLAG = "fp8_activations"


def quantize_activations(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
    """Rewrite `gm` in place and return it."""
    for node in gm.graph.nodes:
        if namespace_of(overload_of(node.target)) == "mla_compile" and FLAG in op_arguments(node):
            node.args, node.kwargs = with_arguments(node, **{FLAG: True})
    return gm
