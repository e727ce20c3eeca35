"""An accelerated model generates what the stock one does, token by token, for every MLA family of transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from mla_compile.integrations.transformers import accelerate
from tests.integrations import stock
from tests.integrations.families import FAMILIES, prompts, stock_model
from tests.integrations.mtp import MTP_FAMILIES, STEPS, save_checkpoint, with_mtp


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_stock(family):
    model, steps = stock_model(family), STEPS // 2
    expected = stock.greedy(model, prompts(), steps)
    assert accelerate(model, compile=False, page_size=16) is model
    assert stock.greedy(model, prompts(), steps) == expected
    for prompt, text in list(zip(prompts(), expected))[:2]:
        assert stock.greedy(model, [prompt], steps) == [text]


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("glm4_moe_lite", marks=pytest.mark.slow)])
def test_greedy_tokens_with_drafts_are_those_of_stock(family, k):
    model, mtp, expected = with_mtp(family)
    accelerate(model, num_speculative_tokens=k, mtp=mtp, compile=False)
    assert stock.greedy(model, prompts(), STEPS) == expected
    for prompt, text in list(zip(prompts(), expected))[:2]:
        assert stock.greedy(model, [prompt], STEPS) == [text]


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_drafts_are_those_of_the_checkpoints_mtp_layer(family, k, tmp_path):
    model, mtp, expected = with_mtp(family)
    loaded = AutoModelForCausalLM.from_pretrained(save_checkpoint(model, mtp, tmp_path), dtype=torch.float32)
    accelerate(loaded, num_speculative_tokens=k, compile=False)
    assert stock.greedy(loaded, prompts(), STEPS) == expected
    for prompt, text in list(zip(prompts(), expected))[:1]:
        steps = first_positions(model, mtp, prompt, text, k)
        seen = observed_first_positions(loaded, prompt)
        assert seen[: len(steps)] == steps, "another draft was accepted, or a right one was not"


def first_positions(
    model: PreTrainedModel, mtp: MtpModel, prompt: list[int], text: list[int], k: int
) -> list[int]:
    """Where the trunk's forwards start: the prompt's, and those of the steps that verify the drafts after each text."""
    starts, done = [0], 1
    while done < len(text):
        starts.append(len(prompt) + done - 1)
        drafts = stock.drafts(model, mtp, prompt + text[:done], k)
        right = [draft == token for draft, token in zip(drafts, text[done:])]
        done += 1 + [*right, False].index(False)
    return starts


def observed_first_positions(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Where the forwards of the model's decoder start while it generates."""
    starts: list[int] = []

    def note(_module, _args, kwargs) -> None:
        starts.append(int(kwargs["position_ids"].min()))

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    stock.greedy(model, [prompt], STEPS)
    handle.remove()
    return starts


@pytest.mark.parametrize("k", [0, 3])
def test_a_row_ends_at_its_eos_token_and_is_padded_behind_it(k):
    model, mtp, texts = with_mtp("deepseek_v3")
    eos = {"eos_token_id": [texts[0][20], texts[2][9]], "pad_token_id": 0}
    expected = stock.greedy(model, prompts(), STEPS, **eos)
    assert expected != texts
    accelerate(model, num_speculative_tokens=k, mtp=mtp if k else None, compile=False)
    assert stock.greedy(model, prompts(), STEPS, **eos) == expected


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_drafts_do_not_pass_the_number_of_new_tokens(steps):
    model, mtp, expected = with_mtp("deepseek_v3")
    accelerate(model, num_speculative_tokens=3, mtp=mtp, compile=False)
    assert stock.greedy(model, prompts(), steps) == [text[:steps] for text in expected]


@pytest.mark.slow  # with drafts one is compiled below; what families add to its graph, the tests of passes compile
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_a_compiled_model_are_those_of_stock(family):
    model = stock_model(family)
    expected = stock.greedy(model, prompts(), STEPS)
    accelerate(model, compile=True)
    assert stock.greedy(model, prompts(), STEPS) == expected


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) for f in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")],
)
def test_greedy_tokens_of_a_compiled_model_with_one_group_of_experts_are_those_of_stock(family):
    model = stock_model(family, n_group=1, topk_group=1, num_hidden_layers=2)
    expected = stock.greedy(model, prompts(), STEPS)
    accelerate(model, compile=True)
    assert stock.greedy(model, prompts(), STEPS) == expected


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
def test_greedy_tokens_of_a_compiled_model_with_drafts_are_those_of_stock():
    model, mtp, expected = with_mtp("deepseek_v3")
    accelerate(model, num_speculative_tokens=1, mtp=mtp, compile=True)
    assert stock.greedy(model, prompts(), STEPS) == expected
    assert stock.greedy(model, prompts()[:1], STEPS) == expected[:1]
