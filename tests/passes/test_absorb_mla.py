"""`absorb_mla`: which ways of writing MLA it recognises, what it leaves alone, what it logs, and equality."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from mla_compile.passes import pipeline
from mla_compile.passes.absorb_mla import absorb_mla, absorbing_pays
from mla_compile.passes.effects import erase_dead
from tests.passes.capture import Capture, checked, graph_of, nodes_of, ops, shape
from tests.passes.mla_modules import (
    BATCH,
    HEADS,
    HIDDEN,
    KEYS,
    NOPE,
    RANK,
    ROPE,
    CompactMLA,
    ReferenceMLA,
    StaticCacheMLA,
    TwoWeightsMLA,
    V,
    linear,
)

EXPLICIT = [ReferenceMLA, TwoWeightsMLA]
FUSED = [CompactMLA]


def run(model: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    with torch.no_grad():
        return checked(model, [absorb_mla], *inputs, atol=1e-10, rtol=0, equal_nan=True)


def make_inputs(q_len: int = 2, keys: int = KEYS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Hidden states, latents and rotary keys."""
    sizes = (BATCH, q_len, HIDDEN), (BATCH, keys, RANK), (BATCH, keys, ROPE)
    return tuple(torch.randn(*size, dtype=dtype) for size in sizes)


def expanded_tensors(gm: fx.GraphModule) -> list[str]:
    """Nodes that have a value for every head, key and feature."""
    found = []
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor) and KEYS in value.shape and HEADS in value.shape:
            found += [node.name] if set(shape(node)) & {NOPE, NOPE + ROPE, NOPE + V} else []
        if isinstance(value, Tensor) and shape(node)[-1:] == (HEADS * (NOPE + V),):
            found.append(node.name)
    return found


# --- what is recognised


@pytest.mark.long
@pytest.mark.parametrize("masked", ["none", "bool", "float"])
@pytest.mark.parametrize("module", EXPLICIT + FUSED)
def test_mla_is_absorbed_however_it_is_written(
    module: type[nn.Module], masked: str, logged: Callable
) -> None:
    mask = None if masked == "none" else torch.rand(BATCH, 2, KEYS) < 0.6
    if masked == "float" or (masked == "bool" and module is ReferenceMLA):
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)
    gm = run(module(), *make_inputs(), mask)
    assert not expanded_tensors(gm)
    assert "scaled_dot_product_attention" not in ops(gm)
    assert len(nodes_of(gm, "mla_masked_decode")) == (module in FUSED)
    assert len(logged()) == 1


# --- a static cache


def batched(positions: Tensor) -> Tensor:
    return torch.arange(KEYS) <= positions[:, None, :, None]


def filled(positions: Tensor) -> Tensor:
    return torch.where(batched(positions), 0.0, -torch.inf).double()


def test_a_batch_smaller_than_its_static_cache_is_absorbed() -> None:
    gm = run(StaticCacheMLA(batched, rows=5), torch.randn(BATCH, 2, HIDDEN).double(), torch.tensor([3, 9]))
    assert len(nodes_of(gm, "mla_masked_decode")) == 1


def test_a_token_that_sees_no_key_gets_zeros() -> None:
    gm = run(
        StaticCacheMLA(lambda positions: batched(positions - 4)),
        torch.randn(BATCH, 2, HIDDEN).double(),
        torch.tensor([0, 3]),
    )
    assert len(nodes_of(gm, "mla_masked_decode")) == 1


@pytest.mark.parametrize("q_len", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("visible", [batched, filled])
def test_any_mask_on_a_static_cache_is_kept(visible: Callable[[Tensor], Tensor], q_len: int) -> None:
    inputs = torch.randn(BATCH, q_len, HIDDEN).double(), torch.tensor([7, KEYS - q_len])
    gm = run(StaticCacheMLA(visible), *inputs)
    assert not expanded_tensors(gm)
    assert len(nodes_of(gm, "mla_masked_decode")) == 1


# --- any mask


@pytest.mark.long
@settings(max_examples=15)
@given(st.data())
def test_any_boolean_mask_gives_what_the_expanded_form_gives(data: st.DataObject) -> None:
    """Also rows that see nothing: zeros from the fused attention, NaN from the explicit one."""
    bits = st.lists(st.booleans(), min_size=KEYS, max_size=KEYS)
    rows = data.draw(st.lists(st.just([False] * KEYS) | bits, min_size=2 * BATCH, max_size=2 * BATCH))
    mask = torch.tensor(rows).view(BATCH, 2, KEYS)
    torch.manual_seed(0)
    for dtype, atol in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        for module, compiled in compiled_modules(dtype):
            inputs = make_inputs(dtype=dtype)
            with torch.no_grad():
                expected, got = module(*inputs, mask), compiled(*inputs, mask)
            torch.testing.assert_close(got, expected, atol=atol, rtol=0, equal_nan=True)


@functools.cache
def compiled_modules(dtype: torch.dtype) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
    """A fused and an explicit attention, and each with the pass, compiled once for all examples."""
    torch.manual_seed(0)
    pairs = []
    for module in (CompactMLA().to(dtype), TwoWeightsMLA().to(dtype)):
        capture = Capture([absorb_mla])
        compiled = torch.compile(copy.deepcopy(module), backend=capture, fullgraph=True)
        with torch.no_grad():
            compiled(*make_inputs(dtype=dtype), torch.ones(BATCH, 2, KEYS) > 0)
        assert not expanded_tensors(capture.after[0])
        pairs.append((module, compiled))
    return pairs


# --- what is left alone, and what the log says


class Ordinary(nn.Module):
    """Multi-head attention, or grouped-query attention with fewer key heads, over linear layers."""

    def __init__(self, kv_heads: int, rotary: bool) -> None:
        super().__init__()
        self.q, self.k = linear(HIDDEN, HEADS * 8), linear(HIDDEN, kv_heads * 8)
        self.v, self.kv_heads, self.rotary = linear(HIDDEN, kv_heads * 8), kv_heads, rotary

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, 8)).transpose(1, 2)
        k, v = (f(memory).unflatten(-1, (self.kv_heads, 8)).transpose(1, 2) for f in (self.k, self.v))
        if self.rotary:  # of the first half, as GPT-NeoX has it
            k = torch.cat([k[..., :4] * 1.5, k[..., 4:]], dim=-1)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kv_heads != HEADS)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_ordinary_attention_is_left_untouched_and_not_logged(
    kv_heads: int, rotary: bool, logged: Callable
) -> None:
    model, capture = Ordinary(kv_heads, rotary), Capture()
    with torch.no_grad():
        torch.compile(model, backend=capture)(*make_inputs()[:1], torch.randn(BATCH, KEYS, HIDDEN).double())
    assert str(capture.after[0].graph) == str(capture.before[0].graph)
    assert logged() == []


class NormAfterJoin(CompactMLA):
    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        return self.attend(x, self.join(kv_c, k_pe), self.keys_and_values(kv_c)[1])

    def join(self, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        return F.rms_norm(self.cat(self.keys_and_values(kv_c)[0], k_pe), (NOPE + ROPE,))

    def cat(self, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        return torch.cat([k_nope, k_pe[:, None].expand(-1, HEADS, -1, -1)], dim=-1)

    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v)


class NormBeforeJoin(NormAfterJoin):
    def join(self, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        return self.cat(F.layer_norm(self.keys_and_values(kv_c)[0], (NOPE,)), k_pe)


class Plain(NormAfterJoin):
    def join(self, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        return self.cat(self.keys_and_values(kv_c)[0], k_pe)


class Biased(Plain):
    def __init__(self) -> None:
        super().__init__(bias=True)


class Dropout(Plain):
    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12)


class UsedTwice(Plain):
    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(x, k, v) + v.mean()


class WrittenBetween(Plain):
    def join(self, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        k = super().join(kv_c, k_pe)
        kv_c.add_(1)
        return k


class WrittenKeys(Plain):
    def join(self, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        k = super().join(kv_c, k_pe)
        k[..., :2] *= 2
        return k


class NormedValues(Plain):
    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(x, k, torch.tanh(v))


class Cast(Plain):
    def join(self, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        return super().join(kv_c, k_pe).float().double()


class Grouped(Plain):
    """Half of the query heads have keys of their own."""

    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)
        return F.scaled_dot_product_attention(torch.cat([q, q], 1), k, v, enable_gqa=True)


class OtherLatents(Plain):
    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        return self.attend(x, self.join(kv_c, k_pe), self.keys_and_values(kv_c.flip(1))[1])


# Module -> the part of the reason that names what is in the way, "" where keys are not joined.
NEAR_MISSES: dict[type[nn.Module], str] = {
    NormAfterJoin: "",
    Cast: "",
    NormBeforeJoin: "`layer_norm`",
    Biased: "`linear` has a bias",
    Dropout: "model.eval()",
    UsedTwice: "`mean`",
    WrittenBetween: "`add_`",
    WrittenKeys: "`imul`",
    NormedValues: "values",
    OtherLatents: "latents",
    Grouped: "heads",
}


@pytest.mark.long
@pytest.mark.parametrize("module", NEAR_MISSES)
def test_what_nearly_is_mla_is_left_untouched_and_the_log_says_why_where_keys_are_joined(
    module: type[nn.Module], logged: Callable
) -> None:
    with torch.no_grad():
        captured = graph_of(module(), *make_inputs())
    erase_dead(captured[0].graph)
    before = str(captured[0].graph)
    assert str(absorb_mla(*captured).graph) == before
    for message in logged() or [""]:
        assert message.startswith(f"not fused: {module.__name__} (test_absorb_mla.py:" if message else "")
        assert NEAR_MISSES[module] in message


def test_a_plain_one_of_these_is_absorbed() -> None:
    assert not expanded_tensors(run(Plain(), *make_inputs()))


def test_a_call_that_needs_a_gradient_is_left_expanded(logged: Callable) -> None:
    capture = Capture([absorb_mla])
    module = Plain().requires_grad_()
    torch.compile(module, backend=capture, fullgraph=True)(*make_inputs()).sum().backward()
    assert module.kv_up.weight.grad is not None
    assert expanded_tensors(capture.after[0])
    assert "torch.no_grad()" in logged()[0]


def test_under_autocast_it_is_left_expanded(logged: Callable) -> None:
    capture = Capture([absorb_mla])
    inputs = make_inputs(dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(Plain().bfloat16(), backend=capture, fullgraph=True)(*inputs)
    assert "autocast" in logged()[0]


def test_prefill_is_left_expanded(logged: Callable) -> None:
    gm = run(Plain(), *make_inputs(q_len=KEYS))
    assert expanded_tensors(gm)
    assert re.search(rf"not fused: .*\b{KEYS} query tokens.*\b{KEYS} keys", logged()[0])


def test_a_graph_for_many_lengths_serves_those_of_its_form_only() -> None:
    capture = Capture([absorb_mla])
    module = Plain()
    compiled = torch.compile(copy.deepcopy(module), backend=capture, fullgraph=True)
    for q_len in (2, 3, KEYS, KEYS - 1, 4):
        inputs = make_inputs(q_len)
        torch._dynamo.mark_dynamic(inputs[0], 1)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), module(*inputs), atol=1e-10, rtol=0)
    assert [bool(expanded_tensors(gm)) for gm in capture.after] == [False, True]


def test_the_cost_model_knows_decode_from_prefill() -> None:
    def pays(q_len: int, keys: int) -> bool:
        return absorbing_pays(q_len, keys, rank=512, nope=128, rope=64, v=128)

    assert all(pays(q_len, keys) for q_len in (1, 2, 8) for keys in (16, 1000, 100_000))
    assert pays(64, 4096)
    assert not any(pays(length, length) for length in (128, 512, 4096))
    assert not pays(1024, 32_768)


# --- how it is rewritten


@pytest.mark.long
def test_sizes_may_be_dynamic_and_no_guard_is_added() -> None:
    """Batch and keys unknown to the compiler: one graph serves all."""
    capture = Capture([absorb_mla])
    module = Plain()
    compiled = torch.compile(copy.deepcopy(module), backend=capture, fullgraph=True)
    for batch, keys in ((2, 40), (3, 50), (7, 33)):
        x, kv_c, k_pe = (
            torch.randn(batch, n, w).double() for n, w in ((2, HIDDEN), (keys, RANK), (keys, ROPE))
        )
        for tensor, dims in ((x, (0,)), (kv_c, (0, 1)), (k_pe, (0, 1))):
            for dim in dims:
                torch._dynamo.mark_dynamic(tensor, dim)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, kv_c, k_pe), module(x, kv_c, k_pe), atol=1e-10, rtol=0)
    assert len(capture.after) == 1
    assert "scaled_dot_product_attention" not in ops(capture.after[0])
    assert len(nodes_of(capture.after[0], "mla_masked_decode")) == 1


def test_new_nodes_carry_example_values_and_the_attentions_provenance() -> None:
    with torch.no_grad():
        found = graph_of(
            StaticCacheMLA(batched), torch.randn(BATCH, 1, HIDDEN).double(), torch.tensor([1, 2])
        )
    old = {node.name for node in found[0].graph.nodes}
    (attention,) = nodes_of(found[0], "scaled_dot_product_attention")
    line = attention.meta["stack_trace"]
    new = [node for node in absorb_mla(*found).graph.nodes if node.name not in old]
    assert len(new) > 10
    assert all("example_value" in node.meta and node.meta["stack_trace"] == line for node in new)


def test_half_precision_is_as_near_the_truth_as_the_fused_kernel() -> None:
    torch.manual_seed(1)
    module, inputs = Plain(), make_inputs(keys=400)
    truth = module(*inputs)
    half, few = copy.deepcopy(module).bfloat16(), [x.bfloat16() for x in inputs]
    capture = Capture([absorb_mla])
    with torch.no_grad():
        errors = [
            float((out.double() - truth).square().mean().sqrt())
            for out in (half(*few), torch.compile(half, backend=capture)(*few))
        ]
    assert len(nodes_of(capture.after[0], "mla_masked_decode")) == 1
    assert errors[1] < 1.5 * errors[0]


def test_a_graph_with_our_op_is_searched_first_and_one_without_for_nothing_else() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    assert pipeline.passes_for(fx.GraphModule(nn.Module(), graph)) == [absorb_mla]
    assert pipeline.PASSES[0] is absorb_mla
