"""Rows with fewer drafts than the engine makes: the same tokens, drafts as good as from scratch, one compiled step."""

import copy
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.start import start
from mla_compile import SamplingParams
from mla_compile.engine import Completion, Request
from mla_compile.models import MLAForCausalLM
from mla_compile.testing import shadow_check
from tests.counters import compile_counters
from tests.engine.engines import engine, finish, texts
from tests.engine.watching import Watch
from tests.models_for_tests import one_layer_model, tiny_model
from tests.speculate.from_scratch import FromScratch, greedy, sampler

K = 3
SHARED = [7, 8, 9, 10, 11, 12, 13, 14, 15]
PROMPTS = [[*SHARED, 1], [2, 3], [*SHARED, 4, 5], [6], [16, 17, 18, 19, 20, 21, 22]]
MOST = [1, None, 0, 2, 7]
"""`max_drafts` of each prompt."""
KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.1, seed=5, top_p=0.9),
    "penalised": SamplingParams(temperature=0.9, seed=2, frequency_penalty=0.8, logprobs=2),
}


@pytest.fixture(scope="module")
def model() -> MLAForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def oracle(model: MLAForCausalLM) -> FromScratch:
    return FromScratch(copy.deepcopy(model))


@cache
def plain(params: SamplingParams) -> list[Completion]:
    """One token a step."""
    return engine(0, tiny_model()).generate(PROMPTS, params, max_new_tokens=24)


@pytest.mark.long
@pytest.mark.parametrize("few_pages", [False, True])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_tokens_are_plain_ones_and_drafts_those_from_scratch_whatever_a_row_has(
    model: MLAForCausalLM, oracle: FromScratch, kind: str, few_pages: bool
) -> None:
    """Requests come one after the other: with prompts in chunks beside rows that decode, pages that prompts share, rows
    that move to other states and, where there are few pages, preemption."""
    params, watch = KINDS[kind], Watch()
    of = engine(
        K,
        model,
        drafter=watch.kind("mtp"),
        num_pages=19 if few_pages else None,
        max_tokens_per_step=4 * (1 + K) + 3,
    )
    choose = greedy if kind == "greedy" else sampler(params)
    requests: list[Request] = []
    num_checked = 0
    while of.has_work() or len(requests) < len(PROMPTS):
        if len(requests) < len(PROMPTS) and of.stats.num_steps >= 3 * len(requests):
            i = len(requests)
            requests.append(of.add(PROMPTS[i], params, max_new_tokens=24, max_drafts=MOST[i]))
        of.step()
        for request, row in watch.rows(requests):
            if not request.completion.token_ids or not watch.state.active[row]:
                continue
            text = [*request.prompt, *request.completion.token_ids]
            most = K if request.max_drafts is None else min(K, request.max_drafts)
            count = min(most, request.max_len - len(text))  # what is behind the row's end is not drafted
            drafts = watch.state.drafts[row, :count].tolist()
            assert not count or drafts == oracle.drafts(text, count, choose), f"{most} drafts after {text}"
            num_checked += count > 0
    assert texts(requests) == [c.token_ids for c in plain(params)]
    stats = of.stats
    assert num_checked > 50 and stats.num_reused_tokens > 0 and stats.num_mixed_steps > 0
    assert (stats.num_preemptions > 0) == few_pages


@pytest.mark.long
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_each_row_may_have_its_own_number_of_drafts(
    model: MLAForCausalLM, oracle: FromScratch, kind: str
) -> None:
    """In one step, and right drafts beyond a row's number are not accepted."""
    params, dice = KINDS[kind], random.Random(0)
    of = engine(K, model)
    expected = [completion.token_ids for completion in plain(params)]
    step, state = start(of, PROMPTS[:4], 24, [params] * 4, [])
    row_texts = [[token] for token in state.last_token.tolist()]
    while state.active.any():
        counts = [dice.randint(0, K) for _ in row_texts]
        state.num_drafts.copy_(torch.tensor(counts))
        for row, (prompt, text) in enumerate(zip(PROMPTS, row_texts)):
            count = min(K, 24 - len(text))
            if state.active[row] and count:
                drafts = oracle.drafts(
                    [*prompt, *text], count, greedy if kind == "greedy" else sampler(params)
                )
                assert state.drafts[row, :count].tolist() == drafts
                state.drafts[row, :count] = torch.tensor(expected[row][len(text) : len(text) + count])
        step(state)
        for text, count, (emitted, _, had, _, *tokens) in zip(row_texts, counts, state.report.tolist()):
            assert emitted in (0, min(1 + count, 24 - len(text)))
            assert not emitted or had == emitted - 1, "all of them were right"
            text += tokens[:emitted]
    assert row_texts == expected[:4]


@pytest.mark.parametrize("most", [0, 1, None])
def test_the_drafts_that_rows_have_are_counted(model: MLAForCausalLM, most: int | None) -> None:
    of = engine(K, model)
    request = of.add(PROMPTS[0], max_new_tokens=24, max_drafts=most)
    finish(of)
    left = [24 - i for i, place in enumerate(request.completion.draft_positions, start=1) if place == 0]
    expected = sum(min(K if most is None else most, tokens - 1) for tokens in left[:-1])
    assert (of.stats.num_verified, of.stats.num_drafts) == (request.completion.num_steps, expected)


def check_that_one_step_is_compiled(drafter: str, params: SamplingParams) -> None:
    torch._dynamo.utils.counters.clear()
    of = engine(2, one_layer_model(torch.float32), drafter=drafter, compile=True, max_rows=2)
    report = of.warm_up(sampling=params)
    assert compile_counters()["graphs"] == 2, "the first and the last part of a step"
    assert [(bucket.rows, bucket.q_len) for bucket in report.buckets] == [(2, 3), (1, 3)]
    expected = engine(0).generate(PROMPTS, params, max_new_tokens=24)
    for count in (1, 2, 5):
        requests = [
            of.add(prompt, params, max_new_tokens=24, max_drafts=most)
            for prompt, most in zip(PROMPTS[:count], MOST)
        ]
        with shadow_check(of):
            finish(of)
        for request, alone in zip(requests, expected):
            assert request.completion.token_ids == alone.token_ids
    assert compile_counters()["graphs"] == 2, "rows of other numbers of drafts compile nothing"


@pytest.mark.slow
@pytest.mark.usefixtures("unlowered")
def test_one_step_is_compiled_for_all_numbers_of_drafts_and_checked_like_any_step() -> None:
    """Each step against its eager twin."""
    check_that_one_step_is_compiled("mtp", SamplingParams())


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_one_step_of_prompt_lookup_in_sampled_and_penalised_texts_is_compiled_too() -> None:
    check_that_one_step_is_compiled("ngram", replace(KINDS["penalised"], logprobs=None))
