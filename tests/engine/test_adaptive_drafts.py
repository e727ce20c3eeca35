"""Draft lengths that change from step to step, in the engine: the same tokens, and drafts as good as from scratch."""

import copy
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from mla_compile import Engine, SamplingParams
from mla_compile.engine import Completion, Request
from mla_compile.engine.draft_length import AdaptiveLength
from mla_compile.engine.launch import Launch, Launcher
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import row_drafts
from mla_compile.torch_internals import compile_counters
from tests.engine.any_length import AnyLength
from tests.engine.engines import engine, with_lag, with_policy
from tests.engine.watching import Watch
from tests.models_for_tests import one_layer_model, tiny_model
from tests.speculate.from_scratch import FromScratch, greedy, sampler
from tests.speculate.prompt_lookup import prompt_lookup

K = 3
SHARED = [7, 8, 9, 10, 11, 12, 13, 14, 15]
PROMPTS = [[*SHARED, 1], [2, 3], [*SHARED, 4, 5], [6], [16, 17, 18, 19, 20, 21, 22]]
KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.1, seed=5, top_p=0.9),
    "penalised": SamplingParams(temperature=0.9, seed=2, frequency_penalty=0.8, logprobs=2),
}


def adaptive(model: MLAForCausalLM, policy: AnyLength | None = None, **settings: object) -> Engine:
    made = engine(K, model, adaptive_draft_length=True, **settings)
    return made if policy is None else with_policy(made, policy)


@pytest.fixture(scope="module")
def model() -> MLAForCausalLM:
    return tiny_model()


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows make them however few are accepted: the tiny model's hardly ever are."""
    monkeypatch.setattr(row_drafts, "WORTH", 1e-300)


@pytest.fixture(scope="module")
def oracle(model: MLAForCausalLM) -> FromScratch:
    return FromScratch(copy.deepcopy(model))


@cache
def plain(params: SamplingParams, count: int = 24) -> list[Completion]:
    """One token a step."""
    return engine(0, tiny_model()).generate(PROMPTS, params, max_new_tokens=count)


def serve(
    of: Engine, params: SamplingParams, check: object = None, generations: list[Request] | None = None
) -> list[Request]:
    """Requests that arrive one after the other; `check` looks at the engine after each of its steps."""
    generations = [] if generations is None else generations
    while of.has_work() or len(generations) < len(PROMPTS):
        if len(generations) < len(PROMPTS) and of.stats.num_steps >= 3 * len(generations):
            generations.append(of.add(PROMPTS[len(generations)], params, max_new_tokens=24))
        of.step()
        if callable(check):
            check()
    return generations


@pytest.mark.long
@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize(
    ("kind", "few_pages", "seed"),
    [
        ("greedy", False, 0),
        ("sampled", True, 0),
        *(
            pytest.param(kind, few_pages, seed, marks=pytest.mark.slow)
            for kind in ("greedy", "sampled")
            for few_pages in (False, True)
            for seed in (1, 2)
        ),
    ],
)
def test_tokens_are_plain_ones_and_drafts_those_from_scratch_whatever_the_lengths(
    model: MLAForCausalLM, oracle: FromScratch, seed: int, kind: str, few_pages: bool
) -> None:
    """With prompts in chunks beside rows that decode, pages that prompts share, rows that move to other states and,
    where there are few pages, preemption."""
    params, policy = KINDS[kind], AnyLength(K, seed)
    watch, requests = Watch(), []
    of = adaptive(
        model,
        policy,
        drafter=watch.kind("mtp"),
        num_pages=19 if few_pages else None,
        max_tokens_per_step=4 * (1 + K) + 3,
    )
    choose = greedy if kind == "greedy" else sampler(params)
    num_checked = 0

    def check() -> None:
        nonlocal num_checked
        length = policy.learned[-1][0].length
        for generation, row in watch.rows(requests):
            if not generation.completion.token_ids or not watch.state.active[row]:
                continue
            text = [*generation.prompt, *generation.completion.token_ids]
            count = min(length, generation.max_len - len(text))  # what is behind the row's end is not drafted
            drafts = watch.state.drafts[row, :count].tolist()
            assert not count or drafts == oracle.drafts(text, count, choose), f"{length} drafts after {text}"
            num_checked += count > 0

    serve(of, params, check, requests)
    assert [request.completion.token_ids for request in requests] == [c.token_ids for c in plain(params)]
    stats = of.stats
    assert num_checked > 50 and stats.num_reused_tokens > 0 and stats.num_mixed_steps > 0
    assert (stats.num_preemptions > 0) == few_pages


@pytest.mark.long
@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_each_row_may_have_its_own_number_of_drafts(
    model: MLAForCausalLM, oracle: FromScratch, kind: str
) -> None:
    """In one step, and right drafts beyond a row's number are not accepted."""
    params, dice = KINDS[kind], random.Random(0)
    of = adaptive(model)
    expected = [completion.token_ids for completion in plain(params)]
    step, state = of.start(PROMPTS[:4], 24, [params] * 4, [])
    texts = [[token] for token in state.last_token.tolist()]
    while state.active.any():
        counts = [dice.randint(0, K) for _ in texts]
        state.num_drafts.copy_(torch.tensor(counts))
        for row, (prompt, text) in enumerate(zip(PROMPTS, texts)):
            count = min(K, 24 - len(text))
            if state.active[row] and count:
                drafts = oracle.drafts(
                    [*prompt, *text], count, greedy if kind == "greedy" else sampler(params)
                )
                assert state.drafts[row, :count].tolist() == drafts
                state.drafts[row, :count] = torch.tensor(expected[row][len(text) : len(text) + count])
        step(state)
        for text, count, (emitted, _, had, *tokens) in zip(texts, counts, state.report.tolist()):
            assert emitted in (0, min(1 + count, 24 - len(text)))
            assert not emitted or had == emitted - 1, "all of them were right"
            text += tokens[:emitted]
    assert texts == expected[:4]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["greedy", pytest.param("sampled", marks=pytest.mark.slow)])
def test_a_row_makes_as_many_drafts_as_its_own_acceptance_pays_for(
    model: MLAForCausalLM, oracle: FromScratch, kind: str
) -> None:
    """One row's drafts are always right, one's wrong, one's right at first; all are those from scratch."""
    params, count = KINDS[kind], 50
    choose = greedy if kind == "greedy" else sampler(params)
    expected = [c.token_ids for c in plain(params, count)[:3]]
    step, state = adaptive(model).start(PROMPTS[:3], count, [params] * 3, [])
    assert state.acceptance is not None
    texts, made = [[token] for token in state.last_token[:3].tolist()], [[], [], []]
    while state.active.any():
        for row, (prompt, text) in enumerate(zip(PROMPTS, texts)):
            wanted = min(int(state.num_drafts[row]), count - len(text))
            if state.active[row] and wanted:
                made[row].append(wanted)
                drafts = oracle.drafts([*prompt, *text], wanted, choose)
                assert state.drafts[row, :wanted].tolist() == drafts, f"row {row} after {len(text)} tokens"
                right = torch.tensor(expected[row][len(text) : len(text) + wanted])
                wrong = row == 1 or (row == 2 and len(text) > count // 2)
                state.drafts[row, :wanted] = (right + 1) % 40 if wrong else right
        step(state)
        for text, (emitted, _, _, *tokens) in zip(texts, state.report.tolist()):
            text += tokens[:emitted]
    assert texts == expected
    always, never, at_first = made
    assert always[:-1] == [K] * (len(always) - 1)
    assert never[0] == K and never[-20:] == [1] * 20, "one, to see when that changes"
    assert at_first[:5] == [K] * 5 and at_first[-3] == 1


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("seed", range(2))
def test_n_gram_drafts_are_those_of_the_whole_text_whatever_the_lengths(
    model: MLAForCausalLM, seed: int
) -> None:
    policy = AnyLength(K, seed)
    watch, requests = Watch(), []
    of = adaptive(model, policy, drafter=watch.kind("ngram"))
    num_checked = 0

    def check() -> None:
        nonlocal num_checked
        length = policy.learned[-1][0].length
        for request, row in watch.rows(requests):
            if request.has_begun:
                drafts = watch.state.drafts[row, :length].tolist()
                assert drafts == prompt_lookup(request.tokens, length)
                num_checked += length > 0

    serve(of, SamplingParams(), check, requests)
    assert [r.completion.token_ids for r in requests] == [c.token_ids for c in plain(SamplingParams())]
    assert num_checked > 20


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_penalties_and_log_probabilities_do_not_depend_on_lengths(model: MLAForCausalLM, seed: int) -> None:
    of = adaptive(model, AnyLength(K, seed))
    for generation, alone in zip(serve(of, KINDS["penalised"]), plain(KINDS["penalised"]), strict=True):
        assert generation.completion.token_ids == alone.token_ids
        assert generation.completion.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-4)


@pytest.mark.usefixtures("all_drafts")
def test_a_step_verifies_no_more_drafts_than_the_one_before_made(model: MLAForCausalLM) -> None:
    """Though more stand in the state, and are right."""
    params, (expected, *_) = SamplingParams(), plain(SamplingParams())
    policy = AnyLength(K, first=[1, 3, 0, 2, 3, 3])
    watch = Watch()
    of = adaptive(model, policy, drafter=watch.kind("mtp"))
    generation = of.add(PROMPTS[0], params, max_new_tokens=24)
    emitted = []
    for _ in range(6):
        known = len(generation.completion.token_ids)
        if known:
            watch.state.drafts[0] = torch.tensor(expected.token_ids[known : known + K])
        of.step()
        emitted.append(len(generation.completion.token_ids) - known)
    assert emitted == [1, 1 + 1, 1, 1 + 0, 1 + 2, 1 + 3]
    assert generation.completion.token_ids == expected.token_ids[: sum(emitted)]
    assert [(d.length, d.num_verified, a) for d, a in policy.learned] == [
        (1, 0, []),
        *((3, 1, [1]), (0, 0, [0]), (2, 0, [0]), (3, 2, [2]), (3, 3, [3])),
    ]
    stats = of.stats
    assert (stats.num_drafts, stats.num_verified, stats.draft_length) == (6, 5, 6 / 5)
    assert stats.acceptance_length == 11 / 5
    generation.abort()


def test_while_nobody_asks_for_anything_no_step_takes_time(
    model: MLAForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def perf_counter() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    policy = AnyLength(K)
    of = adaptive(model, policy)
    for _ in range(2):
        of.generate(PROMPTS[:1], max_new_tokens=8)
        now += 1000
    assert len(policy.seconds) > 4 and max(policy.seconds) < 100


@pytest.mark.parametrize("lag", [0, 1])
def test_launches_that_compile_or_record_have_no_time_nor_have_those_whose_reports_they_delay(
    model: MLAForCausalLM, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    policy = AnyLength(K)
    of = with_lag(adaptive(model, policy), lag)
    launch, launches = Launcher.launch, []

    def every_fifth(self: Launcher, *args: object) -> Launch:
        launches.append(launch(self, *args))
        return replace(launches[-1], is_timed=len(launches) % 5 > 0)

    monkeypatch.setattr(Launcher, "launch", every_fifth)
    of.generate(PROMPTS[:1], max_new_tokens=20)
    untimed = [i for i, seconds in enumerate(policy.seconds) if seconds is None]
    expected = [
        i for i in range(len(launches)) if i % 5 == 4 or (lag and i % 5 == 3 and i + 1 < len(launches))
    ]
    assert len(launches) > 10 and untimed == expected


@pytest.mark.long
def test_a_token_chosen_on_the_host_is_asked_for_behind_the_drafts_of_this_step(
    model: MLAForCausalLM,
) -> None:
    widths = []

    def choose(logits: torch.Tensor, drafts: torch.Tensor, completions: Sequence[Completion]) -> torch.Tensor:
        assert logits.shape[1] == drafts.shape[1] + 1
        widths.append(drafts.shape[1])
        return logits.argmax(dim=-1)

    of = adaptive(model, AnyLength(K, first=[2, 3, 0, 1]), max_rows=len(PROMPTS))
    *_, completions = of.stream(PROMPTS, max_new_tokens=24, choose=choose)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain(SamplingParams())]
    assert widths[:4] == [0, 3, 0, 1], "first tokens follow no draft"


def test_without_drafts_to_make_an_engine_is_a_plain_one(model: MLAForCausalLM) -> None:
    of = engine(0, model, adaptive_draft_length=True)
    assert of.generate(PROMPTS, max_new_tokens=24) == plain(SamplingParams())
    assert of.stats.draft_length == 0


def test_a_fixed_length_needs_nothing_more_of_a_state() -> None:
    of = engine(2)
    _, state = of.start(PROMPTS[:1], 4, [SamplingParams()], [])
    assert state.acceptance is None


def check_that_lengths_compile_once(drafter: str, params: SamplingParams) -> None:
    torch._dynamo.utils.counters.clear()
    policy = AnyLength(1)
    of = adaptive(
        one_layer_model(torch.float32),
        policy,
        num_speculative_tokens=1,
        drafter=drafter,
        compile=True,
        max_rows=2,
        shadow_check_every=1,
    )
    report = of.warm_up(sampling=params)
    assert compile_counters()["graphs"] == 2
    assert [(bucket.rows, bucket.q_len) for bucket in report.buckets] == [(2, 2), (2, 1), (1, 2), (1, 1)]
    expected = engine(0).generate(PROMPTS, params, max_new_tokens=24)
    for count in (1, 2, 5):
        for got, alone in zip(of.generate(PROMPTS[:count], params, max_new_tokens=24), expected):
            assert got.token_ids == alone.token_ids
            if params.logprobs is not None:
                assert got.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
    assert {drafting.length for drafting, _ in policy.learned} == {0, 1}
    assert compile_counters()["graphs"] == 2, "changing the length compiles nothing"


@pytest.mark.slow
@pytest.mark.usefixtures("lowering")
def test_lengths_are_compiled_once_for_all_rows_and_checked_like_any_step() -> None:
    """Each step against its eager twin."""
    check_that_lengths_compile_once("mtp", SamplingParams())


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
def test_lengths_of_look_ups_in_sampled_and_penalised_texts_are_compiled_once_too() -> None:
    check_that_lengths_compile_once("ngram", KINDS["penalised"])


@pytest.mark.long
def test_an_adaptive_engine_stops_drafting_where_nothing_is_accepted(
    model: MLAForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the tiny model's drafts, if a draft makes a step longer by 0.3 seconds."""
    of = adaptive(model, max_model_len=256)
    policy = of.draft_length
    assert isinstance(policy, AdaptiveLength)
    learn = policy.learn
    monkeypatch.setattr(
        policy, "learn", lambda drafting, accepted, _: learn(drafting, accepted, 1 + 0.3 * drafting.length)
    )
    of.generate([[1, 2, 3]], max_new_tokens=200)
    assert of.stats.draft_length is not None and of.stats.draft_length < 0.5
