"""Random programs around `mla_attention`: the steps that a random module of `stress.passes` runs.

They have norms, rotations, products, routers and experts in spellings that the passes match, or nearly; views and
writes in place; gathers with duplicate and negative indices; work across tokens; several calls on one cache, which is
read and written between them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile import MLABatch, mla_attention
from mla_compile.ops.experts.moe import moe_experts
from tests.passes.capture import HEADS, HIDDEN, NOPE, PAGE_SIZE, RANK, ROPE, V, halves, neighbours

EXPERTS = 6

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
            return nn.Parameter(
                torch.randn(shape, dtype=torch.float64) * shape[-1] ** -0.5, requires_grad=False
            )

        self.square, self.other, self.factor = weight(HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN), weight(HIDDEN)
        self.q, self.kv, self.o = (
            weight(HEADS * (NOPE + ROPE), HIDDEN),
            weight(RANK + ROPE, HIDDEN),
            weight(HIDDEN, HEADS * V),
        )
        self.w_uk, self.w_uv, self.latent_factor = (
            weight(HEADS, NOPE, RANK),
            weight(HEADS, RANK, V),
            weight(RANK),
        )
        self.gate, self.bias = weight(EXPERTS, HIDDEN), weight(EXPERTS)
        self.gate_up, self.down = weight(EXPERTS, 2 * 4, HIDDEN), weight(EXPERTS, HIDDEN, 4)
        self.shared_gate, self.shared_up, self.shared_down = (
            weight(4, HIDDEN),
            weight(4, HIDDEN),
            weight(HIDDEN, 4),
        )
        for i in range(2):
            pages = torch.randn(49, PAGE_SIZE, RANK + ROPE, dtype=torch.float64)
            self.register_buffer(f"cache{i}", pages if i < caches else self.get_buffer("cache0"))

    def forward(self, x: Tensor, batch: MLABatch, *more: Tensor) -> list[Tensor]:
        values = [x, *more]
        for name, one, other in self.steps:
            values.append(STEPS[name](self, values, batch, one % len(values), other % len(values)))
        return [values[i % len(values)] for i in self.results]


class Layers(nn.Module):
    """Programs of the same steps, one after the other. The results of each are the values of the next.

    shared: what layers have in common: "nothing", "caches", or "all", as one layer that repeats.
    """

    def __init__(
        self,
        steps: list[tuple[str, int, int]],
        results: list[int],
        caches: int,
        seed: int,
        count: int,
        shared: str,
    ) -> None:
        super().__init__()
        layers = [Program(steps, results, caches, seed + i) for i in range(1 if shared == "all" else count)]
        if shared == "caches":
            for layer in layers:
                layer.cache0, layer.cache1 = layers[0].cache0, layers[0].cache1
        self.layers = nn.ModuleList(layers * (count // len(layers)))

    def forward(self, x: Tensor, batch: MLABatch) -> list[Tensor]:
        values = [x]
        for layer in self.layers:
            values = layer(values[0], batch, *values[1:])
        return values


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
