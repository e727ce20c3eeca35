"""`batch_invariant=True`: a request's bits in any mix, and the report of `check_batch_invariance`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from mla_compile import MLABatch, MLAError, SamplingParams
from mla_compile.models.grouped_query import GroupedQueries, GroupedQueryAttention
from mla_compile.passes.nodes import op_name
from mla_compile.testing import check_batch_invariance
from tests.models_for_tests import one_layer_model, tiny_model

PROMPTS = [[1 + (7 * i + 3 * j * j) % 20 for j in range(n)] for i, n in enumerate((3, 40, 17, 1))]
SAMPLED = [
    SamplingParams(temperature=0.8, top_p=0.9, top_k=30, presence_penalty=0.3, logprobs=3, seed=3),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.2, logprobs=3, seed=4),
]
"""One compiled step serves both."""


class Unfused(fx.Interpreter):
    """Runs a graph node by node.

    On the CPU torch computes most of a tensor by vectors and its end number by number, and these two differ in the last
    bit of functions like `exp`. So they are computed in float64 here. Inductor's code has one way for all numbers.
    """

    def run_node(self, n: fx.Node) -> object:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if op_name(n) in ("silu", "sigmoid", "exp", "log", "sin", "cos", "rsqrt"):
            x: torch.Tensor = args[0]
            return getattr(self, n.op)(n.target, (x.double(), *args[1:]), kwargs).to(x.dtype)
        return super().run_node(n)


@pytest.fixture
def passes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what our passes made of a graph without Inductor, which takes a minute a graph."""

    def lower(gm: fx.GraphModule, *args: object) -> Callable[..., object]:
        return Unfused(gm).run

    monkeypatch.setattr("mla_compile.backend.lower_with_inductor", lower)
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.usefixtures("passes_alone")
def test_requests_have_the_same_bits_alone_and_in_any_mix() -> None:
    model = tiny_model(torch.float32)
    report = check_batch_invariance(
        model, PROMPTS, SAMPLED, max_new_tokens=8, drafts=(1,), max_rows=3, page_size=4
    )
    assert report.num_requests == 2 * 6 and report.num_tokens == 8 * report.num_requests
    assert report.num_latents > 100
    assert not report.num_different, report


@pytest.mark.slow
def test_inductors_code_too() -> None:
    report = check_batch_invariance(
        tiny_model(torch.float32), PROMPTS, max_new_tokens=12, drafts=(0, 2), max_rows=3, page_size=4
    )
    assert not report.num_different, report


@pytest.mark.long
@pytest.mark.usefixtures("passes_alone")
def test_a_bit_of_one_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose output depends on the number of tokens beside it, by one bit of a few."""
    model = tiny_model(torch.float32)
    layer = model.layers[0]
    forward = layer.forward

    def leaky(hidden: torch.Tensor, *args: object) -> torch.Tensor:
        return forward(hidden, *args) * (1 + 2.0**-23 * torch.full_like(hidden[:, :1], hidden.shape[0]))

    monkeypatch.setattr(layer, "forward", leaky)
    report = check_batch_invariance(
        model, PROMPTS, max_new_tokens=6, drafts=(0,), rounds=1, max_rows=3, page_size=4
    )
    assert report.num_different > 0
    assert "the latents of layers.1.self_attn at position" in str(report), report


@pytest.mark.long
@pytest.mark.usefixtures("passes_alone")
@pytest.mark.parametrize("leak", [0, 2.0**-23])
def test_caches_of_several_widths_and_heads_are_compared(
    leak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that also keeps a key and a value for each of two heads; with a leak they depend on the batch."""
    model = one_layer_model(torch.float32)
    shapes = GroupedQueries(num_heads=2, num_kv_heads=2, head_dim=8, norm_eps=None)
    torch.manual_seed(0)
    extra = GroupedQueryAttention(shapes, input_size=32, output_size=32).requires_grad_(False)
    specs, layer = [*model.cache_specs(), *extra.cache_specs("extra", "target")], model.layers[0]
    forward = layer.forward

    def writing(
        hidden: torch.Tensor, rope: Any, batch: MLABatch, selected: list[torch.Tensor]
    ) -> torch.Tensor:
        segments = [segment for segment in (batch.decode, batch.prefill) if segment is not None]
        slots = torch.cat([segment.slot_mapping for segment in segments])
        x = hidden * (1 + leak * torch.full_like(hidden[:, :1], hidden.shape[0]))
        extra._append(x, rope, slots, batch.page_size)
        return forward(hidden, rope, batch, selected)

    monkeypatch.setattr(layer, "forward", writing)
    monkeypatch.setattr(model, "cache_specs", lambda: specs)
    report = check_batch_invariance(
        model, PROMPTS, max_new_tokens=6, drafts=(0,), rounds=1, max_rows=3, page_size=4
    )
    assert report.num_latents > 50
    assert (report.num_different > 0) == (leak > 0), report
    assert all("the latents of extra at position" in each for each in report.differences), report


def test_a_mistake_is_named() -> None:
    model = tiny_model(torch.float32)
    with pytest.raises(MLAError, match="rounds: expected an integer >= 1, got 0"):
        check_batch_invariance(model, PROMPTS, rounds=0)
    with pytest.raises(MLAError, match="at least one of each"):
        check_batch_invariance(model, [])
    with pytest.raises(MLAError, match=r"settings: expected none of .*, got num_pages; remove"):
        check_batch_invariance(model, PROMPTS, num_pages=9)
