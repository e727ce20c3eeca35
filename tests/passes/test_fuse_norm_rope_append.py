"""`fuse_norm_rope_append`: ways to write norm and rotation that it sees, what it must leave, and results."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from mla_compile import MLABatch, explain
from mla_compile.engine import Engine
from mla_compile.passes import pipeline, recognise
from mla_compile.passes.effects import may_write
from mla_compile.passes.fuse_norm_rope_append import fuse_norm_rope_append
from mla_compile.passes.provenance import module_path
from mla_compile.passes.split_prefill_decode import split_prefill_decode
from tests.counters import compile_counters
from tests.integrations.test_logits import Reader
from tests.models_for_tests import tiny_model
from tests.passes.capture import (
    DECODE,
    EPS,
    KINDS,
    RANK,
    ROPE,
    NormRopeLayer,
    compared,
    graph_of,
    halves,
    make_inputs,
    neighbours,
    nodes_of,
    ops,
    rotate_half,
    shape,
    upcast,
    without_kernel,
)
from tests.passes.steps import capture_steps, check_greedy_tokens, speculative_step

fuse = without_kernel(fuse_norm_rope_append)
PASSES = [split_prefill_decode, fuse]


# --- ways to write a norm


def builtin(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (RANK,), weight, EPS)


def machine_epsilon(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), (RANK,)).type_as(x) * weight


def no_epsilon(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() / x.float().square().mean(-1, True).sqrt()).type_as(x) * weight


def by_sum(x: Tensor, weight: Tensor) -> Tensor:
    squares = torch.einsum("...d,...d->...", x.float(), x.float())[..., None]
    return ((x * RANK**0.5) / (squares + RANK * EPS).sqrt()).to(x.dtype).mul(weight[None])


def by_length(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.float()[None].transpose(0, 1)
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return ((rows * (length**2 / RANK + EPS) ** -0.5).squeeze(1)).to(weight) * weight


NORMS = [upcast, builtin, machine_epsilon, no_epsilon, by_sum, by_length]

# --- ways to write a rotation


def halves_with_a_factor(x: Tensor, angles: Tensor) -> Tensor:
    sin, cos = angles.sin() * 1.3, angles.cos() * 1.3
    a, b = x.float().unflatten(-1, (2, -1)).unbind(-2)
    return torch.cat([torch.addcmul(-(b * sin), a, cos), a * sin + b * cos], -1).type_as(x)


def deinterleaved(x: Tensor, angles: Tensor) -> Tensor:
    heads = x.view(1, len(x), 1, ROPE).transpose(1, 2)
    apart = heads.view(1, 1, -1, ROPE // 2, 2).transpose(4, 3).reshape(1, 1, -1, ROPE)
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None, None].to(x.dtype) for f in (torch.cos, torch.sin))
    return (apart * cos + rotate_half(apart) * sin).transpose(1, 2).flatten(0, 2)


def as_complex(x: Tensor, angles: Tensor) -> Tensor:
    factors = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(x.float().reshape(-1, 1, ROPE // 2, 2))
    return torch.view_as_real(pairs * factors).flatten(1).type_as(x)


ROPES = [halves, halves_with_a_factor, deinterleaved, as_complex, neighbours]


def compare(model: nn.Module, batch: dict[str, Any], dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    return compared(model, batch, dtype, PASSES)


def is_fused(gm: fx.GraphModule) -> bool:
    found = ops(gm)
    assert ("mla_append" in found) != ("mla_norm_rope_append" in found)
    return "mla_norm_rope_append" in found


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_is_seen_however_it_is_written(norm: Callable, dtype: torch.dtype) -> None:
    gm = compare(NormRopeLayer(norm, halves, dtype), DECODE, dtype)
    assert is_fused(gm) and not {"rsqrt", "rms_norm", "neg"} & set(ops(gm))
    (node,) = nodes_of(gm, "mla_norm_rope_append")
    expected = {machine_epsilon: torch.finfo(torch.float32).eps, no_epsilon: 0.0}.get(norm, EPS)
    assert node.args[6] == pytest.approx(expected, rel=1e-4)
    assert node.args[6] == EPS or norm not in (upcast, builtin, by_length), "the graph's own constant"


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", ROPES)
def test_a_rotation_is_seen_however_it_is_written(rope: Callable, dtype: torch.dtype) -> None:
    gm = compare(NormRopeLayer(upcast, rope, dtype), DECODE, dtype)
    assert is_fused(gm)
    (node,) = nodes_of(gm, "mla_norm_rope_append")
    layout = {deinterleaved: (True, False), as_complex: (True, True), neighbours: (True, True)}
    assert node.args[7:] == layout.get(rope, (False, False))


@pytest.mark.parametrize(
    "rope",
    [
        halves,
        as_complex,
        *(pytest.param(r, marks=pytest.mark.slow) for r in ROPES if r not in (halves, as_complex)),
    ],
)
def test_it_fuses_where_the_number_of_rows_is_unknown(rope: Callable) -> None:
    assert is_fused(compare(NormRopeLayer(upcast, rope), DECODE | {"unbacked": True}))


def test_it_looks_past_a_tensor_whose_width_depends_on_data() -> None:
    class Routed(NormRopeLayer):
        def latents(self, kv_a: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
            chosen = (kv_a.flatten() > 0).nonzero().T  # as a mixture of experts picks its tokens
            return super().latents(kv_a + chosen.sum(), angles)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert not is_fused(compare(Routed(lambda x, weight: x * weight, halves), DECODE))


def test_new_nodes_carry_example_values_and_the_appends_provenance() -> None:
    split = split_prefill_decode(graph_of(NormRopeLayer(upcast, halves), *make_inputs(**DECODE))[0])
    (append,) = nodes_of(split, "mla_append")
    line, old = append.meta["stack_trace"], {node.name for node in split.graph.nodes}
    new = [node for node in fuse(split).graph.nodes if node.name not in old]
    kept = nodes_of(split, "materialize")
    assert len(kept) == 2, "cos and sin"
    for node in new:
        expected = node.args[0].meta["stack_trace"] if node in kept else line
        assert "example_value" in node.meta and node.meta["stack_trace"] == expected
    (fused,) = nodes_of(split, "mla_norm_rope_append")
    assert may_write(fused) == [fused.args[4]] and shape(fused.args[0]) == (6, RANK + ROPE)


# --- what is left as it is


class NormBias(NormRopeLayer):
    def latents(self, kv_a: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        kv_c, k_pe = super().latents(kv_a, angles)
        return kv_c + self.other, k_pe


class ScaledLatent(NormRopeLayer):
    def latents(self, kv_a: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        kv_c, k_pe = super().latents(kv_a, angles)
        return kv_c * 2**0.5, k_pe


class LatentUsedElsewhere(NormRopeLayer):
    def after(self, out: Tensor, kv_c: Tensor) -> Tensor:
        return out + kv_c.sum(-1, keepdim=True)


class LatentKept(NormRopeLayer):
    """Written into a tensor that is read later."""

    def after(self, out: Tensor, kv_c: Tensor) -> Tensor:
        kept = out.new_zeros(len(out), 2 * RANK)
        kept[:, :RANK].copy_(kv_c)
        return out + kept.sum(-1, keepdim=True)


class ProjectionWritten(NormRopeLayer):
    def latents(self, kv_a: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        kv_c, _ = super().latents(kv_a, angles)
        kv_a.mul_(2)
        return kv_c, super().latents(kv_a, angles)[1]


class WeightWritten(NormRopeLayer):
    def latents(self, kv_a: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        latents = super().latents(kv_a, angles)
        self.weight.add_(1)
        return latents


class TwoProjections(NormRopeLayer):
    def latents(self, kv_a: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        kv_c, _ = kv_a.split([RANK, ROPE], dim=-1)
        return self.norm(kv_c, self.weight), self.rope(torch.ones(len(kv_a), ROPE), angles)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (RANK,), weight, None, EPS)


def in_half_precision(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt())


def clamped(x: Tensor, weight: Tensor) -> Tensor:
    return upcast(x.clamp(-1e4, 1e4), weight)


def without_nan(x: Tensor, weight: Tensor) -> Tensor:
    return upcast(x.nan_to_num(), weight)


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    return upcast(x.clone().mul_(1), weight)


def dropped(x: Tensor, weight: Tensor) -> Tensor:
    return F.dropout(upcast(x, weight), 0.5)


def of_all_tokens(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean() + EPS)


def long_winded(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(70):
        x = x * 1
    return upcast(x, weight)


def partial(x: Tensor, angles: Tensor) -> Tensor:
    return torch.cat([halves(x[..., : ROPE // 2], angles[:, :1]), x[..., ROPE // 2 :]], dim=-1)


def not_rotated(x: Tensor, angles: Tensor) -> Tensor:
    return x * 1


def rolled(x: Tensor, angles: Tensor) -> Tensor:
    return halves(x, angles).roll(1, -1)


def of_other_tokens(x: Tensor, angles: Tensor) -> Tensor:
    return halves(x, angles).flip(0)


def scaled_after(x: Tensor, angles: Tensor) -> Tensor:
    return halves(x, angles) * 1.1


NORM, ROTATION = "kv_c .*RMSNorm", "k_pe .*rotation"
REFUSED: dict[str, tuple[nn.Module, str]] = {
    "a layer norm": (NormRopeLayer(layer_norm, halves), f"{NORM}.*float32"),
    "a bias": (NormBias(upcast, halves), rf"{NORM}.*\b2 .*tensors"),
    "a scaled latent": (ScaledLatent(upcast, halves), f"{NORM}.*float32"),
    "a clamp": (NormRopeLayer(clamped, halves), f"{NORM}.*float32"),
    "a replaced NaN": (NormRopeLayer(without_nan, halves), f"{NORM}.*float32"),
    "a write on the way": (NormRopeLayer(in_place, halves), f"{NORM}.*`mul_`"),
    "a mean over all tokens": (NormRopeLayer(of_all_tokens, halves), f"{NORM}.*float32"),
    "very many operations": (NormRopeLayer(long_winded, halves), rf"{NORM}.*\b80\b"),
    "part of a rotation": (NormRopeLayer(upcast, partial), f"{ROTATION}.*float32"),
    "no rotation": (NormRopeLayer(upcast, not_rotated), rf"{ROTATION}.*\b0 .*tensors"),
    "rotated and rolled": (NormRopeLayer(upcast, rolled), f"{ROTATION}.*float32"),
    "tokens in another order": (
        NormRopeLayer(upcast, of_other_tokens),
        f"{ROTATION}.*float32",
    ),
    "a factor after it": (NormRopeLayer(upcast, scaled_after), f"{ROTATION}.*float32"),
    "two projections": (TwoProjections(upcast, halves), "kv_c and k_pe"),
    "a latent used elsewhere": (LatentUsedElsewhere(upcast, halves), "`sum_1`"),
    "a latent kept": (LatentKept(upcast, halves), "`copy_`"),
    "a projection written": (ProjectionWritten(upcast, halves), "`mul_`"),
    "a weight written": (WeightWritten(upcast, halves), "`add_`"),
}


@pytest.mark.long
@pytest.mark.parametrize(("model", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_it_is_left_as_it_is_and_the_log_says_why(model: nn.Module, reason: str, logged: Callable) -> None:
    assert not is_fused(compare(copy.deepcopy(model), DECODE))
    (message,) = logged()
    assert message.startswith("not fused: ") and re.search(reason, message), message


def test_dropout_is_not_fused() -> None:
    assert not is_fused(
        pipeline.run(*graph_of(NormRopeLayer(dropped, halves), *make_inputs(**DECODE)), PASSES)
    )


@pytest.mark.long
def test_a_norm_that_rounds_more_often_than_the_op_is_left(logged: Callable) -> None:
    assert not is_fused(
        compare(NormRopeLayer(in_half_precision, halves, torch.float16), DECODE, torch.float16)
    )
    assert re.search(f"{NORM}.*float16", logged()[0])
    assert is_fused(compare(NormRopeLayer(in_half_precision, halves), DECODE)), "in float32 it is the same"


@pytest.mark.parametrize("kind", ["prefill", "mixed"])
def test_appends_of_prompt_chunks_are_fused_too(kind: str) -> None:
    assert is_fused(compare(NormRopeLayer(upcast, halves), KINDS[kind]))


def test_on_the_cpu_inductor_does_better() -> None:
    gm = split_prefill_decode(graph_of(NormRopeLayer(upcast, halves), *make_inputs(**DECODE))[0])
    before, code = str(gm.graph), gm.code
    assert fuse_norm_rope_append(gm) is gm and str(gm.graph) == before and gm.code == code


def test_a_graph_without_appends_is_left_untouched() -> None:
    gm, _ = graph_of(nn.Sequential(nn.RMSNorm(4), nn.GELU()), torch.randn(2, 4))
    before = str(gm.graph)
    assert str(fuse(gm).graph) == before


# --- the work of the pass


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NormRopeLayer(upcast, halves) for _ in range(count))

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, batch)
        return x


@pytest.mark.long
def test_layers_that_are_alike_are_tried_once_and_the_graph_is_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    for name in ("norm", "rotation"):
        function = getattr(recognise, name)
        monkeypatch.setattr(recognise, name, lambda cone, f=function: (tried.append(f), f(cone))[1])
    graphs = []
    for _ in range(2):
        found = graph_of(Layers(5), *make_inputs(**DECODE))
        state = torch.get_rng_state()
        gm = pipeline.run(*found, PASSES)
        assert torch.equal(torch.get_rng_state(), state)
        assert ops(gm).count("mla_norm_rope_append") == 5
        graphs.append(str(gm.graph))
        assert str(fuse(gm).graph) == graphs[-1]
    assert graphs[0] == graphs[1] and len(tried) == 2 * 2


# --- models


@pytest.mark.long
def test_every_append_of_a_speculative_step_is_fused_on_tensors_without_values() -> None:
    found = speculative_step()
    appends = len(nodes_of(found[0], "mla_attention"))
    gm = pipeline.run(*found, PASSES)
    assert (
        appends == 3
        and len(nodes_of(gm, "mla_norm_rope_append")) == appends
        and not nodes_of(gm, "mla_append")
    )


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str
)
def test_compiled_steps_that_are_fused_give_the_tokens_of_plain_decoding(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, logged: Callable
) -> None:
    monkeypatch.setattr(pipeline, "PASSES", PASSES)
    check_greedy_tokens(tiny_model(dtype))
    messages = logged()
    assert len(messages) >= 4 and all(message.startswith("fused: ") for message in messages)


FUSED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "minicpm3", "mistral4", "youtu")
LIKE_V3 = ("deepseek_v2", "glm4_moe_lite", "kimi_k25", "mistral4", "youtu")
"""What computes the latents as deepseek_v3 does, or nearly."""
LEFT = {
    "longcat_flash": f"{NORM}.*float32",  # its latents are scaled after the norm
    "kimi_linear": rf"{ROTATION}.*\b0 .*tensors",  # has no rotation
}
FEW_LAYERS = {"longcat_flash": {"num_layers": 1}, "kimi_linear": {}}
"""Where two layers with MLA are not num_hidden_layers = 2."""


@pytest.mark.long
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.slow) if f in LIKE_V3 else f for f in (*FUSED, *LEFT)]
)
def test_compiled_steps_of_transformers_models_give_the_stock_logits(
    family: str, monkeypatch: pytest.MonkeyPatch, logged: Callable
) -> None:
    reader = Reader(family, **FEW_LAYERS.get(family, {"num_hidden_layers": 2}))
    capture = capture_steps(reader, PASSES, monkeypatch)
    for _ in range(2):
        reader.assert_as_stock(reader.decode(1))
    messages = logged("fuse_norm_rope_append")
    (gm,) = capture.after
    layers = len(nodes_of(capture.before[0], "mla_attention"))
    assert layers >= 2 and len(messages) == layers
    if family in LEFT:
        assert all(re.search(LEFT[family], message) for message in messages), messages
        return
    assert len(nodes_of(gm, "mla_norm_rope_append")) == layers and "mla_append" not in ops(gm)
    assert all(message.startswith("fused: ") for message in messages)
    angles = nodes_of(gm, "materialize")
    assert len(angles) == (0 if family == "deepseek_v2" else 2), (
        "those of all layers, if they are not complex"
    )
    assert not {"new_empty", "copy_", "expand_kv"} & set(ops(gm)), "unread expansions are gone too"
    names = [module_path(node) for node in nodes_of(gm, "mla_norm_rope_append")]
    assert all("self_attn" in name for name in names)


def test_the_explanation_names_the_fused_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PASSES", PASSES)
    text = str(explain(Layers(2), *make_inputs(**DECODE)))
    assert "append   mla_norm_rope_append   kv_c [6, 16], k_pe [6, 4] -> kv_cache" in text
    assert "norm_rope_append" in text.split("nodes after each pass")[1]


@pytest.mark.gpu
def test_captured_steps_on_a_gpu_are_fused_and_give_the_tokens_of_plain_decoding(logged: Callable) -> None:
    torch._dynamo.utils.counters.clear()
    prompts, settings = [[1, 2, 3], [4, 5]], {"max_rows": 2, "max_model_len": 64, "page_size": 4}
    engine = Engine(tiny_model(torch.float32).cuda(), num_speculative_tokens=2, **settings)
    plain = Engine(tiny_model(torch.float32).cuda(), num_speculative_tokens=0, compile=False, **settings)
    captured, expected = (e.generate(prompts, max_new_tokens=24) for e in (engine, plain))
    assert [c.token_ids for c in captured] == [c.token_ids for c in expected]
    messages = logged("fuse_norm_rope_append")
    assert len(messages) >= 4 and all(message.startswith("fused: ") for message in messages)
    assert compile_counters()["graphs"] == 3, "a step's parts; the target's forward of prompts runs eagerly"
