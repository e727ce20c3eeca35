"""The references themselves: without them, the integration's tests would compare noise with noise."""

import pytest
import torch
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from benchmarks.families import families
from tests.integrations import stock
from tests.integrations.families import FAMILIES, prompts, stock_model
from tests.integrations.mtp import (
    MTP_FAMILIES,
    fitted_mtp,
    load_checkpoint,
    mtp_config,
    random_mtp,
    save_checkpoint,
)

STEPS = 64


@pytest.mark.slow  # of the models that other tests use, which do not change
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_varied_and_far_from_ties_and_the_same_without_padding_and_cache(family):
    model = stock_model(family)
    batch = stock.greedy(model, prompts(), STEPS)
    for prompt, text in zip(prompts(), batch):
        assert text == stock.greedy(model, [prompt], STEPS)[0]
        assert len(set(text)) >= 15
        logits = stock.logits(model, prompt + text)[len(prompt) - 1 : -1]
        best, second = logits.topk(2).values.T
        assert logits.argmax(dim=-1).tolist() == text
        assert (best - second).min() > 1e-3


@pytest.mark.long
def test_every_family_of_the_installed_transformers_is_tested_or_refused():
    found = {row["model_type"]: row["accelerate"] for row in families()}
    tested = set(FAMILIES) & found.keys()
    assert len(tested) >= 9 and {name for name, runs in found.items() if runs} == tested


# transformers has no class for LongCat's MTP layer, and does not find its weights.
IN_TRANSFORMERS = ["deepseek_v3", "glm4_moe_lite"]


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
def test_a_checkpoint_loads_as_what_was_written(family, tmp_path):
    model = stock_model(family)
    mtp = random_mtp(model)
    loaded = load_checkpoint(save_checkpoint(model, mtp, tmp_path))
    assert_same_weights(loaded, model)
    with mtp_config(loaded):
        assert_same_weights(MtpModel.from_pretrained(loaded), mtp)


def assert_same_weights(got: torch.nn.Module, expected: torch.nn.Module) -> None:
    got_state, expected_state = got.state_dict(), expected.state_dict()
    assert got_state.keys() == expected_state.keys()
    for name, weight in expected_state.items():
        assert torch.equal(got_state[name], weight), name


@pytest.mark.long
@pytest.mark.parametrize("family", IN_TRANSFORMERS)
def test_the_first_draft_is_the_one_that_transformers_own_generation_takes(family, tmp_path, proposals):
    model = stock_model(family)
    prompt = prompts()[0]
    text = stock.greedy(model, [prompt], STEPS)[0]
    mtp = fitted_mtp(model, [prompt + text])
    loaded = load_checkpoint(save_checkpoint(model, mtp, tmp_path))
    with mtp_config(loaded):
        assert stock.greedy(loaded, [prompt], STEPS, use_mtp=True) == [text]
    assert STEPS / 3 < len(proposals) < STEPS * 2 / 3, "some are accepted, some are not"
    for accepted, draft in proposals:
        assert stock.drafts(model, mtp, accepted, 1) == draft


@pytest.fixture
def proposals(monkeypatch) -> list[tuple[list[int], list[int]]]:
    """Texts, and the drafts that transformers proposed behind them."""
    seen: list[tuple[list[int], list[int]]] = []
    original = MTPCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, *args, **kwargs):
        ids, logits = original(self, input_ids, *args, **kwargs)
        before = input_ids.shape[1]
        if ids.shape[1] > before:
            seen.append((input_ids[0].tolist(), ids[0, before:].tolist()))
        return ids, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    return seen


@pytest.mark.slow  # slow too: every family
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_every_number_of_drafts_is_accepted_somewhere(family):
    k, model = 3, stock_model(family)
    texts = [prompt + text for prompt, text in zip(prompts(), stock.greedy(model, prompts(), STEPS))]
    mtp = fitted_mtp(model, texts)
    counts = set()
    for text in texts:
        for end in range(2, len(text) - k):
            drafts = stock.drafts(model, mtp, text[:end], k)
            hits = [draft == token for draft, token in zip(drafts, text[end:])]
            counts.add([*hits, False].index(False))
    assert counts == {0, 1, 2, 3}
