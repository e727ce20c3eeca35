"""A user's own module in an engine: drafters that read its aux hidden states draft by the definition, computed from
whole texts in plain float64 attention; `examples/own_module_drafter.py` has the module."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile import Engine, MLAError
from mla_compile.batch import ForwardOutput
from mla_compile.speculate import DrafterKind
from mla_compile.testing import shadow_check
from tests.counters import compile_counters
from tests.engine.engines import SIZES
from tests.engine.watching import Watch
from tests.speculate.eagle3_heads import DefinedHead, config_of, weights_of, write_head

K = 3
SHARED = [7, 8, 9, 10, 11, 12, 13, 14, 15]
PROMPTS = [[*SHARED, 1], [2, 3], [*SHARED, 4, 5], [*SHARED[:8], 6], list(range(20, 41))]
Outputs = Callable[[list[int]], Sequence[Tensor]]
Definition = Callable[[list[int], int], list[int]]
"""From a text and a number of drafts to the drafts behind it."""


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples")
        yield importlib.import_module("own_module_drafter")


@pytest.fixture
def model(example: ModuleType) -> Any:
    model = example.Served(num_layers=2).requires_grad_(False).double()
    model.head.weight.mul_(3)  # so that no two logits are nearly equal
    return model


@pytest.fixture
def head(example: ModuleType, tmp_path: Path) -> Path:
    config = config_of(example.HIDDEN, [1, 0], vocab_size=example.VOCAB, fc_norm=True, norm_output=True)
    return write_head(tmp_path, config, weights_of(config))


def outputs_of(model: Any, example: ModuleType) -> Outputs:
    """A function from a text to the outputs of all layers: causal attention over keys and values of every head."""
    heads, nope, rope, rank = example.HEADS, example.NOPE, example.ROPE, example.RANK
    rotate = importlib.import_module("own_module").rotate

    def outputs(text: list[int]) -> Sequence[Tensor]:
        n, found = len(text), []
        x, positions = model.embed(torch.tensor(text)), torch.arange(n)
        hidden_keys = torch.ones(n, n, dtype=torch.bool).triu(1)
        for layer in model.layers:
            y = layer.norm_1(x)
            q_nope, q_pe = layer.q_proj(y).view(n, heads, nope + rope).split([nope, rope], dim=-1)
            latent, k_pe = layer.kv_proj(y).split([rank, rope], dim=-1)
            latent = layer.kv_norm(latent)
            scores = torch.einsum("qhd,hdr,kr->hqk", q_nope, layer.w_uk, latent)
            scores = scores + torch.einsum("qhd,kd->hqk", rotate(q_pe, positions), rotate(k_pe, positions))
            weights = (scores * (nope + rope) ** -0.5).masked_fill(hidden_keys, -torch.inf).softmax(-1)
            values = torch.einsum("kr,hrv->khv", latent, layer.w_uv)
            x = x + layer.o_proj(torch.einsum("hqk,khv->qhv", weights, values).flatten(1))
            x = x + layer.down(F.gelu(layer.up(layer.norm_2(x))))
            found.append(x)
        return found

    return outputs


def continuation(model: Any, outputs: Outputs, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from the whole text."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(model.logits(model.norm(outputs(text)[-1][-1])).argmax()))
    return text[len(prompt) :]


def eagle3(example: ModuleType, model: Any, head: Path) -> tuple[dict[str, Any], Definition]:
    defined = DefinedHead(head, outputs_of(model, example), model.embed.weight)
    return {"drafter": "eagle3", "drafter_model": head}, defined.drafts


def own_heads(example: ModuleType, model: Any, head: Path) -> tuple[dict[str, Any], Definition]:
    inputs = len(example.AUX_LAYERS) * example.HIDDEN
    outputs, weights = outputs_of(model, example), torch.randn(inputs, K * example.VOCAB, dtype=torch.float64)

    def drafts(text: list[int], count: int) -> list[int]:
        all_outputs = outputs(text[:-1])
        aux = torch.cat([all_outputs[i][-1] for i in example.AUX_LAYERS])
        return (aux @ weights).view(K, -1).argmax(dim=-1)[:count].tolist()

    return {"drafter": DrafterKind("heads", lambda settings: example.Heads(weights))}, drafts


@pytest.mark.parametrize("few_pages", [False, True])
@pytest.mark.parametrize("drafter", [eagle3, own_heads])
def test_drafts_are_those_of_the_definition_in_decode_steps_prompts_and_mixed_steps(
    example: ModuleType,
    model: Any,
    head: Path,
    drafter: Callable[..., tuple[dict[str, Any], Definition]],
    few_pages: bool,
) -> None:
    """Prompts come one after the other, in chunks beside rows that decode; they share pages and, where there are few,
    rows are preempted."""
    (settings, defined), watch = drafter(example, model, head), Watch()
    outputs = outputs_of(model, example)
    settings |= {"drafter": watch.kind(settings["drafter"]), "num_speculative_tokens": K}
    settings |= {"num_pages": 19 if few_pages else None, "max_tokens_per_step": 4 * (1 + K) + 3}
    of = Engine(model, **SIZES, **settings)
    for spec in model.cache_specs():
        spec.cache.fill_(torch.nan)
    requests, num_checked = [], 0
    while of.has_work() or len(requests) < len(PROMPTS):
        if len(requests) < len(PROMPTS) and of.stats.num_steps >= 3 * len(requests):
            requests.append(of.add(PROMPTS[len(requests)], max_new_tokens=16))
        of.step()
        for request, row in watch.rows(requests):
            if request.completion.token_ids and watch.state.active[row]:
                text = [*request.prompt, *request.completion.token_ids]
                count = min(K, request.max_len - len(text))  # what is behind the row's end is not drafted
                assert watch.state.drafts[row, :count].tolist() == defined(text, count), (len(text), count)
                num_checked += 1
    assert num_checked > 50 and of.stats.num_mixed_steps > 5 and of.stats.num_reused_tokens > 0
    assert (of.stats.num_preemptions > 0) == few_pages
    for request in requests:
        assert request.completion.token_ids == continuation(model, outputs, request.prompt, 16)


@pytest.mark.long
@pytest.mark.usefixtures("unlowered", "compiled_mixed_steps")
@pytest.mark.parametrize("drafter", [eagle3, own_heads])
def test_compiled_steps_give_the_tokens_of_eager_ones(
    example: ModuleType, model: Any, head: Path, drafter: Callable[..., tuple[dict[str, Any], Definition]]
) -> None:
    settings, _ = drafter(example, model, head)
    expected = Engine(model, num_speculative_tokens=0, **SIZES).generate(PROMPTS, max_new_tokens=12)
    compiled = Engine(model, num_speculative_tokens=K, **settings, **SIZES | {"compile": True})
    torch._dynamo.utils.counters.clear()
    got = compiled.generate(PROMPTS, max_new_tokens=12)
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert compile_counters()["graphs"] == 3


def test_steps_are_checked_by_their_eager_run(model: Any, head: Path) -> None:
    of = Engine(model, num_speculative_tokens=K, drafter_model=head, **SIZES)
    with shadow_check(of):
        of.generate(PROMPTS[:3], max_new_tokens=8)


class Lacking:
    """A module without some members."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        self._model, self._names = model, names

    def __call__(self, *inputs: Any) -> ForwardOutput:
        return self._model(*inputs)

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._model, name)


@pytest.mark.parametrize("name", ["hidden_size", "num_aux_layers", "embed"])
def test_a_member_that_a_head_needs_and_the_module_lacks_is_named(model: Any, head: Path, name: str) -> None:
    with pytest.raises(
        MLAError, match=f"^model: expected a model with `{name}`, for an EAGLE-3 head, got Lacking"
    ):
        Engine(Lacking(model, name), drafter_model=head, **SIZES)


def test_a_member_that_an_engine_needs_and_the_module_lacks_is_named(model: Any) -> None:
    lacking = Lacking(model, "prepare", "has_mtp")
    with pytest.raises(
        MLAError, match="that an engine can serve, got Lacking without prepare, has_mtp; pass"
    ):
        Engine(lacking, **SIZES)


def test_a_drafter_that_reads_layers_of_a_module_without_any_is_refused(
    example: ModuleType, model: Any
) -> None:
    kind = DrafterKind("heads", lambda settings: example.Heads(torch.zeros(1, 1)))
    with pytest.raises(MLAError, match=r"indices of the 0 layers .* give the model `num_aux_layers`"):
        Engine(Lacking(model, "num_aux_layers"), num_speculative_tokens=K, drafter=kind, **SIZES)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda output: output.hidden, "model: expected a forward that returns a ForwardOutput, got Tensor"),
        (
            lambda output: ForwardOutput(output.hidden),
            r"outputs of layers \(1, 0\) in `aux` .* got 0 tensors",
        ),
    ],
    ids=["a tensor", "no aux hidden states"],
)
@pytest.mark.parametrize("compile", [False, True])
def test_a_forward_that_returns_something_else_is_refused(
    model: Any,
    head: Path,
    monkeypatch: pytest.MonkeyPatch,
    returns: Callable[[ForwardOutput], object],
    message: str,
    compile: bool,
) -> None:
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *inputs: returns(forward(self, *inputs)))
    of = Engine(model, drafter_model=head, **SIZES | {"compile": compile})
    with pytest.raises(MLAError, match=message):
        of.generate(PROMPTS[:1], max_new_tokens=4)
