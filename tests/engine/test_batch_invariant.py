"""`batch_invariant=True`: the engine's part in making a request's latents and tokens independent of other requests.

The bits themselves are compared where steps are compiled with Inductor; here it is about which steps are compiled,
which pages are shared, and which requests wait for pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_compile import Completion, Engine, MLAError, SamplingParams
from mla_compile.backend import resolve_settings
from mla_compile.models import MLAForCausalLM
from mla_compile.ops.attention import decode_backends
from tests.counters import compile_counters
from tests.engine.engines import engine, pool_of, watch_eager_calls, with_lag
from tests.engine.test_requests import MIXED, PROMPTS, alone, tokenizer
from tests.engine.test_scheduler import Driven, goes_on
from tests.engine.toy_engine import scheduler_of
from tests.kernel_cases import BACKENDS
from tests.models_for_tests import caches_of, one_layer_model

FEW_PAGES = 1 + 64 // 4 + 3


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Steps that are to be compiled run eagerly."""
    with torch.compiler.set_stance("force_eager"):
        yield


def invariant(k: int = 3, **settings: object) -> Engine:
    return engine(k, compile=True, batch_invariant=True, **settings)


# --- what is refused


class Recurrent(MLAForCausalLM):
    is_recurrent = True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": False}, "^compile: expected True with batch_invariant=True.*, got False; leave one"),
        ({"batch_invariant": 1}, "^batch_invariant: expected True or False, got 1"),
        ({"mode": "fast"}, "^mode: expected one of"),
    ],
)
def test_a_setting_that_cannot_go_with_it_is_refused_by_name(settings: dict, message: str) -> None:
    with pytest.raises(MLAError, match=message):
        Engine(one_layer_model(), **{"batch_invariant": True, **settings})


def test_recurrent_layers_are_refused_before_anything_is_allocated() -> None:
    model = one_layer_model()
    model.__class__ = Recurrent
    with pytest.raises(MLAError, match=r"^batch_invariant: expected False for a model with"):
        Engine(model, batch_invariant=True)
    assert not caches_of(model)


def test_a_decode_backend_that_does_not_promise_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    any_call = BACKENDS["by_token"]
    rows = replace(any_call, name="ours"), replace(any_call, name="mine", batch_invariant=False)
    monkeypatch.setattr(decode_backends, "DECODE_BACKENDS", rows)
    decode_backends.select_backend.cache_clear()
    invariant(decode_backend="ours")
    with pytest.raises(MLAError, match=r"^decode_backend: .*\(ours\), got mine, which .*batch"):
        invariant(decode_backend="mine")
    monkeypatch.undo()
    decode_backends.select_backend.cache_clear()


# --- what is compiled


def test_steps_are_compiled_with_the_option_and_that_of_their_mode() -> None:
    options = invariant(mode="reduce-overhead").config.compile_options
    assert options["batch_invariant"] and options["captured"] and not options["triton.cudagraphs"]
    assert not engine(mode="default").config.compile_options["captured"]
    for mode, deterministic in (("default", True), ("max-autotune", False)):
        options = engine(mode=mode).config.compile_options
        assert resolve_settings(None, options) == options, "the backend gets them all"
        assert options["deterministic"] is deterministic and not options["batch_invariant"]


def arrive(of: Engine, **settings: object) -> list[list[int]]:
    """Prompts of several lengths, one after another and in chunks, beside rows that decode."""
    requests = []
    for prompt in PROMPTS:
        requests.append(of.add(prompt, max_new_tokens=8, stop_ids=[39], **settings))
        of.step()
    while of.has_work():
        of.step()
    return [request.completion.token_ids for request in requests]


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_every_step_is_compiled_and_few_graphs_serve_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts and without, in halves too: no sizes of prompts, chunks or rows make another graph."""
    settings = {"model": one_layer_model(torch.float32), "max_rows": 3, "max_tokens_per_step": 12}
    expected = arrive(engine(0, **settings))
    torch._dynamo.reset()
    mine = invariant(0, **settings)
    eager = watch_eager_calls(monkeypatch, "verify", "choose_targets", "advance")
    before = compile_counters()["graphs"]
    assert arrive(mine) == expected
    assert mine.stats.num_mixed_steps > 0
    assert compile_counters()["graphs"] - before == 4, (
        "the three parts of a step, and the first of one with prompts"
    )
    assert eager == []


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_tokens_chosen_on_the_host_go_through_compiled_code() -> None:
    def likeliest(logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
        return logits.argmax(dim=-1)

    settings = {"model": one_layer_model(torch.float32), "max_rows": 3, "max_tokens_per_step": 12}
    expected = [c.token_ids for c in engine(1, **settings).generate(PROMPTS[:3], max_new_tokens=8)]
    mine = invariant(1, **settings)
    before = compile_counters()["graphs"]
    *_, got = mine.stream(PROMPTS[:3], max_new_tokens=8, choose=likeliest)
    assert [completion.token_ids for completion in got] == expected
    names = {bucket.step for bucket in mine.capture_report().buckets}
    assert names == {"verify", "mixed, verify", "advance, greedy"}
    assert compile_counters()["graphs"] - before == 4


# --- which pages are shared


def scheduler(k: int = 1, *, num_pages: int = 101, page_size: int = 4, max_rows: int = 4) -> Driven:
    settings = {"num_speculative_tokens": k, "max_rows": max_rows, "max_tokens_per_step": 64}
    return Driven(scheduler_of(num_pages, page_size, lookahead=int(k > 0), batch_invariant=True, **settings))


@pytest.mark.parametrize("k", [0, 1])
def test_a_second_turn_shares_what_the_first_prompt_filled_and_nothing_that_was_emitted(k: int) -> None:
    for length in range(1, 12):
        of = scheduler(k, page_size=2)
        prompt = list(range(1, 1 + length))
        request = of.add(prompt, max_len=60)
        of.plan()
        of.update([goes_on(30)])
        for i in range(4):
            of.plan()
            of.update([goes_on(*range(31 + i, 32 + i + k))])
        of.abort(request)
        text = request.tokens
        of.plan()
        second = of.add([*text, 9, 9], max_len=60)
        of.plan()
        assert second.num_reused_tokens == length // 2 * 2, "the page that ends with the prompt too"


@pytest.mark.long
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("k", [0, 3])
def test_a_chat_prefills_what_was_emitted(k: int) -> None:
    """By the default, which shares those pages, less is prefilled."""
    reused = []
    for mine in (engine(k), invariant(k)):
        (first,) = mine.generate([PROMPTS[0]], max_new_tokens=17)
        chat = [*PROMPTS[0], *first.token_ids, 5, 6]
        before = mine.stats.num_reused_tokens
        (second,) = mine.generate([chat], max_new_tokens=9)
        assert second.token_ids == alone(chat, SamplingParams(), 9)
        reused.append(mine.stats.num_reused_tokens - before)
    assert reused[1] == 4 < reused[0]


# --- pages


def test_a_request_waits_for_the_pages_of_its_longest_text() -> None:
    of = scheduler(0, num_pages=5, page_size=2, max_rows=2)
    first, second = of.add([1, 2, 3], max_len=8), of.add([4, 5, 6], max_len=8)
    plan = of.plan()
    assert plan.admitted == [first] and len(first.pages) * 2 >= 7
    of.update([goes_on(7)])
    assert of.plan().admitted == []
    of.abort(first)
    assert of.plan().admitted == [second]


def facts(completion: Completion) -> tuple[object, ...]:
    places = [
        {token: round(entry.logprob, 6) for token, entry in place.items()}
        for place in completion.logprobs or []
    ]
    c = completion
    return c.token_ids, c.finish_reason, c.error, c.text, places, c.num_prefills


@pytest.mark.long
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("k", [0, 3])
def test_a_completion_is_the_same_with_few_pages(k: int, lag: int) -> None:
    """Tokens, log-probabilities, penalties' counts, texts and stop strings."""
    (whole,) = engine(0, tokenizer=tokenizer()).generate([PROMPTS[2]], max_new_tokens=20)
    assert whole.text is not None
    params = [*MIXED, SamplingParams(stop=whole.text[12:14], logprobs=2)]
    prompts = [*PROMPTS, PROMPTS[2]]
    settings = {"max_rows": 5, "tokenizer": tokenizer()}
    expected = engine(k, **settings).generate(prompts, params, max_new_tokens=20)
    few = with_lag(invariant(k, num_pages=FEW_PAGES, **settings), lag)
    got = few.generate(prompts, params, max_new_tokens=20)
    assert [facts(completion) for completion in got] == [facts(completion) for completion in expected]
    assert all(1 <= c.acceptance_length <= k + 1 for c in got if c.acceptance_length is not None)
    assert few.stats.num_preemptions == 0
    assert pool_of(few).num_free == pool_of(few).num_pages - 1
