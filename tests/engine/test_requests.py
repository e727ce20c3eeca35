"""Requests that come and go: arrivals, aborts, priorities, ends of every kind, concurrent streams."""

import asyncio
import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mla_compile import Completion, Engine, MLAError, SamplingParams
from mla_compile.engine.intake import Intake
from mla_compile.sampling_params import MAX_STOP_IDS
from tests.engine.engines import engine, finish, texts, with_lag
from tests.models_for_tests import VOCAB, poison_caches

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14], list(range(1, 30))]
MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.1, seed=4, logprobs=3),
    SamplingParams(
        frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.2, logit_bias={5: 2, 9: -100}
    ),
    SamplingParams(temperature=0.9, seed=-9, top_p=0.9, repetition_penalty=1.3, logprobs=7, min_tokens=3),
]
CHARACTERS = [chr(97 + i) for i in range(26)] + [chr(65 + i) for i in range(13)] + ["</s>"]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(CHARACTERS)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@cache
def engine_for_one() -> Engine:
    return engine(0, max_rows=1, prefix_caching=False)


def alone(prompt: Sequence[int], params: SamplingParams, max_new_tokens: int = 20) -> list[int]:
    (completion,) = engine_for_one().generate([prompt], params, max_new_tokens=max_new_tokens)
    return completion.token_ids


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [alone(prompt, params) for prompt, params in zip(PROMPTS, MIXED)]


@pytest.mark.parametrize("gap", [0, 1, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 30))])
@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_requests_that_arrive_over_time_have_the_tokens_that_they_have_alone(
    gap: int, k: int, lag: int, expected: list[list[int]]
) -> None:
    """Each needs another kind of step: rows move from state to state while they run."""
    mine, generations = with_lag(engine(k), lag), []
    for prompt, params in zip(PROMPTS, MIXED):
        generations.append(mine.add(prompt, params, max_new_tokens=20))
        for _ in range(gap):
            mine.step()
    finish(mine)
    assert texts(generations) == expected
    returned = [generation.completion.logprobs for generation in generations]
    assert [bool(places) for places in returned] == [params.logprobs is not None for params in MIXED]


@pytest.mark.parametrize("k", [0, 3])
def test_requests_are_the_same_when_pages_run_out(k: int, expected: list[list[int]]) -> None:
    few = engine(k, num_pages=1 + 64 // 4 + 3)
    got = few.generate(PROMPTS, MIXED, max_new_tokens=20)
    assert [c.token_ids for c in got] == expected
    assert few.stats.num_preemptions > 0
    assert all(c.acceptance_length is None or 1 <= c.acceptance_length <= k + 1 for c in got)
    for completion, params in zip(got, MIXED):
        assert (completion.logprobs is None) == (params.logprobs is None)


@pytest.mark.parametrize("k", [0, 3])
def test_stop_ids_wait_in_mixed_steps_and_after_preemptions(k: int) -> None:
    """Beside rows whose stop ids do not wait, which have the tokens that they have alone."""
    end, prompts = 7, [PROMPTS[i % 3] for i in range(6)]
    waits = [
        SamplingParams(min_tokens=i, logit_bias={end: 100} if i else None, temperature=i % 2, seed=i)
        for i in (0, 5, 10, 15, 0, 20)
    ]
    mine = engine(k, num_pages=17)
    requests = []
    for prompt, params in zip(prompts, waits, strict=True):
        requests.append(mine.add(prompt, params, max_new_tokens=24, stop_ids=[end]))
        mine.step()
    finish(mine)
    assert mine.stats.num_preemptions and mine.stats.num_mixed_steps
    for request, params in zip(requests, waits, strict=True):
        (one,) = engine_for_one().generate([request.prompt], params, max_new_tokens=24, stop_ids=[end])
        assert request.completion.token_ids == one.token_ids
        if params.min_tokens:
            assert one.token_ids.index(end) == len(one.token_ids) - 1 == params.min_tokens


@pytest.mark.parametrize("k", [0, 2, 3])
def test_decode_rows_keep_emitting_while_long_prompts_prefill(k: int, expected: list[list[int]]) -> None:
    mine = engine(k, max_rows=2, max_tokens_per_step=2 * (1 + k) + 2)
    short = mine.add(PROMPTS[1], MIXED[1], max_new_tokens=20)
    while not short.completion.token_ids:
        mine.step()
    long = mine.add(PROMPTS[3], MIXED[3], max_new_tokens=20)
    before, grown = mine.stats.num_mixed_steps, 0
    while not long.completion.token_ids:
        known = len(short.completion.token_ids)
        mine.step()
        grown += len(short.completion.token_ids) > known
    budget = 2 * (1 + k) + 2
    assert mine.stats.num_mixed_steps - before >= 29 // budget
    assert grown >= min(29 // budget, 19 // (1 + k)), "the short one went on"
    finish(mine)
    assert texts([short, long]) == [expected[1], expected[3]]


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_prompt_as_long_as_a_verify_step_prefills(k: int, length: int) -> None:
    """A decode row is one that has sampled, whatever its length."""
    prompt = list(range(3, 3 + length))
    assert engine(k).generate([prompt], max_new_tokens=9)[0].token_ids == alone(prompt, SamplingParams(), 9)


@pytest.mark.parametrize("k", [0, 3])
def test_a_prompt_that_fills_the_cache_gives_one_token(k: int) -> None:
    prompt = [i % 40 for i in range(63)]
    small = engine(k, max_rows=1)
    (completion,) = small.generate([prompt], max_new_tokens=20)
    assert (completion.token_ids, completion.finish_reason) == (alone(prompt, SamplingParams()), "length")
    assert len(completion.token_ids) == 1


@pytest.mark.parametrize("max_model_len", range(8, 16))
def test_the_models_length_may_be_reached_inside_drafts(max_model_len: int) -> None:
    mine = engine(3, max_model_len=max_model_len)
    (completion,) = mine.generate(PROMPTS[:1], max_new_tokens=20)
    assert completion.token_ids == alone(PROMPTS[0], SamplingParams())[: max_model_len - 7]
    assert completion.finish_reason == "length"


@pytest.mark.slow
def test_512_requests_are_served_in_their_order_by_four_rows() -> None:
    mine = engine(1, max_tokens_per_step=64)
    prompts = [[1 + i % 30, 2 + i % 7] for i in range(512)]
    generations = [mine.add(prompt, max_new_tokens=3) for prompt in prompts]
    assert mine.stats.num_waiting == 512
    order: list[int] = []
    while mine.has_work():
        mine.step()
        order += [i for i, g in enumerate(generations) if g.has_begun and i not in order]
    assert order == list(range(512))
    known = {tuple(prompt): alone(prompt, SamplingParams(), 3) for prompt in prompts}
    assert texts(generations) == [known[tuple(prompt)] for prompt in prompts]


def test_a_request_of_a_lower_priority_number_goes_first() -> None:
    mine = engine(max_rows=1)
    later, sooner = mine.add([1, 2], max_new_tokens=3, priority=5), mine.add([1, 3], max_new_tokens=3)
    while not later.has_begun:
        mine.step()
    assert sooner.has_ended


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5))])
def test_an_abort_ends_one_request_and_nothing_else(steps: int, lag: int, expected: list[list[int]]) -> None:
    mine = with_lag(engine(max_rows=2), lag)
    generations = [mine.add(p, s, max_new_tokens=20) for p, s in zip(PROMPTS, MIXED)]
    for _ in range(steps):
        mine.step()
    generations[1].abort()
    generations[1].abort()
    finish(mine)
    gone = generations[1].completion
    assert gone.finish_reason == "abort" and gone.token_ids == expected[1][: len(gone.token_ids)]
    assert texts(generations[::2]) == expected[::2] and texts(generations[3:]) == expected[3:]
    assert mine.stats.pages_in_use == mine.stats.rows_in_use == 0


def test_a_request_that_has_ended_keeps_no_engine_alive() -> None:
    mine = engine()
    requests, seen = [mine.add(prompt, max_new_tokens=3) for prompt in PROMPTS], weakref.ref(mine)
    requests[0].abort()
    finish(mine)
    del mine
    gc.collect()
    assert seen() is None and all(request.has_ended for request in requests)
    requests[1].abort()  # as it was before

    async def tokens() -> list[int]:
        return [token async for token in requests[1]]

    assert asyncio.run(tokens()) == requests[1].completion.token_ids


def test_a_stream_that_is_left_aborts_its_requests() -> None:
    mine = engine()
    stream = mine.stream(PROMPTS, max_new_tokens=20)
    completions = next(stream)
    stream.close()
    assert {completion.finish_reason for completion in completions} == {"abort"}
    finish(mine)
    assert mine.stats.pages_in_use == 0


@pytest.mark.parametrize("k", [0, 3])
def test_tokens_arrive_by_async_iteration(k: int, expected: list[list[int]]) -> None:
    mine = engine(k, max_rows=2)
    order: list[int] = []

    async def client(number: int) -> list[int]:
        await asyncio.sleep(0.002 * number)
        tokens = []
        async for token in mine.add(PROMPTS[number], MIXED[number], max_new_tokens=20):
            tokens.append(token)
            order.append(number)
        return tokens

    async def impatient() -> None:
        async for _ in mine.add(PROMPTS[0], max_new_tokens=20):
            break

    async def serve() -> list[list[int]]:
        return (await asyncio.gather(*map(client, range(4)), impatient()))[:4]

    assert asyncio.run(serve()) == expected
    assert order != sorted(order), "they take turns"
    finish(mine)
    assert mine.stats.pages_in_use == 0


def test_a_prompts_completions_have_seeds_of_their_own_and_share_its_pages() -> None:
    mine = engine(2, max_rows=8)
    params = SamplingParams(temperature=1.3, seed=11, n=3)
    out = mine.generate([PROMPTS[3], PROMPTS[1]], params, max_new_tokens=12)
    each = [replace(params, n=1, seed=11 + i) for i in range(3)]
    assert [c.token_ids for c in out] == [alone(p, s, 12) for p in (PROMPTS[3], PROMPTS[1]) for s in each]
    assert [(c.prompt_index, c.index) for c in out] == [(p, i) for p in range(2) for i in range(3)]
    assert mine.stats.num_reused_tokens == 2 * 28, "of 29 tokens all full pages, twice"


def test_prompts_share_what_they_have_in_common() -> None:
    mine = engine()
    cold = mine.generate([PROMPTS[3]], max_new_tokens=10)
    assert mine.stats.num_reused_tokens == 0
    assert mine.generate([PROMPTS[3]], max_new_tokens=10) == cold
    assert mine.stats.num_reused_tokens == 28
    mine.reset_prefix_cache()
    poison_caches(mine.model)
    assert mine.generate([PROMPTS[3]], max_new_tokens=10) == cold
    assert mine.stats.num_reused_tokens == 28
    apart = engine(prefix_caching=False)
    assert [apart.generate([PROMPTS[3]], max_new_tokens=10) for _ in range(2)] == [cold] * 2
    assert apart.stats.num_reused_tokens == 0


def test_each_request_ends_where_its_own_parameters_say() -> None:
    whole = alone(PROMPTS[3], SamplingParams(temperature=1, seed=3))
    *_, sooner, later = sorted({whole.index(token) for token in whole[:19]})
    mine, eos = whole[sooner], whole[later]
    assert sooner > 4
    base = SamplingParams(temperature=1, seed=3)
    asked = [
        base,
        replace(base, ignore_eos=True),
        replace(base, stop_token_ids=[mine]),
        replace(base, max_tokens=4),
        replace(base, ignore_eos=True, max_tokens=19),
        replace(base, stop_token_ids=[mine, *range(VOCAB)], min_tokens=0),
        replace(base, stop_token_ids=[mine], min_tokens=sooner),
        replace(base, stop_token_ids=[mine], min_tokens=sooner + 1),
    ]
    *out, late = engine().generate([PROMPTS[3]] * 8, asked, max_new_tokens=20, stop_ids=[eos])
    assert [len(c.token_ids) for c in out] == [later + 1, 20, sooner + 1, 4, 19, 1, sooner + 1]
    assert [c.finish_reason for c in out] == ["stop", "length", "stop", "length", "length", "stop", "stop"]
    assert all(c.token_ids == whole[: len(c.token_ids)] for c in out)
    assert late.token_ids[:sooner] == whole[:sooner] and late.token_ids[sooner] != mine


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    "k", [0, pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_stop_string_ends_the_text_where_it_first_appears(k: int, lag: int) -> None:
    params = SamplingParams(temperature=1, seed=5, logprobs=1)
    whole = alone(PROMPTS[0], params)
    text = "".join(CHARACTERS[token] for token in whole)
    mine = with_lag(engine(k, tokenizer=tokenizer()), lag)
    beside = mine.add(PROMPTS[3], max_new_tokens=30)
    for start, length in ((0, 1), (3, 2), (6, 1), (9, 3), (14, 4)):
        stop = text[start : start + length]
        asked = replace(params, stop=["???", stop])
        (completion,) = mine.generate([PROMPTS[0]], asked, max_new_tokens=20)
        at = text.index(stop)
        assert (completion.text, completion.finish_reason) == (text[:at], "stop")
        assert completion.token_ids == whole[: at + length]
        assert len(completion.logprobs or []) == at + length
    finish(mine)
    assert beside.completion.token_ids == alone(PROMPTS[3], SamplingParams(), 30)


def test_a_stop_string_that_never_comes_changes_nothing() -> None:
    mine, whole = engine(tokenizer=tokenizer()), alone(PROMPTS[0], SamplingParams())
    for params in (SamplingParams(stop="never!"), SamplingParams()):
        (completion,) = mine.generate([PROMPTS[0]], params, max_new_tokens=20)
        assert completion.token_ids == whole
        assert completion.text == "".join(CHARACTERS[token] for token in whole if token < 39)


@pytest.fixture(scope="module")
def under_way(expected: list[list[int]]) -> Iterator[Engine]:
    """An engine in the middle of its work, to which nothing that is tried on it makes a difference."""
    mine = engine(max_rows=2)
    generations = [mine.add(p, s, max_new_tokens=6) for p, s in zip(PROMPTS, MIXED)]
    for _ in range(3):
        mine.step()
    yield mine
    finish(mine)
    assert texts(generations) == [text[:6] for text in expected]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda e: e.add([]), "^prompt: expected at least one token"),
        (lambda e: e.add([1] * 64), "^prompt: expected fewer tokens than max_model_len = 64"),
        (lambda e: e.add([1, VOCAB]), r"^prompt: expected token ids in \[0, 40\), got 40"),
        (lambda e: e.add([1, -1]), "^prompt: expected token ids"),
        (lambda e: e.add("text"), "^prompt: expected a list of token ids, got str"),
        (lambda e: e.add(b"ab"), "^prompt: expected a list of token ids, got bytes"),
        (lambda e: e.add([1], SamplingParams(temperature=math.nan)), "^temperature: "),
        (lambda e: e.add([1], SamplingParams(max_tokens=0)), "^max_tokens: "),
        (lambda e: e.add([1], SamplingParams(stop="")), "^stop: expected strings that are not empty"),
        (lambda e: e.add([1], SamplingParams(stop="a")), "^stop: expected none in an engine without"),
        (lambda e: e.add([1], SamplingParams(stop_token_ids=[1.5])), "^stop_token_ids: expected token ids"),
        (lambda e: e.add([1], SamplingParams(n=0)), r"^n: expected an integer in \[1, 16384\]"),
        (lambda e: e.add([1], SamplingParams(n=2)), "^n: expected 1, got 2; add a request for each"),
        (lambda e: e.add([1], max_new_tokens=0), "^max_new_tokens: "),
        (lambda e: e.add([1], max_new_tokens=2.5), "^max_new_tokens: expected an integer >= 1, got 2.5"),
        (lambda e: e.add([1], stop_ids=[0.5]), r"^stop_ids: expected token ids in \[0, 40\), got 0.5"),
        (lambda e: e.add([1], stop_ids=[2**70]), r"^stop_ids: expected token ids in \[0, 40\)"),
        (lambda e: e.add([1], stop_ids=1), "^stop_ids: expected a list of token ids, got int"),
        (lambda e: e.add([1], 0.7), "^sampling: expected SamplingParams, got 0.7"),
        (lambda e: e.add([1], priority="high"), "^priority: expected an integer, got 'high'"),
        (lambda e: e.add([1], client=7), "^client: expected a str or None, got 7"),
        (lambda e: e.generate(None), "^prompts: expected a list of prompts"),
        (
            lambda e: e.generate([[1]], 0.7),
            "^sampling: expected SamplingParams for all prompts, or a list with one for each, got 0.7",
        ),
        (lambda e: e.generate([[1]], [None]), r"^sampling\[0\]: expected SamplingParams, got None"),
        (lambda e: e.add([1], grammar="a*"), "^grammar: expected a Grammar or None, got str"),
        (lambda e: e.reset_prefix_cache(), "^reset_prefix_cache: .*, got 4 under way"),
    ],
)
def test_a_bad_request_is_refused_alone_by_name(bad: object, message: str, under_way: Engine) -> None:
    with pytest.raises(MLAError, match=message):
        bad(under_way)


def test_a_request_shows_no_prompt_in_errors_and_logs(under_way: Engine) -> None:
    assert "31, 32" not in repr(under_way.add([31, 32], max_new_tokens=1))


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy() -> None:
    assert SamplingParams(temperature=np.float32(0.5)).temperature == 0.5
    with pytest.raises(MLAError, match=r"^seed: expected an integer .*, got np\.int64\(3\)"):
        SamplingParams(seed=np.int64(3))
    with pytest.raises(MLAError, match=r"^temperature: "):
        SamplingParams(temperature=10**400)


def test_later_changes_of_the_callers_lists_do_not_matter() -> None:
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("")
    ids.append(-1)
    assert (params.stop_strings, params.stop_token_ids) == (["a"], (1,))


def test_a_request_has_at_most_64_stop_ids() -> None:
    intake = Intake(SimpleNamespace(vocab_size=1000), 64, None)
    params = SamplingParams(stop_token_ids=range(100, 120))
    assert len(intake.request([1], params, 8, range(44), None).stop_ids) == MAX_STOP_IDS
    with pytest.raises(MLAError, match=r"^stop_token_ids: expected at most 64 ids, .* included, got 65"):
        intake.request([1], params, 8, [*range(44), 500], None)
    with pytest.raises(MLAError, match=r"^stop_ids: expected at most 64 ids, .* included, got 65"):
        intake.request([1], SamplingParams(), 8, range(65), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_pages": 16}, "^num_pages: expected at least 17, for one row"),
        ({"max_tokens_per_step": 15}, "^max_tokens_per_step: expected at least max_rows"),
        ({"max_rows": 2**30}, r"^max_rows, max_model_len, page_size: expected fewer than 2\*\*31 pages"),
        ({"max_tokens_per_step": 0}, "^max_tokens_per_step: expected an integer >= 1"),
        ({"num_pages": 1.5}, "^num_pages: expected an integer >= 2"),
        ({"k": "3"}, r"^num_speculative_tokens: expected an integer in \[0, 32\], got '3'"),
        ({"decode_backend": ["triton"]}, "^decode_backend: expected one of .*, or None, got"),
    ],
)
def test_an_engine_that_could_not_serve_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(MLAError, match=message):
        engine(**settings)


def test_an_error_in_a_step_ends_the_requests_and_the_engine_goes_on(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = engine()
    generations = [mine.add(p, s, max_new_tokens=20) for p, s in zip(PROMPTS, MIXED)]
    mine.step()

    def fails(*args: object) -> torch.Tensor:
        raise RuntimeError("the device has caught fire")

    with monkeypatch.context() as patched:
        patched.setattr(type(mine.model), "logits", fails)
        with pytest.raises(RuntimeError, match="caught fire"):
            mine.step()
    assert {(g.completion.finish_reason, g.completion.error) for g in generations} == {
        ("error", "the device has caught fire")
    }
    assert not mine.has_work()
    assert [c.token_ids for c in mine.generate(PROMPTS, MIXED, max_new_tokens=20)] == expected


def test_stats_count_requests_and_pages() -> None:
    mine = engine(max_rows=2)
    assert mine.stats.acceptance_length is None
    generations = [mine.add(prompt, max_new_tokens=20) for prompt in PROMPTS]
    mine.step()
    now = mine.stats
    assert (now.rows_in_use, now.max_rows, now.num_waiting) == (2, 2, 2)
    assert 0 < now.pages_in_use <= now.num_pages == 32
    assert now.step_seconds > 0
    finish(mine)
    then = mine.stats
    assert now.num_steps == 1, "a copy"
    assert (then.rows_in_use, then.num_waiting, then.pages_in_use) == (0, 0, 0)
    assert then.num_tokens == sum(len(g.completion.token_ids) for g in generations) == 80
    assert then.num_prompt_tokens == sum(map(len, PROMPTS))
    assert then.num_verified == sum(g.completion.num_steps for g in generations)
    assert then.num_verified_tokens == then.num_tokens - len(PROMPTS)
    assert 1 <= then.acceptance_length <= 4
    assert then.total_step_seconds > then.step_seconds


@pytest.mark.parametrize("k", [0, 3])
def test_streams_of_chosen_and_of_sampled_tokens_run_concurrently(k: int, expected: list[list[int]]) -> None:
    def second_best(
        logits: torch.Tensor, drafts: torch.Tensor, completions: Sequence[Completion]
    ) -> torch.Tensor:
        assert len(logits) == len(drafts) == len(completions)
        return logits.topk(2).indices[..., 1]

    def last(stream: object) -> list[list[int]]:
        return [completion.token_ids for completion in [*stream][-1]]

    chosen = last(engine(0).stream(PROMPTS[:2], max_new_tokens=15, choose=second_best))
    mine = engine(k, max_rows=3)
    beside = [mine.add(p, s, max_new_tokens=20) for p, s in zip(PROMPTS, MIXED)]
    assert last(mine.stream(PROMPTS[:2], max_new_tokens=15, choose=second_best)) == chosen
    finish(mine)
    assert texts(beside) == expected
