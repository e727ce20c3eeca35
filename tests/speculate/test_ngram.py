"""The n-gram drafter: what it drafts, and that no token depends on it; on tiny random models."""

import copy
import random
from typing import get_args

import pytest
import torch

from benchmarks.start import start
from mla_compile import MLAError
from mla_compile.caches import allocate
from mla_compile.defaults import DrafterName
from mla_compile.engine import Completion, Engine
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import DecodeState, SamplingParams, SpeculativeDecoder
from mla_compile.speculate.drafter import DRAFTERS
from mla_compile.speculate.ngram import lookup_drafts
from mla_compile.testing import shadow_check
from tests.counters import compile_counters
from tests.engine.engines import engine
from tests.host_sync import NoHostSync
from tests.models.small import randomize
from tests.models_for_tests import poison_caches, tiny_config, tiny_model
from tests.speculate.prompt_lookup import prompt_lookup

PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 9, 4, 5, 6], [9], [1, 2, 3, 1, 2, 7]]
GREEDY = SamplingParams()
MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2, top_k=9, presence_penalty=0.5),
    SamplingParams(repetition_penalty=1.2),
]


def without_mtp(dtype: torch.dtype = torch.float64, num_layers: int = 2) -> MLAForCausalLM:
    config = copy.copy(tiny_config())
    config.num_hidden_layers = num_layers
    model = MLAForCausalLM(config, mtp=False)
    randomize(model, 0)
    model.lm_head.weight.mul_(3)
    return model.to(dtype)


def repeating(dtype: torch.dtype = torch.float64) -> MLAForCausalLM:
    """Each token follows from the one before it alone, so a greedy text soon repeats itself."""
    model = without_mtp(dtype, num_layers=1)
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
    return model


def ngram_engine(model: MLAForCausalLM, k: int, **settings: object) -> Engine:
    return engine(k, model, **{"drafter": "ngram", **settings})


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_drafts_are_those_of_a_plain_search_of_the_text() -> None:
    r = random.Random(0)
    for _ in range(500):
        num_ids, places, k = r.choice([1, 2, 3, 8]), r.randint(2, 20), r.randint(1, 7)
        texts = [[r.randrange(num_ids) for _ in range(r.randint(2, places))] for _ in range(3)]
        history = torch.randint(num_ids, (3, places), dtype=torch.int32)  # behind a text there is anything
        for row, text in enumerate(texts):
            history[row, : len(text)] = torch.tensor(text)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        assert lookup_drafts(history, lengths, k).tolist() == [prompt_lookup(text, k) for text in texts], (
            texts
        )


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 5, 2, 3], [4, 5, 2, 3]),
        ([1, 2, 7, 9, 2, 8, 1, 2], [7, 9, 2, 8]),  # the longer match, not the later one
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # of equals the later one
        ([5, 6, 5, 6, 5], [6, 5, 6, 5]),  # on and on
        ([1, 2, 3], [3, 3, 3, 3]),  # nothing agrees
    ],
)
def test_the_longest_and_then_the_latest_match_is_followed(text: list[int], drafts: list[int]) -> None:
    history = torch.tensor([[*text, 3, 3, 3]], dtype=torch.int32)
    assert lookup_drafts(history, torch.tensor([len(text)]), 4).tolist() == [drafts]


@pytest.mark.long
def test_the_compiled_look_up_finds_the_same() -> None:
    k = 3
    history = torch.randint(5, (3, 40), dtype=torch.int32)
    lengths = torch.tensor([5, 30, 40], dtype=torch.int32)
    compiled = torch.compile(lookup_drafts, fullgraph=True)
    assert torch.equal(compiled(history, lengths, k), lookup_drafts(history, lengths, k))


@pytest.mark.parametrize("k", [1, 3])
def test_every_steps_drafts_are_those_of_a_plain_search_of_the_text(k: int) -> None:
    step, state = start(ngram_engine(without_mtp(), k), PROMPTS, 50, MIXED, [])
    texts = [list(prompt) for prompt in PROMPTS]
    while state.active.any():
        for text, (count, active, _, _, *emitted), drafts in zip(
            texts, state.report.tolist(), state.drafts.tolist(), strict=True
        ):
            text += emitted[:count]
            assert not active or drafts == prompt_lookup(text, k)
        step(state)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return tokens(ngram_engine(without_mtp(), 0).generate(PROMPTS, MIXED, max_new_tokens=30))


@pytest.mark.parametrize("k", [1, 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_rows": 1},  # each alone
        {"num_pages": 17},  # preempted
        {"max_tokens_per_step": 26, "max_rows": 4},  # chunks beside rows that decode
    ],
    ids=str,
)
def test_no_token_depends_on_the_drafts(plain: list[list[int]], k: int, settings: dict) -> None:
    served = ngram_engine(without_mtp(), k, **settings)
    assert tokens(served.generate(PROMPTS, MIXED, max_new_tokens=30)) == plain
    assert ("num_pages" in settings) == (served.stats.num_preemptions > 0)
    # Once more, with what the first time has left in the caches.
    assert tokens(served.generate(PROMPTS, MIXED, max_new_tokens=30)) == plain
    assert served.stats.num_reused_tokens > 0


def test_an_mtp_layer_and_a_look_up_give_the_same_tokens() -> None:
    mtp, ngram = (
        ngram_engine(tiny_model(), 3, drafter=drafter).generate(PROMPTS, MIXED, max_new_tokens=30)
        for drafter in ("mtp", "ngram")
    )
    assert tokens(mtp) == tokens(ngram)


def test_a_page_is_shared_whatever_token_comes_after_it() -> None:
    """An MTP layer's latent at its last position would depend on that."""
    begun = [1, 2, 3, 4]
    for drafter, reused in (("ngram", 4), ("mtp", 0)):
        served = ngram_engine(tiny_model(), 2, drafter=drafter)
        served.generate([[*begun, 5, 6]], max_new_tokens=4)
        served.generate([[*begun, 7]], max_new_tokens=4)
        assert served.stats.num_reused_tokens == reused, drafter


def test_text_that_repeats_is_drafted_right() -> None:
    for k in (1, 3, 5):
        (completion,) = ngram_engine(repeating(), k, max_model_len=256).generate([[3]], max_new_tokens=200)
        assert completion.acceptance_length is not None
        assert completion.acceptance_length > 0.8 * (k + 1)


def test_tokens_chosen_on_the_host_are_looked_up_too() -> None:
    """The host chooses 7, 8, 9, 7, 8, 9, ... for any logits."""
    served = ngram_engine(without_mtp(), 3)

    def choose(logits: torch.Tensor, drafts: torch.Tensor, completions: list[Completion]) -> torch.Tensor:
        start = torch.tensor([[len(c.token_ids)] for c in completions])
        return 7 + (start + torch.arange(logits.shape[1])) % 3

    out = [[], *served.stream(PROMPTS, max_new_tokens=40, choose=choose)][-1]
    assert tokens(out) == [[7 + i % 3 for i in range(40)]] * 4
    assert all(completion.acceptance_length > 3 for completion in out)


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_compiled_steps_give_the_tokens_of_eager_ones_in_two_graphs() -> None:
    torch._dynamo.utils.counters.clear()
    settings = {"max_rows": 4, "max_model_len": 64}
    compiled = ngram_engine(repeating(torch.float32), 3, compile=True, **settings)
    plain = ngram_engine(repeating(torch.float32), 0, **settings)
    for rows in (2, 1, 4):
        got, expected = (e.generate(PROMPTS[:rows], max_new_tokens=40) for e in (compiled, plain))
        assert tokens(got) == tokens(expected), f"{rows} rows"
        assert min(completion.acceptance_length for completion in got) > 2
    assert compile_counters()["graphs"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_mixed_steps")
def test_mixed_steps_compile() -> None:
    eager, compiled = (
        ngram_engine(repeating(torch.float32), 2, max_rows=2, compile=compile) for compile in (False, True)
    )
    expected = eager.generate(PROMPTS, max_new_tokens=20)
    poison_caches(compiled.model)
    assert compiled.generate(PROMPTS, max_new_tokens=20) == expected


def test_a_step_never_waits_for_the_device() -> None:
    model = without_mtp().to("meta")
    allocate(model.cache_specs(), 9, 4)
    state = DecodeState.allocate(4, 3, max_pages=2, history_len=8, device="meta")
    decoder = SpeculativeDecoder(model, 3, page_size=4, drafter="ngram", sampled=True)
    with NoHostSync():
        decoder(state)


def test_steps_are_checked_by_their_eager_run() -> None:
    checked, plain = (ngram_engine(without_mtp(), k) for k in (3, 0))
    with shadow_check(checked):
        got, expected = (e.generate(PROMPTS, max_new_tokens=12) for e in (checked, plain))
    assert tokens(got) == tokens(expected)


def test_the_drafter_is_the_mtp_layer_where_there_is_one() -> None:
    assert ngram_engine(tiny_model(), 3, drafter=None).config.drafter.name == "mtp"
    assert ngram_engine(without_mtp(), 3, drafter=None).config.drafter.name == "ngram"
    assert ngram_engine(without_mtp(), 0, drafter="mtp").config.num_speculative_tokens == 0


def test_what_cannot_draft_is_refused_by_name() -> None:
    assert [kind.name for kind in DRAFTERS] == list(get_args(DrafterName)), "the command's names"
    unknown = "drafter: expected .*'ngram'.*, a DrafterKind or None, got 'eagle'"
    with pytest.raises(MLAError, match=unknown):
        ngram_engine(without_mtp(), 3, drafter="eagle")
    with pytest.raises(MLAError, match=unknown):
        SpeculativeDecoder(without_mtp(), 3, page_size=4, drafter="eagle")
    message = "drafter: expected 'ngram' or None for a model without an MTP layer, got 'mtp'"
    with pytest.raises(MLAError, match=message):
        ngram_engine(without_mtp(), 3, drafter="mtp")
    model = without_mtp()
    allocate(model.cache_specs(), 9, 4)
    with pytest.raises(MLAError, match=r"state\.history: expected a tensor"):
        SpeculativeDecoder(model, 3, page_size=4, drafter="ngram")(DecodeState.allocate(2, 3, max_pages=2))
