"""What changes logits, min-p and log-probabilities: against their definitions, the same with and without drafts."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.start import start
from mla_compile import Completion, MLAError, SamplingParams
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import DecodeState, SpeculativeDecoder
from mla_compile.speculate.sampling import penalise_after, sample, top_logprobs
from mla_compile.speculate.state import FIRST_TOKEN
from tests.counters import compile_counters
from tests.engine.engines import engine
from tests.host_sync import NoHostSync
from tests.models_for_tests import VOCAB, one_layer_model, tiny_model
from tests.speculate.defined_sampling import (
    Vector,
    arguments_of,
    defined_kept,
    defined_penalties,
    defined_token,
)
from tests.speculate.from_scratch import PAGE, FromScratch

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 4], [9], [10, 11, 12, 13], [14], [15, 15, 16], [17, 18], [19, 3, 3]]
STOP = 20
MIXED = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(temperature=0.8, seed=1, presence_penalty=0.7, frequency_penalty=0.4, min_p=0.02),
    SamplingParams(frequency_penalty=1.5, presence_penalty=-0.5),
    SamplingParams(temperature=1.2, seed=2, repetition_penalty=0.8, top_k=9, top_p=0.9),
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(logit_bias=dict.fromkeys(range(0, VOCAB, 2), 2.5) | {STOP: 100}, min_tokens=7),
    SamplingParams(temperature=0.9, seed=-4, logit_bias={STOP: 4, 3: -100}, min_tokens=5, presence_penalty=1),
]


eight_rows = partial(engine, max_rows=8)


@pytest.fixture(scope="module")
def model() -> MLAForCausalLM:
    return tiny_model()


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


PENALTIES = "repetition_penalty", "presence_penalty", "frequency_penalty"
penalties = st.fixed_dictionaries(
    {
        "repetition_penalty": st.floats(0.25, 4, width=32),
        "presence_penalty": st.floats(-2, 2, width=32),
        "frequency_penalty": st.floats(-2, 2, width=32),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    each=st.lists(penalties, min_size=1, max_size=3),
    data=st.data(),
    n=st.integers(1, 4),
    further=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_every_position_counts_the_drafts_before_it(
    each: list[dict[str, float]], data: st.DataObject, n: int, further: int, seed: int
) -> None:
    """Ids from a vocabulary of 6, so that drafts repeat one another and the text."""
    vocab, rows, m = 6, len(each), n - 1 + further
    ids = st.integers(0, vocab - 1)
    prompts, emitted = (
        [data.draw(st.lists(ids, max_size=5)) for _ in each],
        [data.draw(st.lists(ids, max_size=5)) for _ in each],
    )
    drafts = [data.draw(st.lists(ids, min_size=m, max_size=m)) for _ in each]
    logits = (
        torch.randn(rows, n, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    )
    counts = [[text.count(i) for i in range(vocab)] for text in emitted]
    state = SimpleNamespace(
        in_prompt=torch.tensor([[i in prompt for i in range(vocab)] for prompt in prompts]),
        num_emitted=torch.tensor(counts, dtype=torch.int32),
        **{name: torch.tensor([p[name] for p in each]) for name in PENALTIES},
    )
    got = penalise_after(state, logits, torch.tensor(drafts, dtype=torch.int64).view(rows, m))
    for row, j in np.ndindex(rows, n):
        text = emitted[row] + drafts[row][: m - n + 1 + j]
        expected = defined_penalties(logits[row, j].numpy(), prompts[row], text, SamplingParams(**each[row]))
        np.testing.assert_allclose(got[row, j].numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_neutral_penalties_leave_every_bit(dtype: torch.dtype) -> None:
    logits, drafts = torch.randn(2, 3, 9).to(dtype), torch.randint(9, (2, 2))
    one, zero = torch.ones(2), torch.zeros(2)
    counts = torch.ones(2, 9, dtype=torch.int32)
    state = SimpleNamespace(
        in_prompt=counts.bool(),
        num_emitted=counts,
        repetition_penalty=one,
        presence_penalty=zero,
        frequency_penalty=zero,
    )
    got = penalise_after(state, logits, drafts)
    assert torch.equal(got, logits.to(got.dtype))
    position = torch.arange(6).view(2, 3)
    rows = SimpleNamespace(**arguments_of(SamplingParams(1.0, seed=1), SamplingParams(1.0, seed=2, top_k=5)))
    assert torch.equal(sample(rows, got, position), sample(rows, logits, position)), (
        "whether the batch has penalties or not"
    )


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    temperature=st.floats(0.25, 3, width=32),
    min_p=st.sampled_from([0.0, 0.01, 0.07, 0.23, 0.6, 1.0]),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.0625, 1, width=32),
    seed=st.integers(0, 2**31),
)
def test_filters_keep_what_their_definitions_keep(
    temperature: float, min_p: float, top_k: int, top_p: float, seed: int
) -> None:
    logits = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    p = SamplingParams(temperature, top_k, top_p, seed, min_p)
    positions = torch.arange(80)
    got = sample(SimpleNamespace(**arguments_of(p)), logits.expand(1, 80, -1), positions[None])
    expected = [defined_token(logits, position, [], [], p) for position in range(80)]
    wrong = [position for position in range(80) if got[0, position] != expected[position]]
    # float32 and float64 may disagree on an id that is within rounding of a threshold.
    assert not wrong or _near_threshold(logits.numpy(), p), wrong


def _near_threshold(logits: Vector, p: SamplingParams) -> bool:
    kept = [
        defined_kept(logits, SamplingParams(p.temperature, p.top_k, top_p, p.seed, min_p))
        for min_p in (p.min_p * (1 - 1e-5), min(1, p.min_p * (1 + 1e-5)))
        for top_p in (p.top_p * (1 - 1e-5), min(1, p.top_p * (1 + 1e-5)))
    ]
    return any(kept[0] != other for other in kept)


def test_min_p_of_one_keeps_the_most_likely_token_only() -> None:
    logits = torch.tensor([0.10, 0.25, 0.02, 0.62, 0.01]).log().expand(1, 4000, -1)
    for min_p, kept in ((1.0, {3}), (0.3, {1, 3}), (0.02, {0, 1, 2, 3})):
        row = arguments_of(SamplingParams(1.0, min_p=min_p))
        drawn = sample(SimpleNamespace(**row), logits, torch.arange(4000)[None])
        assert set(drawn[0].tolist()) == kept


def test_min_p_comes_before_top_p() -> None:
    """0.62 is 0.713 of what min-p leaves, so top-p 0.7 is satisfied with it; of all it is not enough."""
    logits = np.log(np.array([0.10, 0.25, 0.02, 0.62, 0.01]))
    p = SamplingParams(1.0, top_p=0.7, min_p=0.3)
    assert defined_kept(logits, p) == {3}
    drawn = sample(
        SimpleNamespace(**arguments_of(p)), torch.tensor(logits).expand(1, 4000, -1), torch.arange(4000)[None]
    )
    assert set(drawn[0].tolist()) == {3}


@pytest.mark.long
@pytest.mark.parametrize("k", range(4))
def test_tokens_are_those_of_the_definitions_from_scratch(model: MLAForCausalLM, k: int) -> None:
    """Each expected token comes from a whole new forward and a text that is a Python list."""
    ends = [STOP, 21]
    out = eight_rows(k, model).generate(PROMPTS, max_new_tokens=20, sampling=MIXED, stop_ids=ends)
    for prompt, emitted, params in zip(PROMPTS, tokens(out), MIXED, strict=True):
        scratch, text = FromScratch(tiny_model()), list(prompt)
        while len(text) < len(prompt) + 20 and text[-1] not in ends:
            logits = scratch.model.logits(scratch.trunk(text)[-1])
            text.append(defined_token(logits, len(text), prompt, text[len(prompt) :], params, stop_ids=ends))
        assert emitted == text[len(prompt) :], params
    assert len(out[6].token_ids) == 8 and out[6].finish_reason == "stop", (
        "the first token that may be the end is"
    )


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mixed", [MIXED, MIXED[::-1]], ids=["mixed", "reversed"])
def test_drafts_change_no_token_of_rows_with_and_without_penalties(
    dtype: torch.dtype, mixed: list[SamplingParams]
) -> None:
    model = tiny_model(dtype)
    plain = eight_rows(0, model).generate(PROMPTS, max_new_tokens=40, sampling=mixed, stop_ids=[20, 21])
    assert len({len(c.token_ids) for c in plain}) > 1, "rows must end at different times"
    for k in (1, 2, 3):
        drafted = eight_rows(k, model).generate(PROMPTS, max_new_tokens=40, sampling=mixed, stop_ids=[20, 21])
        assert tokens(drafted) == tokens(plain), f"{k} drafts"
        assert [c.finish_reason for c in drafted] == [c.finish_reason for c in plain]


def test_rows_without_penalties_are_as_in_a_batch_without_any(model: MLAForCausalLM) -> None:
    mixed = eight_rows(2, model).generate(PROMPTS, max_new_tokens=30, sampling=MIXED, stop_ids=[STOP])
    alone = eight_rows(2, model).generate(
        PROMPTS[4:6], max_new_tokens=30, sampling=MIXED[4:6], stop_ids=[STOP]
    )
    assert tokens(mixed)[4:6] == tokens(alone)


def test_penalties_change_greedy_tokens(model: MLAForCausalLM) -> None:
    free = eight_rows(0, model).generate(PROMPTS, max_new_tokens=40)
    bound = eight_rows(0, model).generate(
        PROMPTS, max_new_tokens=40, sampling=SamplingParams(frequency_penalty=2, presence_penalty=2)
    )
    distinct = [[len(set(row)) for row in tokens(c)] for c in (free, bound)]
    assert all(few < many for few, many in zip(*distinct, strict=True))


@pytest.mark.long
@pytest.mark.usefixtures("eager_mixed_steps")
def test_inductors_code_penalises_greedy_rows_with_drafts() -> None:
    """The likeliest token in two steps, the best of parts first, was that before penalties in Inductor's code."""
    params = SamplingParams(frequency_penalty=0.5)
    eager, compiled = (
        engine(1, one_layer_model(torch.float32), max_rows=3, compile=compile).generate(
            PROMPTS, max_new_tokens=12, sampling=params
        )
        for compile in (False, True)
    )
    assert tokens(compiled) == tokens(eager)


def test_a_states_counts_are_those_of_the_emitted_text_after_every_acceptance_count(
    model: MLAForCausalLM,
) -> None:
    plain = tokens(eight_rows(0, model).generate(PROMPTS, max_new_tokens=40, sampling=MIXED))
    mine = eight_rows(3, model)
    step, state = start(mine, PROMPTS, 40, MIXED, [])
    done, seen = [1] * len(PROMPTS), set[int]()
    for turn in range(8):
        assert state.num_emitted is not None
        for row, text in enumerate(plain):
            assert state.num_emitted[row].tolist() == [text[: done[row]].count(i) for i in range(VOCAB)]
            accept = (turn + row) % 4
            true = text[done[row] : done[row] + 3]
            state.drafts[row] = torch.tensor(true[:accept] + [(t + 1) % VOCAB for t in true[accept:]])
        step(state)
        for row, count in enumerate(state.report[: len(PROMPTS), 0].tolist()):
            assert count == 1 + (turn + row) % 4, (
                "penalties of verified positions count the drafts before them"
            )
            done[row] += count
            seen.add(count)
    assert seen == {1, 2, 3, 4}


def test_a_stop_id_inside_accepted_drafts_ends_the_row_and_its_counts(model: MLAForCausalLM) -> None:
    plain = tokens(eight_rows(0, model).generate(PROMPTS[:1], max_new_tokens=40, sampling=MIXED[0]))[0]
    step, state = start(eight_rows(3, model), PROMPTS[:1], 40, MIXED[:1], [plain[2]])
    state.drafts[0] = torch.tensor(plain[1:4])
    step(state)
    assert state.report[0].tolist()[:6] == [2, 0, 3, 0, *plain[1:3]]
    assert state.num_emitted is not None
    counts = state.num_emitted.clone()
    assert counts.sum() == 3
    step(state)
    assert torch.equal(state.num_emitted, counts), "a finished row counts nothing more"


def test_an_engine_forgets_the_last_batch(model: MLAForCausalLM) -> None:
    mine = eight_rows(2, model)
    first = tokens(mine.generate(PROMPTS, max_new_tokens=20, sampling=MIXED))
    mine.generate(PROMPTS[::-1], max_new_tokens=20, sampling=MIXED)
    assert tokens(mine.generate(PROMPTS, max_new_tokens=20, sampling=MIXED)) == first


def test_drafts_are_chosen_with_the_penalties_of_the_positions_that_they_propose_for(
    model: MLAForCausalLM,
) -> None:
    step, state = start(eight_rows(3, model), PROMPTS, 40, MIXED, [STOP])
    oracle = FromScratch(tiny_model())
    emitted = [[token] for token in state.last_token[: len(PROMPTS)].tolist()]
    for _ in range(3):
        for row, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
            text = list(emitted[row])

            def choose(logits: torch.Tensor, position: int, text=text, prompt=prompt, params=params) -> int:
                text.append(defined_token(logits, position, prompt, text, params, stop_ids=[STOP]))
                return text[-1]

            if state.active[row]:
                assert state.drafts[row].tolist() == oracle.drafts(prompt + emitted[row], 3, choose)
        step(state)
        for row, text in enumerate(emitted):
            text += state.report[row, FIRST_TOKEN : FIRST_TOKEN + int(state.report[row, 0])].tolist()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_a_step_with_penalties_never_waits_for_the_device(k: int, sampled: bool) -> None:
    model = tiny_model().to("meta")
    allocate(model.cache_specs(), 9, PAGE)
    state = DecodeState.allocate(4, k, max_pages=2, penalised_vocab=VOCAB, device="meta")
    step = SpeculativeDecoder(model, k, page_size=PAGE, sampled=sampled)
    with NoHostSync():
        step(state)


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(2, 3, 30, dtype=torch.float64)
    chosen = torch.randint(30, (2, 3))
    values, ids = top_logprobs(logits, chosen, 4)
    for row, j in np.ndindex(2, 3):
        raw = logits[row, j].numpy()
        defined = raw - np.log(np.exp(raw).sum())
        order = np.argsort(-raw)
        assert ids[row, j].tolist() == [int(np.where(order == int(chosen[row, j]))[0][0]) + 1, *order[:4]]
        expected = [defined[chosen[row, j]], *defined[order[:4]]]
        np.testing.assert_allclose(values[row, j].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_parameters_with_a_bias_are_keys_of_a_dict_too() -> None:
    one, same, other = (SamplingParams(logit_bias={3: bias}) for bias in (1.0, 1.0, 2.0))
    assert {one: 1, other: 2}[same] == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {VOCAB: 1}}, rf"logit_bias: expected token ids in \[0, {VOCAB}\), got {VOCAB}"),
        ({"min_tokens": 9}, "min_tokens: expected at most 8, the maximum of new tokens, got 9"),
        (
            {"min_tokens": 1, "stop_token_ids": range(VOCAB)},
            "min_tokens: expected 0 if every token is a stop id",
        ),
    ],
)
def test_what_the_model_or_the_call_rules_out_is_refused_by_name(
    model: MLAForCausalLM, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(MLAError, match=message):
        eight_rows(0, model).add([1], SamplingParams(**fields), max_new_tokens=8)


def test_a_change_of_the_callers_biases_after_the_call_has_no_effect() -> None:
    bias: dict[int | str, float] = {"5": 1.0, 6: 2}
    params = SamplingParams(logit_bias=bias)
    bias[7] = 1000.0
    assert params.logit_bias == {5: 1.0, 6: 2}


WANTED = [3, None, 0, 5, 1, 2, 4, None]


def with_logprobs(mixed: list[SamplingParams]) -> list[SamplingParams]:
    return [SamplingParams(**{**vars(p), "logprobs": n}) for p, n in zip(mixed, WANTED, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("k", range(4))
def test_logprobs_are_those_of_a_forward_from_scratch_per_token(model: MLAForCausalLM, k: int) -> None:
    out = eight_rows(k, model).generate(
        PROMPTS, max_new_tokens=20, sampling=with_logprobs(MIXED), stop_ids=[20]
    )
    assert tokens(out) == tokens(
        eight_rows(0, model).generate(PROMPTS, max_new_tokens=20, sampling=MIXED, stop_ids=[20])
    )
    for prompt, completion, wanted in zip(PROMPTS, out, WANTED, strict=True):
        if wanted is None:
            assert completion.logprobs is None
            assert completion.cumulative_logprob is None
            continue
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        scratch, text, total = FromScratch(tiny_model()), list(prompt), 0.0
        for token, place in zip(completion.token_ids, completion.logprobs, strict=True):
            raw = scratch.model.logits(scratch.trunk(text)[-1]).double().log_softmax(-1)
            order = raw.argsort(descending=True).tolist()
            assert list(place) == list(dict.fromkeys([token, *order[:wanted]]))
            for i, found in place.items():
                assert math.isclose(found.logprob, raw[i], rel_tol=1e-5, abs_tol=1e-5)
                assert found.rank == order.index(i) + 1
            total += float(raw[token])
            text.append(token)
        assert completion.cumulative_logprob is not None
        assert math.isclose(completion.cumulative_logprob, total, rel_tol=1e-4)


@pytest.mark.slow  # `test_max_drafts.py` has such a step too, `test_mixed_step.py` one with other rows beside it
def test_the_compiled_step_gives_the_tokens_and_logprobs_of_plain_eager_decoding() -> None:
    model = one_layer_model(torch.float32)
    asked = with_logprobs(MIXED)
    plain = eight_rows(0, model).generate(PROMPTS, max_new_tokens=30, sampling=asked, stop_ids=[20])
    compiled = eight_rows(2, model, compile=True)
    for rows in (8, 3):
        got = compiled.generate(PROMPTS[:rows], max_new_tokens=30, sampling=asked[:rows], stop_ids=[20])
        assert tokens(got) == tokens(plain)[:rows]
        for mine, expected in zip(got, plain, strict=False):
            assert (mine.logprobs is None) == (expected.logprobs is None)
            for place, other in zip(mine.logprobs or [], expected.logprobs or [], strict=True):
                assert set(place) == set(other)
                assert all(math.isclose(place[i].logprob, other[i].logprob, abs_tol=1e-4) for i in place)
    steps = {bucket.step for bucket in compiled.capture_report().buckets}
    assert steps == {"verify", "advance, sampled"}, "in all rows: some sample"


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_requests_of_every_kind_share_three_compiled_parts() -> None:
    """Log-probabilities compile nothing, and penalties nothing more than sampling does."""
    mine = eight_rows(1, one_layer_model(torch.float32), compile=True)
    before = compile_counters()["graphs"]
    mine.warm_up()
    assert compile_counters()["graphs"] - before == 3, "verify, and advance for greedy and sampled rows"
    for params in (SamplingParams(), *MIXED, *with_logprobs(MIXED), SamplingParams(logprobs=20)):
        mine.generate(PROMPTS[:2], max_new_tokens=8, sampling=params, stop_ids=[20])
    assert compile_counters()["graphs"] - before == 3


def test_rows_may_ask_for_as_many_logprobs_as_there_are_and_more(model: MLAForCausalLM) -> None:
    (completion,) = eight_rows(1, model).generate(
        [[1]], max_new_tokens=3, sampling=SamplingParams(logprobs=20)
    )
    assert completion.logprobs is not None
    assert [len(place) for place in completion.logprobs] == [20] * 3


def test_logprobs_are_refused_where_tokens_are_chosen_on_the_host(model: MLAForCausalLM) -> None:
    with pytest.raises(MLAError, match="logprobs"):
        eight_rows(0, model).stream(
            [[1]], sampling=SamplingParams(logprobs=1), choose=lambda logits, *_: logits.argmax(-1)
        )


@pytest.mark.parametrize(
    "bad",
    [
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": math.inf},
        {"repetition_penalty": math.nan},
        {"presence_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"frequency_penalty": 2.1},
        {"frequency_penalty": math.nan},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": 1.0},
        {"logprobs": True},
        {"min_tokens": -1},
        {"min_tokens": 1.0},
        {"min_tokens": 6, "max_tokens": 5},
        {"logit_bias": [5]},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {5: -math.inf}},
        {"logit_bias": {5: None}},
        {"logit_bias": {5: True}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {2**63: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {"05": 1.0}},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {5: 1.0, "5": 1.0}},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
        {"include_stop_str_in_output": 1},
        {"skip_special_tokens": None},
    ],
    ids=str,
)
def test_bad_parameters_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(MLAError, match=next(iter(bad))):
        SamplingParams(**bad)
