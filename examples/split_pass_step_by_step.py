"""The graph of one attention call before the passes and after the split.

    python examples/split_pass_step_by_step.py

Read it beside `passes/split_prefill_decode.py`: the program runs the passes one by one, as `backend="mla"` does before
it passes the graph to Inductor.
"""

import re

import torch
from torch import Tensor, fx, nn

import mla_compile
from mla_compile import MLABatch, decode_segment, mla_attention

HIDDEN, HEADS, NOPE, ROPE, RANK, V = 12, 2, 4, 2, 8, 4


class TinyLayer(nn.Module):
    """Three projections and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_proj = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.o_proj = nn.Linear(HEADS * V, HIDDEN, bias=False)
        self.register_buffer("kv_cache", torch.zeros(10, 4, RANK + ROPE))
        self.register_buffer("w_uk", torch.randn(HEADS, NOPE, RANK))
        self.register_buffer("w_uv", torch.randn(HEADS, RANK, V))

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        q_nope, q_pe = self.q_proj(x).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = self.kv_proj(x).split([RANK, ROPE], dim=-1)
        out = mla_attention(q_nope, q_pe, kv_c, k_pe, self.kv_cache, self.w_uk, self.w_uv, batch, 0.4)
        return self.o_proj(out.flatten(1))


# Dynamo calls its inputs l_args_0_ and l_function_modules_q_proj_parameters_weight_: shorter is easier to read.
LONG = re.compile(r"^l_(function|args_1)_(modules_|buffers_)?|_parameters|_$")
INPUTS = {"l_args_0_": "x"}

COMMENTS = {
    "captured": "What Dynamo sees: one opaque op. It attends, and writes kv_cache.",
    "split_prefill_decode": (
        "The op is expanded: append the latents, move the queries into the latent space (times w_uk), attend\n"
        "there, and come back (times w_uv). No row is a prompt, so nothing of prefill is built."
    ),
}


def show(graph: fx.Graph) -> None:
    """Every call with the shape of its result."""
    for node in graph.nodes:
        if not node.op.startswith("call_"):
            continue
        value = node.meta["example_value"]
        value = value[0] if isinstance(value, tuple) else value
        shape = "" if value is None or not isinstance(value, Tensor) else str(list(value.shape))
        name = (
            node.target
            if isinstance(node.target, str)
            else getattr(node.target, "__name__", str(node.target))
        )
        inputs = ", ".join(INPUTS.get(n.name, LONG.sub("", n.name)) for n in node.all_input_nodes)
        print(f"    {shape:12} {node.name:20} = {name.removesuffix('.default')}({inputs})")


def main() -> None:
    torch.manual_seed(0)
    layer = TinyLayer().requires_grad_(False)
    # Three rows with 5 cached tokens each that verify 3 drafts: 4 tokens a row. That is decode, however long.
    table = 1 + torch.arange(9, dtype=torch.int32).view(3, 3)
    batch, _ = decode_segment(torch.full((3,), 5, dtype=torch.int32), table, q_len=4, page_size=4)
    x = torch.randn(12, HIDDEN)

    explanation = mla_compile.explain(layer, x, MLABatch(decode=batch))
    for name, gm in explanation.graphs.items():
        print(f"\n{name}\n{COMMENTS[name]}\n")
        show(gm.graph)
    print(f"\nThe same in short, as `print(mla_compile.explain(...))` has it:\n\n{explanation}")


if __name__ == "__main__":
    main()
