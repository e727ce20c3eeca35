"""Random modules through all passes, against the same module run eagerly, in float64.

A third of the cases are programs of 2 to 6 steps around calls of `mla_attention`: norms, rotations, products, routers and
experts in spellings that the passes match, or nearly; views and writes in place; gathers with duplicate and negative
indices; work across tokens; several calls on one cache, which is read and written between them. The others are MLA in
plain torch, which must be absorbed, or must not. The graph then runs op by op; Inductor compiles one program of
100. Results, inputs and buffers are compared.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed

from mla_compile import MLABatch, mla_attention
from mla_compile.check_batches import checked, checks_of
from mla_compile.ops.experts.moe import moe_experts
from mla_compile.passes import PASSES, pipeline
from mla_compile.passes.make_batch_invariant import make_batch_invariant
from mla_compile.torch_internals import know_least_sizes
from stress.runner import Case, Draw, main
from tests.passes.capture import HEADS, HIDDEN, NOPE, RANK, ROPE, V, halves, make_inputs, neighbours
from tests.passes.test_absorb_random import CHANGES, Form
from tests.passes.test_absorb_random import check as check_form

torch._dynamo.config.recompile_limit = 64
EXPERTS = 6
WITHOUT_KERNELS = [
    partial(p, require_kernel=False) if "require_kernel" in signature(p).parameters else p for p in PASSES
]
"""All passes; they also act where the op that they insert has no kernel, as on a CPU."""

Values = list[Tensor]
"""The tensors `[tokens, HIDDEN]` of a program; the last one is the newest."""
Step = Callable[["Program", Values, MLABatch, int, int], Tensor]
"""A step takes the places of two values, and returns a new one."""
STEPS: dict[str, Step] = {}


def step(make: Step) -> Step:
    STEPS[make.__name__] = make
    return make


class Program(nn.Module):
    """steps: names of `STEPS`, each with the places of its two values. results: the values that are returned."""

    def __init__(self, steps: list[tuple[str, int, int]], results: list[int], caches: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.steps, self.results = steps, results

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=torch.float64) * shape[-1] ** -0.5, requires_grad=False)

        self.square, self.other, self.factor = weight(HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN), weight(HIDDEN)
        self.q, self.kv, self.o = weight(HEADS * (NOPE + ROPE), HIDDEN), weight(RANK + ROPE, HIDDEN), weight(HIDDEN, HEADS * V)
        self.w_uk, self.w_uv, self.latent_factor = weight(HEADS, NOPE, RANK), weight(HEADS, RANK, V), weight(RANK)
        self.gate, self.bias = weight(EXPERTS, HIDDEN), weight(EXPERTS)
        self.gate_up, self.down = weight(EXPERTS, 2 * 4, HIDDEN), weight(EXPERTS, HIDDEN, 4)
        self.shared_gate, self.shared_up, self.shared_down = weight(4, HIDDEN), weight(4, HIDDEN), weight(HIDDEN, 4)
        for i in range(2):
            shape = make_inputs(rows=1)[1].decode
            assert shape is not None
            pages = torch.randn(49, shape.page_size, RANK + ROPE, dtype=torch.float64)
            self.register_buffer(f"cache{i}", pages if i < caches else self.get_buffer("cache0"))

    def forward(self, x: Tensor, batch: MLABatch) -> list[Tensor]:
        values = [x]
        for name, one, other in self.steps:
            values.append(STEPS[name](self, values, batch, one % len(values), other % len(values)))
        return [values[i % len(values)] for i in self.results]


def norm_of(x: Tensor, factor: Tensor, eps: float = 1e-5) -> Tensor:
    return factor * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def attended(p: Program, x: Tensor, batch: MLABatch, kind: int, cache: Tensor) -> Tensor:
    """An attention layer. kind: how its norm, rotation and views are written."""
    q_nope, q_pe = F.linear(x, p.q).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
    kv_c, k_pe = F.linear(x, p.kv).split([RANK, ROPE], dim=-1)
    if kind & 1:
        kv_c = norm_of(kv_c, p.latent_factor)
    if kind & 2:
        rope = neighbours if kind & 4 else halves
        angles = torch.outer(torch.arange(len(x)) + 1.0, torch.tensor([1.0, 0.1])).double()
        k_pe, q_pe = rope(k_pe, angles), rope(q_pe, angles[:, None])
    if kind & 8:
        q_nope = q_nope.clone()
        q_nope[..., 0] *= 2
    out = mla_attention(q_nope, q_pe, kv_c, k_pe, cache, p.w_uk, p.w_uv, batch, 0.3)
    return F.linear(out.flatten(1), p.o)


for kind in range(16):

    def attend(p: Program, v: Values, batch: MLABatch, i: int, j: int, kind: int = kind) -> Tensor:
        return v[i] + attended(p, v[j], batch, kind, p.get_buffer(f"cache{kind % 2}"))

    STEPS[f"attend {kind}"] = attend


@step
def scaled_norm(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return norm_of(v[i], p.factor)


@step
def norm_of_a_sum(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    total = v[i] + v[j]
    v.append(total)
    return norm_of(total, p.factor)


@step
def norm_then_product(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return F.linear(norm_of(v[i] + v[j], p.factor), p.square)


@step
def norm_over_tokens(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return p.factor * (v[i] * torch.rsqrt(v[i].pow(2).mean(0, keepdim=True) + 1e-5))


@step
def norm_in_float32(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    wide = v[i].to(torch.float32)
    return p.factor * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(v[i].dtype)


@step
def norm_by_torch(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return F.rms_norm(v[i], (HIDDEN,), p.factor, 1e-6)


@step
def two_products(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return F.linear(v[i], p.square).sigmoid() * F.linear(v[i], p.other)


@step
def product(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return v[j] + v[i] @ p.square.T


def routed(p: Program, x: Tensor, logits: Tensor, bias: bool) -> Tensor:
    scores = logits.sigmoid()
    ids = (scores + p.bias if bias else scores).topk(2, dim=-1, sorted=False).indices
    weights = scores.gather(-1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * 1.5
    return moe_experts(x, weights, ids, p.gate_up, p.down)


@step
def experts(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return routed(p, v[i], F.linear(v[i], p.gate), bias=True)


@step
def experts_and_shared_ones(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    x = norm_of(v[i] + v[j], p.factor)
    shared = F.linear(F.silu(F.linear(x, p.shared_gate)) * F.linear(x, p.shared_up), p.shared_down)
    return routed(p, x, F.linear(x, p.gate), bias=False) + shared


@step
def experts_of_other_logits(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return routed(p, v[i], F.linear(v[j], p.gate).tanh(), bias=True)


@step
def write_in_place(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return v[i].add_(v[j], alpha=0.5)


@step
def write_to_a_view(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    v[i].view(-1, 2, HIDDEN // 2)[:, 1].mul_(0.5)
    return v[i][:, :] + 1


@step
def write_transposed(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    v[i].T[2:4] += v[j].T[:2]
    return v[i].T.T


@step
def view(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return v[i].unflatten(-1, (3, -1)).transpose(0, 1).transpose(0, 1).flatten(1)


@step
def chunks_joined(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    one, other = v[i].chunk(2, dim=-1)
    return torch.cat([other, one], dim=-1)


@step
def gather_tokens(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    """With duplicates, and counted from the end."""
    places = torch.arange(len(v[i]))
    return v[i][-1 - places // 2] + v[j]


@step
def gather_last_tokens(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return v[j] + v[i][torch.tensor([-1, 0, -1])].sum(0)


@step
def select_and_put_back(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    places = torch.tensor([0, 0])
    return v[i].index_add(0, places, v[j].index_select(0, places))


@step
def flip_tokens(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return v[i].flip(0)


@step
def across_tokens(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return v[i].cumsum(0) / 4 - v[j].mean(0)


@step
def reshaped_across_tokens(p: Program, v: Values, _: MLABatch, i: int, j: int) -> Tensor:
    return v[i].reshape(HIDDEN, -1).T.contiguous() + 0 * v[j]


@step
def read_a_cache(p: Program, v: Values, batch: MLABatch, i: int, j: int) -> Tensor:
    return v[i] + p.get_buffer("cache0")[1:4].mean() / 8


@step
def write_a_cache(p: Program, v: Values, batch: MLABatch, i: int, j: int) -> Tensor:
    p.get_buffer("cache1")[1:9].mul_(0.5)
    return v[i] + 1


class Backend:
    """The passes, then "eager", which runs the graph's nodes, or "aot_eager", which checks aliasing and writes too."""

    def __init__(self, passes: Sequence[Any], lower: str) -> None:
        self.passes, self.lower = passes, lower

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        know_least_sizes(inputs)
        checks = checks_of(gm)
        gm = pipeline.run(gm, inputs, self.passes)
        return checked(lookup_backend(self.lower)(gm, list(inputs)), checks)


def drawn_batch(draw: Draw) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    if draw.random() < 0.7:
        batch = {"rows": draw.randint(1, 4), "q_len": draw.randint(1, 3)}
        if draw.random() < 0.4:
            batch["q_lens"] = [draw.randint(0, batch["q_len"]) for _ in range(batch["rows"])]
    if not batch or draw.random() < 0.5:
        batch["chunks"] = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
    return batch


def lowered(draw: Draw) -> str:
    return draw.choices(("eager", "aot_eager"), (4, 1))[0]


def program(draw: Draw) -> str:
    attends = [name for name in STEPS if name.startswith("attend")]
    others = [name for name in STEPS if name not in attends]
    names = [draw.choice(attends if draw.random() < 0.35 else others) for _ in range(draw.randint(2, 6))]
    steps = [(name, draw.choice((-1, draw.randrange(9))), draw.choice((-1, draw.randrange(9)))) for name in names]
    results = [-1, *(draw.randrange(9) for _ in range(draw.randrange(3)))]
    batches = [drawn_batch(draw) for _ in range(draw.choice((1, 1, 2)))]
    model = Program(steps, results, draw.randint(1, 2), draw.randrange(100))
    kind = draw.choices(("passes", "all passes", "batch-invariant", "inductor"), (20, 60, 18, 1))[0]
    lower = lowered(draw)
    draw.note(kind, lower, *steps, "results", results, batches)
    backend: Any = Backend(WITHOUT_KERNELS if kind == "all passes" else PASSES, lower)
    if kind == "batch-invariant":
        backend = Backend([*WITHOUT_KERNELS, make_batch_invariant], lower)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="mla" if kind == "inductor" else backend, fullgraph=True)
    # Programs with a step in float32 agree to its precision.
    tolerance = 1e-5 if any("float32" in name for name in names) else 1e-9
    for sizes in batches:
        x, batch = make_inputs(**sizes)
        x, mine = x.double(), x.double()
        with torch.no_grad():
            expected = eager(x, batch)
            try:
                found = compiled(mine, batch)
            except BackendCompilerFailed as error:
                if kind == "batch-invariant" and str(error.inner_exception).startswith("batch_invariant: expected calls"):
                    return "program, batch-invariant, refused by name"
                raise
        for one, other in zip((*found, mine, *model.buffers()), (*expected, x, *eager.buffers()), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    return f"program, {kind}"


def plain(draw: Draw) -> str:
    """MLA in plain torch, with a change that must not be absorbed in half of the cases."""

    def form() -> Form:
        return Form(
            attention=draw.choice(("sdpa", "matmul")),
            projection=draw.choice(("by head", "halves", "two weights")),
            join=draw.choice(("cat", "repeat", "copy")),
            rope_first=draw.random() < 0.5,
            batch=draw.randint(1, 2),
            q_len=draw.randint(1, 3),
            mask=draw.choice(("none", "bool", "float", "causal")),
            change=draw.choice((None, draw.choice(CHANGES))),
        )

    drawn = form()
    while not drawn.is_one():
        drawn = form()
    draw.note(drawn)
    check_form(drawn, lowered(draw))
    return "plain MLA, absorbed" if drawn.change is None else "plain MLA, left as it is"


def run(draw: Draw) -> str:
    torch._dynamo.reset()
    return program(draw) if draw.random() < 0.33 else plain(draw)


def make(_: argparse.Namespace) -> Case:
    return run


if __name__ == "__main__":
    main("passes", make)
