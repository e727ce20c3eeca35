"""`batch_invariant=True`: what the engine does so that a request's latents and tokens depend on nobody else.

The bits themselves are compared where steps are compiled with Inductor; here it is about which steps are compiled,
which pages are shared, and what becomes of a preempted request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_compile import Completion, Engine, Grammar, MLAError, SamplingParams
from mla_compile.engine import Request
from mla_compile.engine.pages import PagePool
from mla_compile.engine.reports import Logprob, RowReport
from mla_compile.engine.scheduler import Scheduler
from mla_compile.models import MLAForCausalLM
from mla_compile.ops import backends
from mla_compile.speculate import SpeculativeDecoder
from mla_compile.torch_internals import compile_counters
from tests.engine.engines import engine, pool_of, with_lag
from tests.engine.test_requests import MIXED, PROMPTS, alone, tokenizer
from tests.engine.test_scheduler import Driven, chunks, decodes, goes_on
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
    monkeypatch.setattr(backends, "DECODE_BACKENDS", rows)
    backends.select_backend.cache_clear()
    invariant(decode_backend="ours")
    with pytest.raises(MLAError, match=r"^decode_backend: .*\(ours\), got mine, which .* beside it"):
        invariant(decode_backend="mine")
    monkeypatch.undo()
    backends.select_backend.cache_clear()


# --- what is compiled


def test_steps_are_compiled_with_the_option_and_that_of_their_mode() -> None:
    settings = invariant(mode="reduce-overhead").config.compile_settings
    assert settings.keys() == {"options"}
    assert settings["options"]["triton.cudagraphs"]
    assert "triton.cudagraphs" not in invariant(mode="default").config.compile_settings["options"]
    assert engine(mode="default").config.compile_settings == {"mode": "default"}


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
@pytest.mark.usefixtures("lowering")
def test_every_step_is_compiled_and_few_graphs_serve_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts and without, in halves too: no sizes of prompts, chunks or rows make another graph."""
    settings = {"model": one_layer_model(torch.float32), "max_rows": 3, "max_tokens_per_step": 12}
    expected = arrive(engine(0, **settings))
    torch._dynamo.reset()
    mine = invariant(0, **settings)
    eager = []
    for name in ("verify", "choose_targets", "advance"):
        method = getattr(SpeculativeDecoder, name)

        def seen(self: SpeculativeDecoder, *args: object, _method=method) -> object:
            if not torch.compiler.is_compiling():
                eager.append(_method.__name__)
            return _method(self, *args)

        monkeypatch.setattr(SpeculativeDecoder, name, seen)
    before = compile_counters()["graphs"]
    assert arrive(mine) == expected
    assert mine.stats.num_mixed_steps > 0
    assert compile_counters()["graphs"] - before == 2, "a step, and one with prompts"
    assert eager == []


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
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
    pool = PagePool(num_pages, page_size, lookahead=int(k > 0))
    of = Scheduler(
        pool, num_speculative_tokens=k, max_rows=max_rows, max_tokens_per_step=64, batch_invariant=True
    )
    return Driven(of)


@pytest.mark.parametrize("k", [0, 1])
def test_a_second_turn_shares_what_the_first_prompt_filled_and_nothing_that_was_said(k: int) -> None:
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
def test_a_chat_prefills_what_was_said(k: int) -> None:
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


# --- preemption


def test_a_preempted_request_prefills_its_prompt_and_says_again_what_nobody_is_told() -> None:
    of = scheduler(0, num_pages=5, page_size=2, max_rows=2)
    first, second = of.add([1, 2, 3], max_len=8), of.add([4, 5, 6], max_len=8)
    of.plan()
    of.plan()
    of.update([goes_on(7), goes_on(8)])
    assert decodes(of.plan()) == [first]
    of.update([goes_on(9), goes_on(10)])  # what was under way still counts
    assert second.completion.token_ids == [8, 10]
    of.abort(first)
    plan = of.plan()
    assert chunks(plan) == [(second.num_reused_tokens, 3 - second.num_reused_tokens, True)]
    assert (second.tokens, second.num_to_replay) == ([4, 5, 6], 2)
    assert len(second.pages) * 2 >= 6, "there is room for all that it has said, and the next one"
    of.update([goes_on(11)])  # the first one's
    of.plan()
    of.update([goes_on(8)])
    assert (second.completion.token_ids, second.num_to_replay) == ([8, 10], 1)
    of.plan()
    of.update([goes_on(10)])
    assert (second.completion.token_ids, second.num_to_replay) == ([8, 10], 0)
    of.update([goes_on(12)])
    assert second.tokens == [4, 5, 6, 8, 10, 12]
    assert second.row_output.token_ids == second.completion.token_ids


def begun_anew(*, said: list[int], logprobs: bool = False) -> Request:
    request = Request([1, 2, 3], max_len=20)
    told = [{token: Logprob(-1.0, 1)} for token in said] if logprobs else None
    request.take(RowReport(said[:1], True, logprobs=told and told[:1]), is_step=False)
    for i in range(1, len(said)):
        request.take(RowReport(said[i : i + 1], True, logprobs=told and told[i : i + 1]), is_step=True)
    request.restart_from_prompt()
    return request


def test_a_report_may_end_what_is_said_again_and_go_on() -> None:
    request = begun_anew(said=[5, 6, 7], logprobs=True)
    steps = request.completion.num_steps
    request.take(RowReport([5], True, logprobs=[{5: Logprob(-2.0, 1)}]), is_step=False)
    places = [{token: Logprob(-3.0, 1)} for token in (6, 7, 8, 9)]
    request.take(RowReport([6, 7, 8, 9], True, 3, places), is_step=True)
    completion = request.completion
    assert completion.token_ids == [5, 6, 7, 8, 9]
    assert completion.logprobs is not None
    assert [place[t].logprob for place, t in zip(completion.logprobs, completion.token_ids)] == [
        -1.0,
        -1.0,
        -1.0,
        -3.0,
        -3.0,
    ]
    assert (completion.num_prefills, completion.num_steps) == (1, steps + 1)


@pytest.mark.parametrize(
    ("report", "got"),
    [
        (RowReport([5, 9], True), "[6] at position 4, got [9]"),
        (RowReport([5, 6], False), "got [6]"),
        (RowReport([5], False, error="NaN"), "got NaN"),
    ],
)
def test_another_text_than_the_one_before_is_an_error_by_name(report: RowReport, got: str) -> None:
    request = begun_anew(said=[5, 6, 7])
    request.take(RowReport([5], True), is_step=False)
    request.take(replace(report, tokens=report.tokens[1:]), is_step=True)
    completion = request.completion
    assert (completion.finish_reason, completion.token_ids) == ("error", [5, 6, 7])
    assert completion.error is not None
    assert completion.error.startswith("batch_invariant: expected what it had said before it lost its pages")
    assert completion.error.endswith(got)


def facts(completion: Completion) -> tuple[object, ...]:
    places = [
        {token: round(told.logprob, 6) for token, told in place.items()}
        for place in completion.logprobs or []
    ]
    c = completion
    return c.token_ids, c.finish_reason, c.error, c.text, places, c.num_prefills


@pytest.mark.long
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("k", [0, 3])
def test_a_completion_is_as_without_the_preemption(k: int, lag: int) -> None:
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
    stats = few.stats
    assert stats.num_preemptions > 0 and stats.num_repeated_tokens > 0
    cut = sum(len(c.token_ids) for c in got[:-1])  # behind a stop string more may have come
    assert cut < stats.num_tokens <= cut + len(got[-1].token_ids) + k
    assert pool_of(few).num_free == pool_of(few).num_pages - 1


@pytest.mark.usefixtures("uncompiled")
def test_a_chooser_is_asked_again_with_what_its_row_has_said() -> None:
    def by_length(logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
        """The token depends on how many the completion has."""
        places = torch.arange(logits.shape[1])
        lengths = torch.tensor([[len(completion.token_ids)] for completion in completions])
        return (lengths + places) % 30 + torch.tensor([[c.prompt_index] for c in completions])

    few = invariant(2, num_pages=FEW_PAGES)
    *_, got = few.stream(PROMPTS, max_new_tokens=20, choose=by_length)
    assert [c.token_ids for c in got] == [[i + j for j in range(20)] for i in range(4)]
    assert few.stats.num_preemptions > 0


@pytest.mark.long
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("k", [0, 2])
def test_a_grammar_begins_anew_with_its_row(k: int) -> None:
    pytest.importorskip("llguidance")
    one = tokenizer()
    grammar = Grammar.from_regex("(ab|ba|cd){7,9}[x-z]?", one)
    settings = {"tokenizer": one, "max_rows": 4}
    arguments = {"max_new_tokens": 20, "stop_ids": [39], "grammars": grammar}
    expected = engine(k, **settings).generate(PROMPTS, MIXED, **arguments)
    few = invariant(k, num_pages=FEW_PAGES, **settings)
    got = few.generate(PROMPTS, MIXED, **arguments)
    assert few.stats.num_preemptions > 0
    assert [facts(completion) for completion in got] == [facts(completion) for completion in expected]
