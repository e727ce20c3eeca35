"""Add a pass of your own to the backend's: here, one that bounds the queries of decode segments.

    python examples/add_a_pass.py

A pass takes Dynamo's graph and its fake inputs and returns the graph. It only rewrites nodes: the backend computes the
example values of new nodes, checks the graph and generates its code. This pass runs after the split, where decode and
prefill segments are separate ops amid plain torch calls. It changes decoding and leaves prompts alone, which the code
of the model cannot, because there both are one call.

`TORCH_LOGS="+mla_compile"` logs the changes and the time of each pass. `mla_compile.explain(model, *args,
passes=[*PASSES, clamp_decode_queries])` shows it without compiling.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from own_module import Model, batches
from torch import fx

from mla_compile.passes import PASSES
from mla_compile.passes.nodes import calls, op_arguments, with_arguments

BOUND = 2.0
DECODE = torch.ops.mla_compile.mla_decode.default


def clamp_decode_queries(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """q_latent ──> mla_decode   becomes   q_latent ──> clamp ──> mla_decode"""
    nodes = calls(gm.graph, DECODE)
    for node in nodes:
        query = op_arguments(node)["q_latent"]
        with gm.graph.inserting_before(node):
            clamped = gm.graph.call_function(torch.clamp, (query, -BOUND, BOUND))
        node.args, node.kwargs = with_arguments(node, q_latent=clamped)
    print(f"clamp_decode_queries: {len(nodes)} decode segments")
    return gm


def main(num_layers: int = 2) -> None:
    torch.manual_seed(0)
    model = Model(num_layers).requires_grad_(False)
    for layer in model.layers:
        layer.q_proj.weight.mul_(10)  # large queries, so that the bound matters
    options = {"passes": [*PASSES, clamp_decode_queries]}
    compiled = torch.compile(model, backend="mla", fullgraph=True, options=options)
    for what, packed in islice(batches(), 3):  # a prompt, a row that decodes, both at once
        args = *packed.tensors, packed.positions, packed.batch
        changed = float((compiled(*args) - model(*args))[packed.order].abs().max())
        print(f"{what}: the pass changes the result by up to {changed:.2f}")


if __name__ == "__main__":
    main()
