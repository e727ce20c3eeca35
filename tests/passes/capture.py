"""A backend that keeps the graphs before and after the passes, and a small model to compile with it."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.decorators import mark_unbacked

from mla_compile import MLABatch, decode_segment, mla_attention, prefill_segment
from mla_compile.explanation.explain import copy_graph
from mla_compile.passes import PASSES, pipeline
from mla_compile.passes.nodes import op_name

HEADS, NOPE, ROPE, RANK, V, HIDDEN = 3, 6, 4, 16, 5, 12
PAGE_SIZE, PAGES_PER_ROW, MAX_ROWS = 4, 4, 12


class Capture:
    """`torch.compile(model, backend=Capture())`: records every graph, runs the passes, and calls AOTAutograd
    without Inductor, which takes a fraction of the time and still checks aliasing and metadata."""

    def __init__(self, passes: Sequence[pipeline.Pass] = tuple(PASSES)) -> None:
        self.passes = passes
        self.before: list[fx.GraphModule] = []
        self.after: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before.append(copy_graph(gm))
        gm = pipeline.run(gm, example_inputs, self.passes)
        self.after.append(copy_graph(gm))
        return lookup_backend("aot_eager")(gm, list(example_inputs))


def ops(gm: fx.GraphModule) -> list[str]:
    """Names of the called ops, in order."""
    return [op_name(node) for node in gm.graph.nodes if node.op.startswith("call_")]


def counts(gm: fx.GraphModule) -> dict[str, int]:
    """How many of each of our attention ops, `cat` and `split` a graph has."""
    found = Counter(ops(gm))
    return {name: n for name, n in found.items() if name.startswith("mla_") or name in ("cat", "split")}


def nodes_of(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op.startswith("call_") and op_name(node) == name]


def shape(node: Any) -> tuple[int | str, ...]:
    """Of a node's value, the first one of a tuple; symbolic sizes as text, since comparing them would add guards."""
    value = node.meta["example_value"]
    sizes = (value[0] if isinstance(value, tuple) else value).shape
    return tuple(size if isinstance(size, int) else str(size) for size in sizes)


def compiled_graph(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """The graph after the passes, which was run and gave what `function` gives eagerly."""
    capture = Capture()
    mine, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    out = torch.compile(copy.deepcopy(function), backend=capture, fullgraph=True)(*mine)
    torch.testing.assert_close(out, copy.deepcopy(function)(*theirs))
    torch.testing.assert_close(mine[0], theirs[0], msg="what is written in place differs")
    return capture.after[0]


def compared(
    model: nn.Module, batch: dict[str, Any], dtype: torch.dtype, passes: Sequence[pipeline.Pass]
) -> fx.GraphModule:
    """The graph after the passes, whose results and caches are those of the model run eagerly."""
    x, metadata = make_inputs(**batch)
    x, expected, capture = x.to(dtype), copy.deepcopy(model), Capture(passes)
    out = torch.compile(model, backend=capture, fullgraph=True)(x, metadata)
    tolerance = {"rtol": 1e-2, "atol": 4e-2} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, expected(x, metadata), **tolerance)
    for mine, theirs in zip(model.buffers(), expected.buffers()):
        torch.testing.assert_close(mine, theirs, **tolerance)
    return capture.after[0]


class Layer(nn.Module):
    """Attention with projections and a cache of its own, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE))
        self.kv_proj = nn.Linear(HIDDEN, RANK + ROPE)
        self.o_proj = nn.Linear(HEADS * V, HIDDEN)
        self.register_buffer("kv_cache", torch.randn(1 + MAX_ROWS * PAGES_PER_ROW, PAGE_SIZE, RANK + ROPE))
        self.register_buffer("w_uk", torch.randn(HEADS, NOPE, RANK) / 3)
        self.register_buffer("w_uv", torch.randn(HEADS, RANK, V) / 3)

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        q_nope, q_pe = self.q_proj(x).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = self.kv_proj(x).split([RANK, ROPE], dim=-1)
        out = mla_attention(q_nope, q_pe, kv_c, k_pe, self.kv_cache, self.w_uk, self.w_uv, batch, 0.3)
        return x + self.o_proj(out.flatten(1))


class Stack(nn.Module):
    """Layers, and no plain cat or split along tokens but those of the passes."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers)).requires_grad_(False)

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        for layer in self.layers:
            x = layer(x, batch)
        return x


def make_inputs(
    rows: int = 0,
    q_len: int = 1,
    chunks: Sequence[int] = (),
    *,
    q_lens: list[int] | None = None,
    unbacked: bool = False,
) -> tuple[Tensor, MLABatch]:
    """Hidden states and batch: `rows` decode rows that hold 5 tokens, and prompt chunks after 2 tokens each.

    unbacked: mark every size that varies between batches as unknown to the compiler.
    """
    table = (1 + torch.randperm(MAX_ROWS * PAGES_PER_ROW)).to(torch.int32).view(MAX_ROWS, -1)
    decode = prefill = None
    if rows:
        valid = None if q_lens is None else torch.tensor(q_lens, dtype=torch.int32)
        cached = torch.full((rows,), 5, dtype=torch.int32)
        decode, _ = decode_segment(
            cached, table[:rows].clone(), q_len=q_len, page_size=PAGE_SIZE, q_lens=valid
        )
    if chunks:
        own = table[rows : rows + len(chunks)].clone()
        prefill, _ = prefill_segment(list(chunks), [2] * len(chunks), own, page_size=PAGE_SIZE)
    x = torch.randn(rows * q_len + sum(chunks), HIDDEN)
    if unbacked:
        mark_unbacked(x, 0)
        for segment in filter(None, (decode, prefill)):
            for tensor in vars(segment).values():
                if isinstance(tensor, Tensor):
                    mark_unbacked(tensor, 0)
        if prefill is not None:
            mark_unbacked(prefill.key_slots, 1)
            mark_unbacked(prefill.cu_seqlens_k, 1)
    return x, MLABatch(decode, prefill)
