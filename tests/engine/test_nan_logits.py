"""NaN is never a token: a request whose logits are NaN or infinite ends with an error that names them.

The random traces of `test_engine_traces.py` have it with everything else that an engine does.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.start import start
from mla_compile import Completion, Engine, Grammar, MLAError, SamplingParams
from mla_compile.integrations.transformers import accelerate
from mla_compile.ops.reductions.last_dim import row_argmax
from mla_compile.speculate.choice import can_choose
from mla_compile.speculate.state import COUNT, FAILED_AT, FIRST_TOKEN
from mla_compile.testing import shadow_check
from tests.engine.engine_traces import POISONS, poisoned
from tests.engine.engines import engine
from tests.engine.test_grammar import REGEX, SMALL
from tests.integrations.families import stock_model

PROMPTS = [[1, 2, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.1, seed=4, top_k=20, logprobs=3),
    SamplingParams(frequency_penalty=0.8, repetition_penalty=1.2, logprobs=1),
]
LENGTH = 20


def poisoned_engine(k: int, where: str, poison: int, **settings: object) -> Engine:
    return engine(k, copy.deepcopy(poisoned(where, poison)), **settings)


def cut(completions: Sequence[Completion], poison: int) -> list[tuple[list[int], str | None]]:
    """The tokens of a poisoned model for these prompts: those of a healthy one, up to the poison."""
    expected = []
    for completion in completions:
        tokens, reason = completion.token_ids, completion.finish_reason
        if poison in tokens[:-1]:
            tokens, reason = tokens[: tokens.index(poison) + 1], "error"
        expected.append((tokens, reason))
    return expected


def results(completions: Sequence[Completion]) -> list[tuple[list[int], str | None]]:
    for completion in completions:
        assert (completion.error is not None) == (completion.finish_reason == "error")
        assert completion.logprobs is None or len(completion.logprobs) == len(completion.token_ids)
    return [(completion.token_ids, completion.finish_reason) for completion in completions]


def middle(completion: Completion) -> int:
    """A token that first occurs in the middle of the completion."""
    tokens = completion.token_ids
    return next(token for i, token in enumerate(tokens) if i >= 4 and token not in tokens[:i])


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
def test_a_token_can_be_chosen_where_the_largest_logit_is_a_number(compiled: bool) -> None:
    """Also in Inductor's vectors and in the scalar rest after them."""

    def both(logits: Tensor) -> tuple[Tensor, Tensor]:
        return can_choose(logits), row_argmax(logits)

    run = torch.compile(both) if compiled else both
    g = torch.Generator().manual_seed(0)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf])
    for width in [517, 768] if compiled else [1, 3, 16, 40, 517, 768]:
        logits = torch.randn(300, width, generator=g)
        for row in logits[100:]:
            at = torch.randint(width, (int(torch.randint(1, 4, (), generator=g)),), generator=g)
            row[at] = odd[torch.randint(3, at.shape, generator=g)]
        logits[0], logits[1] = -torch.inf, torch.nan
        bad = logits.isnan().any(1) | (logits == torch.inf).any(1) | (logits == -torch.inf).all(1)
        usable, tokens = run(logits)
        assert torch.equal(usable, ~bad)
        assert ((tokens >= 0) & (tokens < width)).all(), "what is not used is an id all the same"
        assert torch.equal(tokens[usable], logits[usable].argmax(dim=-1))


@pytest.mark.parametrize("k", [0, 3])
def test_a_model_that_gives_nothing_but_nan_gives_no_token(k: int) -> None:
    broken = engine(k)
    broken.model.lm_head.weight.fill_(torch.nan)
    for params in MIXED:
        for prompt, completion in zip(PROMPTS, broken.generate(PROMPTS, replace(params, n=1))):
            assert (completion.token_ids, completion.finish_reason) == ([], "error")
            assert completion.error == f"the model's logits for position {len(prompt)} are NaN or infinite"
            assert completion.acceptance_length is None
    assert broken.stats.num_tokens == broken.stats.pages_in_use == 0
    assert broken.generate(PROMPTS[:1], SamplingParams(n=3, temperature=1))[2].finish_reason == "error"


@pytest.mark.parametrize("where", POISONS)
@pytest.mark.parametrize("drafter", ["mtp", pytest.param("ngram", marks=pytest.mark.slow)])
def test_only_the_requests_that_meet_nan_end_of_it(where: str, drafter: str) -> None:
    healthy = engine(0).generate(PROMPTS, MIXED, max_new_tokens=LENGTH)
    poison = middle(healthy[1])
    expected = cut(healthy, 99 if where == "drafts" else poison)
    assert where == "drafts" or "error" in dict(map(reversed, expected))
    for k in (0, 1, 3):
        of = poisoned_engine(k, where, poison, drafter=drafter if k else None)
        assert results(of.generate(PROMPTS, MIXED, max_new_tokens=LENGTH)) == expected
        assert results(of.generate(PROMPTS, MIXED, max_new_tokens=LENGTH)) == expected, "from shared pages"


@pytest.mark.parametrize("seed", range(6))
def test_prompts_with_nan_in_them_spoil_no_prompt_beside_them(seed: int) -> None:
    dice, poison = random.Random(seed), 39
    ids = [*range(1, 30)]
    prompts = [[dice.choice(ids) for _ in range(dice.randint(1, 12))] for _ in range(6)]
    healthy = engine(0).generate(prompts, max_new_tokens=4)
    spoilt = dice.sample(range(6), 3)
    for i in spoilt:
        prompts[i][dice.randrange(len(prompts[i]))] = poison
    of = poisoned_engine(
        dice.choice([0, 2]), "latents", poison, max_rows=6, max_tokens_per_step=dice.choice([18, 60])
    )
    for i, (tokens, reason) in enumerate(results(of.generate(prompts, max_new_tokens=4))):
        wanted = ([], "error") if i in spoilt else (healthy[i].token_ids, "length")
        assert (tokens, reason) == wanted, i


@pytest.mark.long
@pytest.mark.parametrize("k", [0, 3])
def test_tokens_that_the_host_chooses_are_no_exception(k: int) -> None:
    def second_best(logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
        assert ((drafts >= 0) & (drafts < 40)).all()
        return logits.topk(2).indices[..., 1]

    def chosen(of: Engine) -> list[Completion]:
        return [[], *of.stream(PROMPTS, max_new_tokens=LENGTH, choose=second_best)][-1]

    healthy = chosen(engine(0))
    poison = middle(healthy[0])
    for where in POISONS[:3]:
        assert results(chosen(poisoned_engine(k, where, poison))) == cut(healthy, poison)
    grammars = [Grammar.from_regex(REGEX, SMALL), None, None]
    settings = {"max_new_tokens": LENGTH, "grammars": grammars, "stop_ids": [0]}
    healthy = engine(0).generate(PROMPTS, MIXED[1], **settings)
    poison = middle(healthy[0])
    for where in POISONS[:3]:
        of = poisoned_engine(k, where, poison)
        assert results(of.generate(PROMPTS, MIXED[1], **settings)) == cut(healthy, poison)


def test_a_draft_that_gives_nan_costs_a_step_and_no_token() -> None:
    """Its latents spoil the row's earlier positions, as 0 x NaN is NaN. So the next step has no drafts."""
    poison, length = 39, 12
    of = poisoned_engine(3, "latents", poison)
    (expected, *_) = engine(0).generate(PROMPTS[:2], max_new_tokens=length)
    step, state = start(of, PROMPTS[:2], length, [SamplingParams()] * 2, [])
    text, had = [int(state.last_token[0])], []
    while state.active[0]:
        if state.num_drafts[0] == 3:
            state.drafts[0] = torch.tensor([0, poison, 1])
        step(state)
        count, active, num_verified, _, *tokens = state.report[0].tolist()
        assert active in (0, 1)
        text += tokens[:count]
        had.append((num_verified, count))
    assert text == expected.token_ids and poison not in text
    assert had[:4] == [(3, 0), (0, 1)] * 2


def test_the_report_of_a_step_has_the_position_that_has_no_token() -> None:
    (healthy, other) = engine(0).generate(PROMPTS[:2], max_new_tokens=LENGTH)
    poison = middle(healthy)
    assert poison not in other.token_ids
    of = poisoned_engine(2, "logits", poison)
    step, state = start(of, PROMPTS[:2], LENGTH, [SamplingParams()] * 2, [])
    texts = [[token] for token in state.last_token[:2].tolist()]
    while state.active.any():
        before = state.active.tolist()
        step(state)
        for text, line in zip(texts, state.report.tolist()):
            text += line[FIRST_TOKEN : FIRST_TOKEN + line[COUNT]]
        if before[0] and not state.active[0]:
            length = healthy.token_ids.index(poison) + 1
            assert state.report[0, FAILED_AT] == len(PROMPTS[0]) + length
    assert texts == [healthy.token_ids[:length], other.token_ids]


def test_steps_that_check_themselves_find_nothing_wrong_with_nan() -> None:
    healthy = engine(0).generate(PROMPTS, MIXED, max_new_tokens=LENGTH)
    poison = middle(healthy[0])
    of = poisoned_engine(3, "latents", poison)
    with shadow_check(of):
        assert results(of.generate(PROMPTS, MIXED, max_new_tokens=LENGTH)) == cut(healthy, poison)


@pytest.mark.parametrize(
    "kwargs", [{}, {"do_sample": True}, {"output_logits": True, "return_dict_in_generate": True}]
)
def test_an_accelerated_model_raises_where_stock_would_go_on_with_any_token(
    kwargs: dict[str, object],
) -> None:
    stock = stock_model("deepseek_v2")
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = stock.generate(ids, **settings)
    accelerate(stock, num_speculative_tokens=2, compile=False)
    weight = stock.get_input_embeddings().weight
    kept = weight[8].clone()
    weight[8] = torch.nan
    with pytest.raises(
        MLAError, match=r"^logits: expected numbers, got row 1: the model's logits for position 3"
    ):
        stock.generate(ids, **{**settings, **kwargs})
    weight[8] = kept
    assert torch.equal(stock.generate(ids, **settings), expected)
