"""What the suites of the passes share: a backend that keeps graphs, checks of a pass, small models, batches."""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.decorators import mark_unbacked

from mla_compile import MLABatch, decode_segment, mla_attention, prefill_segment
from mla_compile.ops.attention.norm_rope import rms_norm
from mla_compile.passes import PASSES, pipeline
from mla_compile.passes.effects import memory
from mla_compile.passes.nodes import op_name, tensor_of, torch_name
from mla_compile.torch_internals import capture_graph, copy_graph

HEADS, NOPE, ROPE, RANK, V, HIDDEN = 3, 6, 4, 16, 5, 12
PAGE_SIZE, PAGES_PER_ROW, MAX_ROWS = 4, 4, 12
EPS = 1e-4
DECODE = {"rows": 3, "q_len": 2}
PREFILL = {"chunks": (5, 2)}
KINDS = {"decode": DECODE, "prefill": PREFILL, "mixed": DECODE | PREFILL}


class Capture:
    """`torch.compile(model, backend=Capture())`: records every graph, runs the passes, and calls AOTAutograd
    without Inductor, which takes a fraction of the time and still checks aliasing and metadata; lower: another backend
    of torch's, such as "eager"."""

    def __init__(self, passes: Sequence[pipeline.Pass] = tuple(PASSES), lower: str = "aot_eager") -> None:
        self.passes, self.lower = passes, lower
        self.before: list[fx.GraphModule] = []
        self.after: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.before.append(copy_graph(gm))
        gm = pipeline.run(gm, example_inputs, self.passes)
        self.after.append(copy_graph(gm))
        return lookup_backend(self.lower)(gm, list(example_inputs))


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
    """The shape of a node's value, the first one of a tuple; symbolic sizes are text, as comparing them adds guards."""
    value = node.meta["example_value"]
    sizes = (value[0] if isinstance(value, tuple) else value).shape
    return tuple(size if isinstance(size, int) else str(size) for size in sizes)


def graph_of(function: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, Sequence[Any]]:
    """Dynamo's graph of a call, before any pass, and its inputs."""
    found = capture_graph(function, inputs, {})
    assert found is not None
    return found


def without_kernel(graph_pass: pipeline.Pass) -> pipeline.Pass:
    """The pass, which also acts where the op that it inserts has no kernel, as on a CPU; others as they are."""
    module = sys.modules[graph_pass.__module__]

    @wraps(graph_pass)
    def run(gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> fx.GraphModule:
        with patch.object(module, "_pays", return_value=True):
            return graph_pass(gm, example_inputs)

    return run if hasattr(module, "_pays") else graph_pass


def without_kernels(*passes: pipeline.Pass) -> list[pipeline.Pass]:
    """All passes, these as `without_kernel`."""
    return [without_kernel(p) if p in passes else p for p in PASSES]


def check_results(node: fx.Node, num_views: int) -> None:
    """Views of a fused op's results are known to share their memory, and none needs a gradient."""
    views = [(user, result) for result in node.users for user in result.users if torch_name(user) == "view"]
    assert len(views) == num_views
    assert all(memory([view]) == memory([result]) for view, result in views)
    assert not any(tensor_of(result).requires_grad for result in node.users)


def written_to(model: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
    """The tensors that a call may write to: inputs and buffers."""
    buffers = model.buffers() if isinstance(model, nn.Module) else ()
    return [x for x in (*inputs, *buffers) if isinstance(x, Tensor)]


def checked(
    model: Callable[..., Any],
    passes: Sequence[pipeline.Pass],
    *inputs: Any,
    dynamic: bool = False,
    **tolerance: Any,
) -> fx.GraphModule:
    """The graph after the passes, whose results and writes to inputs and buffers are those of the eager model.

    dynamic: the first dimension of each input is dynamic.
    """
    capture, (eager, theirs) = Capture(passes), copy.deepcopy((model, inputs))
    if dynamic:
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
    found = torch.compile(model, backend=capture, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, eager(*theirs), **tolerance)
    for mine, expected in zip(written_to(model, inputs), written_to(eager, theirs), strict=True):
        torch.testing.assert_close(mine, expected, **tolerance)
    (gm,) = capture.after
    return gm


def compared(
    model: nn.Module, batch: dict[str, Any], dtype: torch.dtype, passes: Sequence[pipeline.Pass]
) -> fx.GraphModule:
    """`checked` on a batch of `make_inputs`."""
    x, metadata = make_inputs(**batch)
    tolerance = {"rtol": 1e-2, "atol": 4e-2} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    return checked(model, passes, x.to(dtype), metadata, **tolerance)


class Called(nn.Module):
    """A module whose forward is `call(module, *inputs)`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self, *inputs)


class Normed(Called):
    """A module with a norm over width `K`; `call` gets an input and a residual."""

    K = 16

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(call)
        self.norm_weight = nn.Parameter(torch.randn(self.K), requires_grad=False)

    def norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.norm_weight, 1e-5)

    @classmethod
    def after(
        cls, passes: Sequence[pipeline.Pass], call: Callable[..., Any], dims: int = 2, trains: bool = False
    ) -> fx.GraphModule:
        """The graph of `call` after the passes, `checked`; the norm's weight may require a gradient."""
        torch.manual_seed(0)
        layer, (x, residual) = cls(call), torch.randn(2, 5, *[1] * (dims - 2), cls.K)
        layer.norm_weight.requires_grad_(trains)
        return checked(layer, passes, x, residual, dynamic=True)


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
    """Layers without a plain cat or split along tokens."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers)).requires_grad_(False)

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        for layer in self.layers:
            x = layer(x, batch)
        return x


def upcast(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def halves(x: Tensor, angles: Tensor) -> Tensor:
    emb = torch.cat((angles, angles), dim=-1)
    return x * emb.cos().to(x.dtype) + rotate_half(x) * emb.sin().to(x.dtype)


def neighbours(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(x.dtype)


class NormRopeLayer(nn.Module):
    """An attention layer with a norm and a rotation that are written out."""

    def __init__(self, norm: Callable, rope: Callable, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = Layer().to(dtype)
        self.norm, self.rope = norm, rope
        self.register_buffer("weight", (1 + 0.3 * torch.randn(RANK)).to(dtype))
        self.register_buffer("other", torch.randn(RANK).to(dtype))
        self.requires_grad_(False)

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        angles = torch.outer(torch.arange(len(x)) + 1.0, torch.tensor([1.0, 0.1]))
        kv_c, k_pe, q = *self.latents(self.layer.kv_proj(x), angles), self.layer.q_proj(x)
        q_nope, q_pe = q.view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        layer = self.layer
        out = mla_attention(q_nope, q_pe, kv_c, k_pe, layer.kv_cache, layer.w_uk, layer.w_uv, batch, 0.3)
        return self.after(layer.o_proj(out.flatten(1)), kv_c)

    def latents(self, kv_a: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        kv_c, k_pe = kv_a.split([RANK, ROPE], dim=-1)
        return self.norm(kv_c, self.weight), self.rope(k_pe, angles)

    def after(self, out: Tensor, kv_c: Tensor) -> Tensor:
        return out


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
