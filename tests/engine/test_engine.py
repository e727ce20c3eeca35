"""The engine around the step: the owner of its caches, odd arguments, chunks of prompts."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

import pytest
import torch

from benchmarks.start import start
from mla_compile import Engine, MLAError, SamplingParams
from mla_compile.batch import ForwardOutput
from mla_compile.caches import CacheSpec
from mla_compile.engine import Completion, EngineConfig
from mla_compile.engine.memory import plan_memory
from mla_compile.engine_settings import EngineFields, EngineSettings
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.ops.attention import decode_backends
from mla_compile.ops.attention.decode import decode_torch
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.speculate import (
    DecodeState,
    DrafterKind,
    DrafterSettings,
    PackedChunks,
    PromptChunk,
    PromptChunks,
    Verified,
)
from tests.engine.engines import engine, pool_of
from tests.integrations.families import stock_model
from tests.kernel_cases import BACKENDS
from tests.models_for_tests import tiny_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]


def tokens(of: Engine, **settings: object) -> list[list[int]]:
    return [c.token_ids for c in of.generate(PROMPTS, **{"max_new_tokens": 20, **settings})]


@pytest.mark.long
@pytest.mark.parametrize("spare", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("k", [0, 3])
def test_prompts_in_chunks_leave_the_tokens_and_the_drafts_of_whole_prompts(k: int, spare: int) -> None:
    """Equal drafts take equal numbers of steps."""
    whole = engine(k).generate(PROMPTS, max_new_tokens=20)
    chunked = engine(k, max_rows=3, max_tokens_per_step=3 * (1 + k) + spare)
    assert chunked.generate(PROMPTS, max_new_tokens=20) == whole


def test_a_page_whose_drafters_latents_are_not_final_is_not_shared() -> None:
    """A row that ends with its first token has none of the MTP layer's that were made of this token."""
    of, prompt = engine(3), PROMPTS[0][:4]  # a page
    (first,) = of.generate([prompt], max_new_tokens=1)
    text = [*prompt, *first.token_ids, 11]
    assert of.generate([text], max_new_tokens=12) == engine(3).generate([text], max_new_tokens=12)
    assert of.stats.num_reused_tokens == 0


@pytest.mark.long
def test_a_start_that_fails_leaves_no_row_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    of = engine(max_rows=2)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(of.model, "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            start(of, PROMPTS[:2], 4, [SamplingParams()] * 2, [])
    assert tokens(of) == tokens(engine())


@pytest.mark.long
def test_more_prompts_than_rows_wait_for_their_turn() -> None:
    assert tokens(engine(max_rows=2)) == tokens(engine())


@pytest.mark.parametrize("max_rows", [2, 4])
@pytest.mark.parametrize("k", [0, 3])
def test_tokens_chosen_on_the_host_are_those_of_the_step(k: int, max_rows: int) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def choose(logits: torch.Tensor, drafts: torch.Tensor, completions: Sequence[Completion]) -> torch.Tensor:
        assert logits.shape[:2] == (len(completions), drafts.shape[1] + 1)
        seen.extend(
            (c.token_ids[:], d) for c, d in zip(completions, drafts.tolist()) if c.finish_reason is None
        )
        return logits.argmax(dim=-1)

    one = engine(k, max_rows=max_rows)
    out = [[], *one.stream(PROMPTS, max_new_tokens=20, choose=choose)][-1]
    assert [c.token_ids for c in out] == tokens(engine(k))
    assert all(len(drafts) == (k if text else 0) for text, drafts in seen), "the first token follows no draft"
    assert [c.num_steps for c in out] == [c.num_steps for c in engine(k).generate(PROMPTS, max_new_tokens=20)]


def test_a_chosen_token_that_no_draft_guessed_is_what_the_next_step_reads() -> None:
    """Every row is made to say 7, 8, 9, ..., which the drafter cannot know."""

    def choose(logits: torch.Tensor, drafts: torch.Tensor, completions: Sequence[Completion]) -> torch.Tensor:
        start = torch.tensor([[7 + len(c.token_ids)] for c in completions])
        return start + torch.arange(logits.shape[1])

    out = [[], *engine().stream(PROMPTS, max_new_tokens=10, choose=choose)][-1]
    assert [c.token_ids for c in out] == [list(range(7, 17))] * 3


def test_what_a_chooser_must_not_return_is_refused_by_name() -> None:
    mine, one = engine(), torch.full((1, 1), 1)
    for wrong in (None, one.float(), one[0], one * 10**6, -one):
        with pytest.raises(MLAError, match=r"^choose: expected int64 \[1, 1\] of ids in \[0, \d+\), got "):
            list(mine.stream(PROMPTS[:1], max_new_tokens=4, choose=lambda *_, wrong=wrong: wrong))
    assert tokens(mine) == tokens(engine())


def test_an_engine_whose_caches_a_newer_one_replaced_says_so() -> None:
    old = engine()
    Engine(old.model, max_rows=1, max_model_len=32, compile=False)
    with pytest.raises(MLAError, match="use a model's newest one only"):
        tokens(old)


def test_an_engine_whose_model_has_moved_or_has_other_layers_says_so() -> None:
    for change in (
        lambda model: model.to(torch.bfloat16),
        lambda model: model.layers.append(model.layers[0]),
    ):
        old = engine()
        change(old.model)
        with pytest.raises(MLAError, match="make an engine after moving the model or changing its layers"):
            tokens(old)


@pytest.mark.long
def test_a_refused_engine_leaves_the_models_caches_alone() -> None:
    mine = engine()
    expected = tokens(mine)
    for bad in (
        {"num_speculative_tokens": -1},
        {"num_speculative_tokens": 1.5},
        {"mode": "fast"},
        {"max_rows": 0},
        {"capture_budget": -1},
        {"capture_budget": 1e9},
        {"prefix_caching": "no"},
    ):
        with pytest.raises(MLAError, match=next(iter(bad))):
            Engine(mine.model, **bad)
    assert tokens(mine) == expected


def reference_that_counts(operands: DecodeOperands) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append(operands)
    return decode_torch(operands)


CALLS: list[DecodeOperands] = []


@pytest.mark.long
def test_the_decode_backend_that_was_asked_for_runs_and_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = BACKENDS["reference"]
    mine = replace(reference, name="mine", function=f"{__name__}:reference_that_counts")
    monkeypatch.setattr(decode_backends, "DECODE_BACKENDS", (reference, mine))
    decode_backends.select_backend.cache_clear()
    expected = tokens(engine())
    assert not CALLS
    assert tokens(engine(decode_backend="mine")) == expected
    assert {operands.q_len for operands in CALLS} == {1, 4}, "verification and the drafts that follow"
    monkeypatch.undo()
    decode_backends.select_backend.cache_clear()


def test_a_decode_backend_that_cannot_run_is_refused_at_once() -> None:
    names = [row.name for row in decode_backends.DECODE_BACKENDS if "cpu" in (row.device_types or ("cpu",))]
    assert {"reference", "by_token"} <= {*names}
    some = ", ".join(names)
    with pytest.raises(
        MLAError, match=rf"^decode_backend: .*\({some}\), got triton, which runs on cuda, not cpu"
    ):
        engine(decode_backend="triton")
    with pytest.raises(MLAError, match=r"^decode_backend: expected one of .*got 'fast'"):
        engine(decode_backend="fast")


def test_prompts_without_a_row_are_not_started() -> None:
    with pytest.raises(MLAError, match=r"^prompts: expected 1 to 4, .*, got 5"):
        start(engine(), PROMPTS[:1] * 5, 4, [SamplingParams()] * 5, [])


@pytest.mark.parametrize("wrong", [torch.zeros(1, 1).long(), torch.zeros(1).long(), torch.zeros(1, 2), None])
def test_drafts_of_another_shape_or_dtype_are_refused(wrong: torch.Tensor | None) -> None:
    class Wrong:
        def fill(self, chunks: object, hidden: object) -> None:
            pass

        def draft(self, state: object, verified: object) -> torch.Tensor | None:
            return wrong

    mine = engine(2, max_rows=1, drafter=DrafterKind("wrong", lambda _: Wrong()))
    got = "None" if wrong is None else rf"torch\.{str(wrong.dtype)[6:]}"
    with pytest.raises(MLAError, match=rf"^draft: expected int64 \[rows, 2\] from the drafter, got {got}"):
        mine.generate(PROMPTS[:1], max_new_tokens=4)


def test_a_wrong_kind_of_drafter_is_refused_where_it_is_made() -> None:
    with pytest.raises(MLAError, match=r"^build: expected "):
        DrafterKind("mine", build=None)


def test_caches_and_logits_are_those_that_a_model_says_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    first, *others = model.cache_specs()
    first.layer.kv_cache = torch.zeros(33, 4, first.width)
    model.cache_specs = lambda: others  # type: ignore[method-assign]
    with pytest.raises(
        MLAError, match=rf"^cache_specs: expected .*layer {first.name}.*, which has a kv_cache"
    ):
        engine(2, model)
    model.cache_specs = lambda: [first.name]  # type: ignore[method-assign,list-item]
    with pytest.raises(MLAError, match=r"^cache_specs: expected CacheSpecs.*, got a str$"):
        engine(2, model)
    model = tiny_model()
    model.default_sampling = {"temprature": 1}
    with pytest.raises(MLAError, match=r"^model.default_sampling: expected .*fields.*temprature"):
        engine(2, model)
    model = tiny_model()
    width = model.vocab_size
    monkeypatch.setattr(type(model), "vocab_size", width - 3)
    with pytest.raises(MLAError, match=rf"^model.vocab_size: expected {width}, .* got {width - 3}$"):
        tokens(engine(2, model))


class WithCache(torch.nn.Module):
    """A drafter with a cache of its own, that reads two layers of the target."""

    aux_layers = (1, 0)

    def __init__(self, settings: DrafterSettings, lookahead: int) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.register_buffer("kv_cache", None, persistent=False)
        self.weight = torch.nn.Parameter(torch.zeros(3, 5, device=settings.model.device), requires_grad=False)
        self.seen: list[ForwardOutput] = []

    def cache_specs(self) -> list[CacheSpec]:
        return [CacheSpec("own", "drafter", 6, torch.int8, self.weight.device, self, self.lookahead)]

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        self.seen.append(output)
        self.kv_cache.flatten(0, 1)[chunks.segment.slot_mapping] = 1

    def draft(self, state: DecodeState, verified: Verified) -> torch.Tensor:
        self.seen.append(verified.output)
        return verified.targets[:, : verified.k]


def with_cache(lookahead: int) -> DrafterKind:
    return DrafterKind("own", lambda settings: WithCache(settings, lookahead))


def test_a_drafter_owns_weights_and_caches_and_reads_the_layers_that_it_asks_for() -> None:
    model = tiny_model()
    mine = engine(2, model, drafter=with_cache(3))
    # A drafter that is built twice would show in memory alone.
    drafter = mine._launcher.steps._decoders[False].drafter
    assert drafter is mine._launcher.steps._decoders[True].drafter, "one for all steps"
    assert tuple(drafter.kv_cache.shape) == (mine.config.num_pages, 4, 6)
    assert pool_of(mine).lookahead == 3
    specs = model.cache_specs()
    assert specs[-1].owner == "drafter" and specs[-1].layer.kv_cache is None, "nothing runs the MTP layer"
    assert tokens(mine) == tokens(engine(0, tiny_model()))
    assert int(drafter.kv_cache.count_nonzero()) > 0
    for output in drafter.seen:
        assert [tuple(each.shape) for each in output.aux] == [tuple(output.hidden.shape)] * 2
    first, last = drafter.seen[0].aux[1], drafter.seen[0].aux[0]
    assert torch.equal(model.norm(last), drafter.seen[0].hidden) and not torch.equal(first, last)
    config = mine.config
    planned = (
        plan_memory(model, config).cache - plan_memory(model, replace(config, num_speculative_tokens=0)).cache
    )
    assert planned == config.num_pages * 4 * 6


def test_a_layer_that_the_forward_does_not_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ((2,), (-1,), ("0",)):
        monkeypatch.setattr(WithCache, "aux_layers", wrong)
        with pytest.raises(MLAError, match=r"^aux_layers: expected indices of the 2 layers"):
            engine(2, tiny_model(), drafter=with_cache(0))
    target = TransformersTarget(stock_model("deepseek_v3", num_hidden_layers=1), None)
    monkeypatch.setattr(WithCache, "aux_layers", (1,))
    with pytest.raises(MLAError, match=r"^aux_layers: expected indices of the 1 layers"):
        Engine(target, num_speculative_tokens=1, drafter=with_cache(0), compile=False)


def test_a_wrong_lookahead_is_refused_before_anything_is_allocated() -> None:
    for wrong in (-1, 1.5):
        with pytest.raises(MLAError, match=r"^lookahead: expected an integer >= 0"):
            engine(2, tiny_model(), drafter=with_cache(wrong))


def test_the_settings_that_an_engine_takes_are_those_of_its_config() -> None:
    assert list(EngineSettings.__annotations__) == [field.name for field in fields(EngineFields)]


@pytest.mark.long
def test_an_engine_may_have_the_config_of_another() -> None:
    first = engine(2, max_rows=3)
    for config in (first.config, replace(first.config, max_rows=2)):
        assert tokens(Engine(tiny_model(), config)) == tokens(engine(0, tiny_model()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": {"max_rows": 2}}, "^config: expected an EngineConfig or None, got dict"),
        (
            {"config": EngineConfig(), "max_rows": 2},
            "^config: .*max_rows.*dataclasses.replace",
        ),
    ],
)
def test_a_config_that_is_none_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MLAError, match=message):
        Engine(tiny_model(), **settings)


@pytest.mark.long
def test_prompts_that_are_padded_for_capture_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with captured mixed steps: padding chunks write to no page, and poisoned pages reveal reads."""
    prompts = [*PROMPTS, [1] * 20]
    plain, padded = (engine(max_rows=3, max_tokens_per_step=15) for _ in range(2))
    expected = plain.generate(prompts, max_new_tokens=12)
    pack, sizes = PackedChunks.pack, []

    def pad(chunks: Sequence[PromptChunk], *args: Any, **kwargs: Any) -> PackedChunks:
        packed = pack(chunks, *args, **{**kwargs, "pad": True})
        sizes.append(len(packed.token_ids))
        return packed

    monkeypatch.setattr(PackedChunks, "pack", pad)
    got = padded.generate(prompts, max_new_tokens=12)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert sizes and set(sizes) == {16}


@pytest.mark.long
@pytest.mark.usefixtures("compiled_mixed_steps")
@pytest.mark.parametrize("k", [0, 2])
def test_texts_that_are_read_in_parts_have_the_tokens_of_plain_decoding(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded, a few keys at a time, and with as little as one prompt token a step."""
    prompts = [*PROMPTS, [1] * 20, [2, 3] * 9]
    expected = engine(0, max_rows=4).generate(prompts, max_new_tokens=8)
    for module in ("ops.attention.segments", "packing", "engine.config", "engine.capture"):
        monkeypatch.setattr(f"mla_compile.{module}.MAX_KEYS", 8)
    for tokens in (3 * (1 + k) + 1, 3 * (1 + k) + 11):
        mine = engine(k, max_rows=3, max_tokens_per_step=tokens)
        assert [c.token_ids for c in mine.generate(prompts, max_new_tokens=8)] == [
            c.token_ids for c in expected
        ]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_mixed_steps")
def test_compiled_mixed_steps_give_the_tokens_of_eager_ones() -> None:
    """Prompts in chunks beside rows that decode, in two variants of the step."""
    prompts, penalised = [*PROMPTS, [1] * 20], SamplingParams(frequency_penalty=0.5, logprobs=2)
    eager, compiled = (
        engine(
            model=tiny_model(torch.float32),
            max_rows=3,
            max_tokens_per_step=15,
            compile=compile,
        )
        for compile in (False, True)
    )
    for params in (SamplingParams(), penalised):
        expected, got = (e.generate(prompts, params, max_new_tokens=12) for e in (eager, compiled))
        assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert compiled.stats.num_mixed_steps > 0


def test_streams_side_by_side_have_the_tokens_of_one_list() -> None:
    shared = engine()
    streams = (shared.stream([prompt], max_new_tokens=20) for prompt in PROMPTS)
    finals = [[c for c in column if c][-1] for column in zip(*zip_longest(*streams))]
    assert [completion.token_ids for (completion,) in finals] == tokens(engine())


@pytest.mark.long
def test_an_engine_first_used_in_inference_mode_works_outside_it_too() -> None:
    with torch.inference_mode():
        mine = engine()
        inside = tokens(mine)
    assert tokens(mine) == inside


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_any_number_of_stop_ids_may_be_given(count: int) -> None:
    plain = tokens(engine())
    others = [token for token in range(40) if token not in plain[0]]
    stop_ids = [plain[0][5], *others[: count - 1]]
    assert len(stop_ids) == count
    ended = engine().generate(PROMPTS, max_new_tokens=20, stop_ids=stop_ids)
    assert ended[0].token_ids == plain[0][: plain[0].index(stop_ids[0]) + 1]
    assert ended[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[]], {}, r"prompts\[0\]: expected at least one token"),
        ([[1], [1, 40]], {}, r"prompts\[1\]: expected token ids in \[0, 40\), got 40"),
        ([[1.0]], {}, r"prompts\[0\]: expected token ids"),
        ([1, 2], {}, r"prompts\[0\]: expected a list of token ids, got int"),
        (["text"], {}, r"prompts\[0\]: expected a list of token ids, got str"),
        ([torch.tensor([1])], {}, r"prompts\[0\]: expected a list of token ids, got Tensor"),
        ([[1] * 64], {}, r"prompts\[0\]: expected fewer tokens than max_model_len = 64"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1]], {"stop_ids": [5.5]}, "stop_ids"),
        ([[1]], {"stop_ids": [39, 40]}, r"stop_ids: expected token ids in \[0, 40\), got 40"),
        ([[1]], {"sampling": SamplingParams(stop_token_ids=[40])}, r"stop_token_ids: .*, got 40"),
        ([[1]], {"sampling": [SamplingParams()] * 2}, "sampling"),
    ],
)
def test_a_bad_request_is_refused_by_name(prompts: list, settings: dict, message: str) -> None:
    with pytest.raises(MLAError, match=message):
        engine().generate(prompts, **settings)
