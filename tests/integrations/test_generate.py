"""Uses of `generate` work on an accelerated model as on the stock one, or are rejected by name."""

import copy
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CompileConfig,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import can_return_tuple

from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine import Engine
from mla_compile.errors import MLAError
from mla_compile.integrations.transformers import accelerate, generation, restore
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.latents import FP8
from tests.counters import compile_counters
from tests.integrations.families import FAMILIES, prompts, stock_model
from tests.integrations.mtp import MTP_FAMILIES, random_mtp, with_mtp
from tests.integrations.stock import greedy, left_padded

IDS, MASK = left_padded(prompts())
STEPS = 16


@pytest.fixture(scope="module")
def parts() -> tuple[PreTrainedModel, nn.Module]:
    model, mtp, _ = with_mtp("deepseek_v3")
    return model, mtp


@pytest.fixture
def model(parts: tuple[PreTrainedModel, nn.Module]) -> Iterator[PreTrainedModel]:
    yield parts[0]
    restore(parts[0])


@pytest.fixture(params=[0, 3])
def on(request: pytest.FixtureRequest, parts: tuple[PreTrainedModel, nn.Module]) -> Any:
    """Accelerates the model, without and with drafts."""
    k = request.param
    return lambda: accelerate(parts[0], num_speculative_tokens=k, mtp=parts[1] if k else None, compile=False)


def generate(model: Any, **kwargs: Any) -> Any:
    given = {"attention_mask": MASK, "max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0} | kwargs
    return model.generate(IDS, **given)


class Plus(LogitsProcessor):
    """Favours a token that depends on the text so far and on the row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = (input_ids.sum(dim=-1) + torch.arange(len(input_ids))) % scores.shape[1]
        return scores + 3 * torch.nn.functional.one_hot(favoured, scores.shape[1])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 12, "eos_token_id": [5, 9, 77]},
        {"bad_words_ids": [[3], [8, 9]], "renormalize_logits": True},
        {"logits_processor": LogitsProcessorList([Plus()])},
        {"prefix_allowed_tokens_fn": lambda row, ids: range(1 + row, 60 + 3 * row + len(ids))},
        {"forced_eos_token_id": 4, "eos_token_id": 4},
        {"eos_token_id": list(range(0, 211, 7))},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(IDS.shape[1] + 5)])},
        {"max_time": 60.0},
    ],
    ids=lambda kwargs: "-".join(kwargs),
)
def test_logits_processors_give_the_tokens_of_stock(model: Any, on: Any, kwargs: dict[str, Any]) -> None:
    expected = generate(model, **kwargs)
    on()
    assert torch.equal(generate(model, **kwargs), expected)


def test_scores_and_logits_are_those_of_stock(model: Any, on: Any) -> None:
    kwargs = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    expected = generate(model, repetition_penalty=1.2, **kwargs)
    on()
    got = generate(model, repetition_penalty=1.2, **kwargs)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(got[name]) == STEPS
        for ours, stocks in zip(got[name], expected[name], strict=True):
            torch.testing.assert_close(ours, stocks, atol=1e-4, rtol=1e-4)


def test_scores_of_rows_that_have_ended_are_zeros(model: Any, on: Any) -> None:
    text = generate(model)
    on()
    eos = int(text[1, IDS.shape[1] + 4])
    out = generate(model, eos_token_id=eos, output_logits=True, return_dict_in_generate=True)
    ends = (out.sequences[:, IDS.shape[1] :] == eos).int().argmax(dim=1)
    assert 0 <= ends[1] <= 4
    assert all((logits[1] == 0).all() == (i > ends[1]) for i, logits in enumerate(out.logits))


@pytest.mark.parametrize("place", [(0, 3), (1, 0), (2, 6), (3, 9)])
def test_scores_and_logits_of_rows_that_go_on_are_those_of_stock(
    model: Any, on: Any, place: tuple[int, int]
) -> None:
    """Also if other rows have ended, and for the token that ends a row."""
    row, j = place
    eos = int(generate(model)[row, IDS.shape[1] + j])
    kwargs = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    stock = generate(model, eos_token_id=eos, **kwargs)
    on()
    ours = generate(model, eos_token_id=eos, **kwargs)
    assert torch.equal(ours.sequences, stock.sequences)
    is_end = ours.sequences[:, IDS.shape[1] :] == eos
    live = is_end.int().cumsum(dim=1) - is_end.int() == 0
    assert not live.all()
    for name in ("scores", "logits"):
        for i, (mine, theirs) in enumerate(zip(ours[name], stock[name], strict=True)):
            torch.testing.assert_close(mine[live[:, i]], theirs[live[:, i]], atol=1e-4, rtol=1e-4)
            assert not mine[~live[:, i]].any()


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value)

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_then_a_token_of_every_row_at_a_time(model: Any, on: Any) -> None:
    stock, ours = Collect(), Collect()
    text = generate(model, streamer=stock)
    eos = int(text[0, IDS.shape[1] + 6])
    stock = Collect()
    generate(model, streamer=stock, eos_token_id=eos)
    on()
    generate(model, streamer=ours, eos_token_id=eos)
    assert ours.ended
    assert [part.tolist() for part in ours.parts] == [part.tolist() for part in stock.parts]


class After(StoppingCriteria):
    """Stops a row after a given token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("eos", [None, 0])
def test_stopping_criteria_end_rows_where_stock_does(model: Any, on: Any, eos: int | None) -> None:
    text = generate(model)
    criteria = StoppingCriteriaList([After(int(text[0, IDS.shape[1] + 5])), After(int(text[2, -2]))])
    kwargs = {"stopping_criteria": criteria, "eos_token_id": eos}
    expected = generate(model, **kwargs)
    on()
    assert torch.equal(generate(model, **kwargs), expected)


def test_stop_strings_end_a_text_where_stock_does() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    kwargs = {
        "max_new_tokens": 24,
        "do_sample": False,
        "stop_strings": ["saw", " the"],
        "tokenizer": tokenizer,
    }
    inputs = tokenizer("And it came to pass, that", return_tensors="pt")
    expected = model.generate(**inputs, **kwargs)
    assert expected.shape[1] < inputs.input_ids.shape[1] + 24
    for drafts in (0, 3):
        accelerate(model, num_speculative_tokens=drafts, compile=False)
        assert torch.equal(model.generate(**inputs, **kwargs), expected)


def test_stopping_criteria_see_the_scores_that_were_asked_for(model: Any, on: Any) -> None:
    class Unsure(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return scores[-1].softmax(dim=-1).amax(dim=-1) < 0.4

    kwargs = {
        "stopping_criteria": StoppingCriteriaList([Unsure()]),
        "output_scores": True,
        "return_dict_in_generate": True,
        "eos_token_id": 0,
    }
    expected = generate(model, **kwargs).sequences
    on()
    assert torch.equal(generate(model, **kwargs).sequences, expected)


def test_stopping_everything_ends_the_call(model: Any, on: Any) -> None:
    on()
    kwargs = {"stopping_criteria": StoppingCriteriaList([lambda ids, scores: ids[:, -1] >= 0])}
    assert generate(model, **kwargs).shape[1] == IDS.shape[1] + 1


SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95}


def sampled(model: Any, seed: int, **kwargs: Any) -> Tensor:
    torch.manual_seed(seed)
    out: Tensor = generate(model, **(SAMPLING | kwargs))
    return out


@pytest.mark.long
def test_a_sampled_text_depends_on_the_seed_alone(model: Any, parts: Any) -> None:
    accelerate(model, compile=False)
    plain, other = sampled(model, 1), sampled(model, 2)
    on_host = sampled(model, 1, renormalize_logits=True)
    accelerate(model, num_speculative_tokens=3, mtp=parts[1], compile=False)
    assert not torch.equal(plain, other)
    assert torch.equal(sampled(model, 1), plain), "drafts change no token"
    assert torch.equal(on_host, plain), "nor does it matter where a token is chosen"
    assert torch.equal(sampled(model, 1, renormalize_logits=True), plain)


ALL = torch.ones_like(MASK)
"""No padding: transformers' repetition penalty counts it, so padded batches go to the host."""


@pytest.mark.long
@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7, "eos_token_id": list(range(0, 211, 7))},
        {"repetition_penalty": 1.5, "min_p": 0.1, "do_sample": True, "top_p": 1.0},
        {"min_p": 0.02, "do_sample": True, "temperature": 1.5, "top_k": 40},
    ],
    ids=str,
)
def test_penalties_and_min_p_in_the_step_give_the_tokens_of_the_processors(
    model: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any]
) -> None:
    def run(**more: Any) -> Tensor:
        torch.manual_seed(5)
        return generate(model, attention_mask=ALL, **kwargs, **more)

    stock = run()
    accelerate(model, num_speculative_tokens=3, mtp=parts[1], compile=False)
    on_host = run(renormalize_logits=True)
    monkeypatch.setattr(generation, "_ProcessedChoice", None)  # calling it would be an error
    assert torch.equal(run(), on_host)
    if not kwargs.get("do_sample"):
        assert torch.equal(on_host, stock)
    accelerate(model, compile=False)
    assert torch.equal(run(), on_host), "drafts change no token"


def test_the_same_prompt_twice_gives_two_samples(model: Any) -> None:
    accelerate(model, compile=False)
    torch.manual_seed(0)
    out = model.generate(IDS[:1], max_new_tokens=STEPS, num_return_sequences=3, **SAMPLING)
    assert len({tuple(row) for row in out.tolist()}) == 3


SHORT = IDS[2:3, :4]
"""The prompt of the tests with many samples."""


@pytest.mark.parametrize(
    "processors",
    [
        [TopKLogitsWarper(2)],
        [TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(0.5)],
        [TopPLogitsWarper(1e-6, min_tokens_to_keep=3)],
        [TopKLogitsWarper(2), TemperatureLogitsWarper(3.0)],
        [MinPLogitsWarper(0.4)],
        [MinPLogitsWarper(0.4), TopPLogitsWarper(0.5)],
        [TopPLogitsWarper(0.5), MinPLogitsWarper(0.4)],
        [RepetitionPenaltyLogitsProcessor(1.5)],
        [RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)],
    ],
    ids=[
        "twice",
        "multiplied",
        "at least",
        "order",
        "min p",
        "min p first",
        "top p first",
        "penalty",
        "ignored",
    ],
)
def test_processors_of_ones_own_act_beside_those_of_the_config(model: Any, processors: list[Any]) -> None:
    def one(**kwargs: Any) -> Any:
        given = {"do_sample": True, "max_new_tokens": 1, "logits_processor": LogitsProcessorList(processors)}
        return model.generate(SHORT, **given, **kwargs)

    allowed = one(output_scores=True, return_dict_in_generate=True).scores[0][0].softmax(dim=-1)
    accelerate(model, compile=False)
    torch.manual_seed(0)
    share = torch.bincount(one(num_return_sequences=400)[:, -1], minlength=len(allowed)) / 400
    assert (share - allowed).abs().max() < 4 * (0.25 / 400) ** 0.5
    assert set(share.nonzero().flatten().tolist()) <= set(allowed.nonzero().flatten().tolist())


@pytest.mark.long
def test_sampling_follows_the_distribution_of_stock(model: Any) -> None:
    """First tokens of many samples, against the probabilities that stock's processors leave."""
    stock = model.generate(
        SHORT, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **SAMPLING
    )
    probability = stock.scores[0][0].softmax(dim=-1)
    accelerate(model, compile=False)
    torch.manual_seed(0)
    out = model.generate(SHORT, max_new_tokens=1, num_return_sequences=1000, **SAMPLING)
    share = torch.bincount(out[:, -1], minlength=len(probability)) / len(out)
    assert set(share.nonzero().flatten().tolist()) <= set(probability.nonzero().flatten().tolist())
    assert (share - probability).abs().max() < 4 * (0.25 / len(out)) ** 0.5


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("num_beams", {"num_beams": 2}),
        ("past_key_values", {"past_key_values": DynamicCache()}),
        ("cache_implementation", {"cache_implementation": "dynamic"}),
        ("use_cache", {"use_cache": False}),
        ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
        ("output_hidden_states", {"output_hidden_states": True, "return_dict_in_generate": True}),
        ("guidance_scale", {"guidance_scale": 1.5}),
        ("compile_config", {"compile_config": CompileConfig()}),
        ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 2}),
        ("use_mtp", {"use_mtp": True}),
        ("position_ids", {"position_ids": torch.arange(IDS.shape[1]).expand(4, -1) + 5}),
        ("attention_mask", {"attention_mask": MASK.flip(1)}),
        ("attention_mask", {"attention_mask": torch.ones(1, IDS.shape[1])}),
        ("attention_mask", {"attention_mask": torch.ones(4, IDS.shape[1] + 1)}),
        ("eos_token_id", {"eos_token_id": list(range(65))}),
        ("inputs_embeds", {"inputs_embeds": torch.zeros(4, IDS.shape[1], 64)}),
    ],
)
def test_unsupported_arguments_are_refused_by_name_and_nothing_is_lost(
    model: Any, name: str, kwargs: dict[str, Any]
) -> None:
    expected = generate(model)
    accelerate(model, compile=False)
    with pytest.raises(MLAError) as error:
        generate(model, **kwargs)
    assert error.value.name == name
    assert torch.equal(generate(model), expected)


def test_without_an_mtp_layer_ngram_lookup_drafts() -> None:
    model = stock_model("youtu")
    expected = greedy(model, prompts(), STEPS)
    accelerate(model, num_speculative_tokens=3, compile=False)
    assert greedy(model, prompts(), STEPS) == expected
    assert max(completion.acceptance_length for completion in model.mla.completions) > 1
    with pytest.raises(MLAError, match=r"use_mtp: .*with an MTP layer"):
        greedy(model, prompts(), STEPS, use_mtp=True)


def test_use_mtp_false_turns_the_drafts_off(model: Any, parts: Any) -> None:
    expected = generate(model)
    accelerate(model, num_speculative_tokens=2, mtp=parts[1], compile=False)
    assert torch.equal(generate(model, use_mtp=False), expected)
    # Only the engine shows the settings that a call chose.
    assert model.mla._engine.config.num_speculative_tokens == 0
    assert model.mla.capture_report().why_not == "compile=False"
    assert torch.equal(generate(model, use_mtp=True), expected)
    assert model.mla._engine.config.num_speculative_tokens == 2


def test_room_grows_with_the_request(model: Any) -> None:
    expected = generate(model, max_new_tokens=40)
    accelerate(model, compile=False, max_rows=2, max_model_len=16, page_size=4)
    assert torch.equal(generate(model, max_new_tokens=40), expected)


def test_the_model_itself_stays_as_it_was(model: Any) -> None:
    before, state = copy.deepcopy(model.config.to_dict()), list(model.state_dict())
    logits = model(IDS, attention_mask=MASK).logits
    assert accelerate(model, compile=False) is model
    generate(model)
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert model.config.to_dict() == before
    assert list(model.state_dict()) == state
    assert torch.equal(model(IDS, attention_mask=MASK).logits, logits)


def test_fp8_latents_serve_until_the_weights_have_another_dtype() -> None:
    model = stock_model("deepseek_v3", kv_lora_rank=128)
    plain = generate(accelerate(model, compile=False))
    fp8 = accelerate(model, compile=False, kv_cache_dtype="fp8")
    first, served_by = generate(fp8), fp8.mla._engine
    assert {spec.dtype for spec in served_by._caches.specs} == {FP8}
    assert torch.equal(generate(fp8), first) and fp8.mla._engine is served_by
    assert (first == plain).float().mean() > 0.5, "random weights make near-ties"
    generate(fp8.to(torch.bfloat16))
    assert fp8.mla._engine is not served_by


def test_a_batch_invariant_engine_serves_where_it_is_asked_for(model: Any) -> None:
    expected = generate(model)
    accelerate(model, batch_invariant=True, max_rows=1)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(generate(model), expected)
    config = model.mla._engine.config  # nothing else shows the settings
    assert (config.batch_invariant, config.max_rows) == (True, 4), "a roomier engine too"


def test_batch_invariance_without_compiled_steps_is_refused_and_nothing_changes(model: Any) -> None:
    own = type(model)
    with pytest.raises(MLAError, match=r"^compile: expected True with batch_invariant=True"):
        accelerate(model, batch_invariant=True, compile=False)
    assert type(model) is own


def test_a_streamer_that_fails_leaves_the_model_usable(model: Any) -> None:
    class Broken(Collect):
        def put(self, value: Tensor) -> None:
            if self.parts:
                raise RuntimeError("the pipe is closed")
            super().put(value)

    expected = generate(model)
    accelerate(model, compile=False)
    with pytest.raises(RuntimeError, match="the pipe is closed"):
        generate(model, streamer=Broken())
    assert torch.equal(generate(model), expected)
    restore(model)
    assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_cannot_be_sampled_are_an_error_that_names_their_place(
    model: Any, on: Any, bad: float
) -> None:
    class Bad(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] == IDS.shape[1] + 3:
                scores[1] = bad
            return scores

    on()
    with pytest.raises(
        MLAError, match=rf"^logits_processor: .* got {bad} in row 1, token 3 of the completion"
    ):
        generate(model, do_sample=True, logits_processor=LogitsProcessorList([Bad()]))


def test_scores_behind_a_rejected_draft_may_be_anything(model: Any, on: Any) -> None:
    class Counts(LogitsProcessor):
        """Allows 1, 2, 3, ... and nothing after another text."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            length = input_ids.shape[1] - IDS.shape[1]
            counted = (input_ids[:, IDS.shape[1] :] == torch.arange(1, length + 1)).all(dim=1)
            allowed = torch.full_like(scores, -float("inf"))
            allowed[counted, length + 1] = 0.0
            return allowed

    on()
    out = generate(model, do_sample=True, logits_processor=LogitsProcessorList([Counts()]))
    assert (out[:, IDS.shape[1] :] == torch.arange(1, STEPS + 1)).all()


def test_a_processor_that_changes_the_shape_of_scores_is_named(model: Any, on: Any) -> None:
    class Narrow(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores[:, :100]

    on()
    with pytest.raises(MLAError, match=r"^logits_processor: expected scores of the same shape, .* of Narrow"):
        generate(model, logits_processor=LogitsProcessorList([Narrow()]))


def test_a_top_p_of_0_keeps_the_most_likely_token(model: Any, on: Any) -> None:
    expected = generate(model, do_sample=True, top_p=0.0)
    on()
    assert torch.equal(generate(model, do_sample=True, top_p=0.0), expected)


def test_a_mask_of_other_values_is_named(model: Any, on: Any) -> None:
    on()
    with pytest.raises(MLAError, match=r"^attention_mask: expected 0 for padding and 1 for tokens"):
        generate(model, attention_mask=2 * MASK)


@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_a_processor_that_fails_is_shown_and_leaves_the_model_usable(
    model: Any, on: Any, error: type[Exception]
) -> None:
    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] == IDS.shape[1] + 3:
                raise error
            return scores

    expected = generate(model)
    on()
    # Python makes a StopIteration that leaves a generator, such as the engine's stream, a RuntimeError.
    shown, match = (MLAError, "^logits_processor: Broken raised") if error is StopIteration else (error, None)
    with pytest.raises(shown, match=match):
        generate(model, logits_processor=LogitsProcessorList([Plus(), Broken()]))
    assert torch.equal(generate(model), expected)


@pytest.mark.long
def test_calls_from_several_threads_run_one_at_a_time(model: Any) -> None:
    expected = generate(model)
    accelerate(model, compile=False)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: generate(model), range(6)))
    assert all(torch.equal(result, expected) for result in results)


def test_a_call_that_waits_while_another_thread_restores_the_model(model: Any) -> None:
    expected = generate(model)
    accelerate(model, compile=False)
    with ThreadPoolExecutor(1) as pool, generation.LOCK:
        waiting = pool.submit(generate, model)
        time.sleep(0.5)  # it takes the arguments, then waits
        restore(model)
    assert torch.equal(waiting.result(), expected)


def test_a_model_made_by_the_class_of_an_accelerated_one_is_stock(model: Any) -> None:
    accelerate(model, compile=False)
    made = type(model)(model.config).eval()
    made.load_state_dict(model.state_dict())
    expected = generate(model)
    assert torch.equal(generate(made), expected)
    accelerate(made, compile=False)
    assert torch.equal(generate(made), expected)
    restore(made)
    assert torch.equal(generate(made), expected)


def attributes(model: Any) -> list[tuple[str, set[str]]]:
    return [(name, set(vars(module))) for name, module in model.named_modules()]


def test_nothing_stays_on_the_models_modules(model: Any) -> None:
    before = attributes(model)
    accelerate(model, compile=False)
    generate(model)
    assert attributes(model)[1:] == before[1:]
    restore(model)
    assert attributes(model) == before


def test_a_refused_call_leaves_an_accelerated_model_as_it_was(model: Any) -> None:
    expected = generate(model)
    accelerate(model, compile=False)
    with pytest.raises(MLAError, match="page_size"):
        accelerate(model, compile=False, page_size=0)
    assert torch.equal(generate(model), expected)


DENSE = {"first_k_dense_replace": 3}  # transformers' experts take no float64


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("youtu", {}),
        ("minicpm3", {}),
        pytest.param("longcat_flash", {}, marks=pytest.mark.long),
        pytest.param("deepseek_v3", DENSE, marks=pytest.mark.long),
    ],
)
def test_a_model_that_is_converted_gets_new_caches(family: str, changes: dict[str, int]) -> None:
    model: Any = stock_model(family, **changes)
    drafts = {"num_speculative_tokens": 2, "mtp": random_mtp(model)} if family in MTP_FAMILIES else {}
    accelerate(model, compile=False, **drafts)
    generate(model)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        got = generate(model)
        restore(model)
        assert torch.equal(got, generate(model))
        accelerate(model, compile=False, **drafts)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_a_head_is_refused_with_the_class_that_has_one(family: str) -> None:
    body = stock_model(family).base_model
    with pytest.raises(MLAError, match=r"^model: .* got \w+Model; .*AutoModelForCausalLM"):
        accelerate(body)


@pytest.mark.parametrize("ids", [IDS[:1, :0], IDS[:0]], ids=["no tokens", "no rows"])
def test_an_empty_prompt_or_batch_is_refused(model: Any, ids: Tensor) -> None:
    accelerate(model, compile=False)
    with pytest.raises(MLAError, match=r"^input_ids: expected at least one row, and one token in each"):
        model.generate(ids, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("ids", [[3, 0, 4], [3, 4, 0], [0, 0, 0]], ids=str)
def test_a_padding_id_in_the_text_needs_a_mask_and_the_error_says_so(model: Any, ids: list[int]) -> None:
    prompt, kwargs = torch.tensor([ids]), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs)
    accelerate(model, compile=False)
    with pytest.raises(MLAError, match=r"^attention_mask: .* pass attention_mask of ones"):
        model.generate(prompt, **kwargs)
    assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs), expected)


def test_the_models_positions_bound_it() -> None:
    model: Any = stock_model("youtu", max_position_embeddings=40)
    with pytest.raises(MLAError, match="max_model_len: expected at most the model's 40 positions, got 64"):
        accelerate(model, compile=False, max_model_len=64)
    accelerate(model, compile=False, max_model_len=24)
    width = IDS.shape[1]
    with pytest.raises(MLAError, match="max_length: expected at most the model's 40 positions, got 41"):
        generate(model, max_new_tokens=41 - width)
    got = generate(model, max_new_tokens=40 - width)
    restore(model)
    assert torch.equal(got, generate(model, max_new_tokens=40 - width))


def test_an_end_that_no_token_is_ends_nothing(model: Any) -> None:
    ends = [-1, 10**6]
    expected = generate(model, eos_token_id=ends)
    accelerate(model, compile=False)
    assert torch.equal(generate(model, eos_token_id=ends), expected)


def test_no_memory_for_more_room_is_no_end(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(model)
    accelerate(model, compile=False, max_rows=1)
    no_room = lambda *_: (_ for _ in ()).throw(MemoryError)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(type(model.mla.target), "prepare", no_room)
        with pytest.raises(MemoryError):
            generate(model)
    assert torch.equal(generate(model), expected)


def test_adapters_and_hooks_on_the_up_projection_are_refused_when_they_come(model: Any) -> None:
    expected = generate(model)
    accelerate(model, compile=False)
    up = model.model.layers[0].self_attn.kv_b_proj
    handle = up.register_forward_hook(lambda *_: None)
    with pytest.raises(MLAError, match="kv_b_proj without hooks"):
        generate(model)
    handle.remove()
    assert torch.equal(generate(model), expected)


class Adapted(nn.Module):
    """A module around another one, with the attributes of PEFT's."""

    merged = disable_adapters = False

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *inputs: Any) -> Any:
        return self.base_layer(*inputs)


def test_adapters_on_experts_are_refused_unless_they_are_merged(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(model)
    layer = model.model.layers[1]
    monkeypatch.setitem(layer.self_attn._modules, "o_proj", Adapted(layer.self_attn.o_proj))
    monkeypatch.setitem(layer.mlp._modules, "experts", Adapted(layer.mlp.experts))
    with pytest.raises(
        MLAError, match=r"^model: .*Adapted at model\.layers\.1\.mlp\.experts; merge adapters"
    ):
        accelerate(model)
    monkeypatch.setattr(layer.mlp.experts, "merged", True, raising=False)
    accelerate(model, compile=False)
    assert torch.equal(generate(model), expected)
    monkeypatch.undo()


def test_hooks_on_the_model_itself_are_refused(model: Any) -> None:
    accelerate(model, compile=False)
    handle = model.register_forward_hook(lambda *_: None)
    with pytest.raises(MLAError, match=r"without hooks of its own.*got hooks; remove them"):
        generate(model)
    handle.remove()
    generate(model)


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_hooks_on_other_modules_act_while_they_are_there(model: Any) -> None:
    expected = generate(model)
    accelerate(model, num_speculative_tokens=0, compile=True)
    assert torch.equal(generate(model), expected)
    with hooks_on(model):
        hooked = generate(model)
    assert torch.equal(generate(model), expected)
    restore(model)
    with hooks_on(model):
        assert torch.equal(generate(model), hooked)
    assert not torch.equal(hooked, expected)


@contextmanager
def hooks_on(model: Any) -> Iterator[None]:
    with (
        model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: 1.5 * output),
        model.model.norm.register_forward_pre_hook(lambda _, args: (args[0].roll(1, -1),)),
    ):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize("raises", [False, True])
def test_a_call_waits_for_the_thread_that_compiles_its_steps(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raises: bool
) -> None:
    """It traces what is installed for the call."""
    monkeypatch.setattr("mla_compile.engine.steps.EAGER_STEPS", STEPS // 2)
    expected = generate(model)
    accelerate(model, num_speculative_tokens=0, compile=None)

    def fails_late(ids: Tensor, *_: Any, **__: Any) -> bool:
        if ids.shape[1] == IDS.shape[1] + STEPS - 2:
            raise KeyError("mine")
        return False

    graphs = compile_counters()["graphs"]
    if raises:
        with pytest.raises(KeyError, match="mine"):
            generate(model, stopping_criteria=[fails_late])
    else:
        assert torch.equal(generate(model), expected)
    assert compile_counters()["graphs"] == graphs + 2
    assert torch.equal(generate(model), expected)
    assert "it runs eagerly" not in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forward_of_transformers_compiled_or_not_needs_no_warning(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = stock_model(family)
    accelerate(model, num_speculative_tokens=0, compile=False)
    accelerate(model, num_speculative_tokens=0, compile=False)
    restore(model)
    accelerate(torch.compile(model, backend="eager"), num_speculative_tokens=0, compile=False)
    model.forward = torch.compile(model.forward, backend="eager")
    accelerate(model, num_speculative_tokens=0, compile=False)
    assert "forward" not in caplog.text


@pytest.mark.parametrize("where", ["class", "instance", "accelerated"])
def test_another_forward_is_not_run_and_a_warning_names_its_class(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = stock_model("youtu")
    own = type(model)
    expected = generate(model)

    class Rolled(own):  # type: ignore[misc, valid-type]
        @can_return_tuple  # whose code is transformers', unlike what it wraps
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = own.forward(self, *args, **kwargs)
            output.logits = output.logits.roll(1, -1)
            return output

    if where == "instance":
        model.forward = functools.wraps(model.forward)(
            lambda *args, **kwargs: Rolled.forward(model, *args, **kwargs)
        )
    else:
        model.__class__ = Rolled
    assert not torch.equal(generate(model), expected)
    for _ in range(1 + (where == "accelerated")):
        caplog.clear()
        accelerate(model, compile=False)
        (record,) = caplog.records
        name = own.__name__ if where == "instance" else "Rolled"
        assert record.getMessage().startswith(f"{name}: its forward is not transformers' own")
    assert torch.equal(generate(model), expected)


def test_a_layer_in_place_of_another_is_refused_until_the_model_is_accelerated_again(model: Any) -> None:
    accelerate(model, compile=False)
    first = model.model.layers[0]
    model.model.layers[0] = other = copy.deepcopy(first)
    other.self_attn.config = copy.deepcopy(model.config)  # as that of another model
    with pytest.raises(
        MLAError, match=r"^model: expected the layers that `accelerate` found.*; call accelerate"
    ):
        generate(model)
    tokens = generate(accelerate(model, compile=False))
    restore(model)
    assert torch.equal(tokens, generate(model))
    accelerate(model, compile=False)
    model.model.layers[0] = first
    with pytest.raises(MLAError, match=r"^model: "):
        generate(model)


def test_experts_patched_by_other_code_stay_patched(model: Any) -> None:
    experts = model.model.layers[1].mlp.experts
    calls = []
    experts.forward = lambda *args: calls.append(1) or type(experts).forward(experts, *args)
    try:
        accelerate(model, compile=False)
        generate(model)
        assert calls
        assert "forward" in vars(experts)
    finally:
        del experts.forward


def test_the_model_called_from_its_own_generate_is_an_error(model: Any) -> None:
    accelerate(model, compile=False)
    criteria = StoppingCriteriaList([lambda ids, scores: model(ids).logits[:, -1, 0] > 0])
    with pytest.raises(MLAError, match="outside of generate"):
        generate(model, stopping_criteria=criteria)


def test_generate_called_from_its_own_criterion_is_an_error(model: Any) -> None:
    expected = generate(model)
    accelerate(model, compile=False)
    criteria = StoppingCriteriaList([lambda *_: generate(model)])
    with pytest.raises(MLAError, match=r"^generate: .*one inside of it; generate with a copy"):
        generate(model, stopping_criteria=criteria)
    assert torch.equal(generate(model), expected)


def test_a_vocabulary_of_another_size(model: Any) -> None:
    accelerate(model, compile=False)
    size = model.vocab_size
    model.resize_token_embeddings(size + 8)
    prompt = torch.tensor([[1, size + 3]])
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=4)
    restore(model)
    assert torch.equal(tokens, model.generate(prompt, do_sample=False, max_new_tokens=4))
    accelerate(model, compile=False)
    model.resize_token_embeddings(size - 8)
    with pytest.raises(MLAError, match=r"^prompts\[0\]: expected token ids in"):
        model.generate(torch.tensor([[1, size - 1]]), max_new_tokens=4)


def test_accelerating_twice_and_restoring_twice_are_harmless(model: Any) -> None:
    own = type(model)
    accelerate(accelerate(model, compile=False), compile=False)
    assert type(model).__mro__[2] is own
    restore(model)
    restore(model)
    assert type(model) is own
    assert not hasattr(model, "mla")


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("num_speculative_tokens", {"num_speculative_tokens": -1}),
        ("num_speculative_tokens", {"num_speculative_tokens": 33}),
        ("mtp", {"mtp": nn.Linear(2, 2)}),
        ("mtp", {"mtp": nn.Linear(2, 2), "num_speculative_tokens": 1}),
        ("mtp", {"mtp": nn.Linear(2, 2), "num_speculative_tokens": 1, "drafter": "ngram"}),
        ("drafter", {"drafter": "eagle"}),
        ("prefix_caching", {"prefix_caching": True}),
        ("num_pages", {"num_pages": 99}),
        ("page_size", {"page_size": 0}),
        ("max_rows", {"max_rows": 0}),
        ("mode", {"mode": "fast"}),
    ],
)
def test_bad_arguments_are_named_and_the_model_stays_stock(
    model: Any, name: str, kwargs: dict[str, Any]
) -> None:
    own = type(model)
    with pytest.raises(MLAError) as error:
        accelerate(model, **kwargs)
    assert error.value.name == name
    assert type(model) is own


def test_models_that_would_run_wrongly_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in (nn.Linear(2, 2), "path/to/checkpoint"):
        with pytest.raises(MLAError, match=r"^model: expected a transformers model with MLA attention"):
            accelerate(other)  # type: ignore[type-var]
    with pytest.raises(MLAError, match="evaluation mode"):
        accelerate(stock_model("youtu").train())
    biased = stock_model("youtu")
    biased.model.layers[0].self_attn.kv_b_proj = nn.Linear(32, 224)
    with pytest.raises(MLAError, match="kv_b_proj"):
        accelerate(biased)
    unknown = stock_model("deepseek_v3")
    with pytest.raises(MLAError, match=r"loaded from a checkpoint.*or drafter='ngram'"):
        accelerate(unknown, num_speculative_tokens=1, drafter="mtp")
    with pytest.raises(MLAError, match="num_speculative_tokens: expected 0 for a model with recurrent"):
        accelerate(stock_model("kimi_linear"), num_speculative_tokens=1)
    selecting = stock_model("deepseek_v32")
    monkeypatch.setattr("mla_compile.integrations.transformers.target.transformers.__version__", "5.17.0")
    with pytest.raises(
        MLAError, match=r"model: .*transformers 5\.18 or newer, got DeepseekV32.* 5\.17\.0; install"
    ):
        accelerate(selecting)


@pytest.mark.parametrize("family", ["axk2", "dots3_note", "glm5_next", "hy_v4", "mistral_large4"])
def test_models_with_another_indexer_are_refused_by_name(family: str) -> None:
    in_wrapper = family in ("glm5_next", "mistral_large4")
    auto = AutoModelForImageTextToText if in_wrapper else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(family)).eval()
    with pytest.raises(MLAError, match="Indexer selects the keys"):
        accelerate(model)


def test_an_engine_of_a_recurrent_model_warms_up_before_its_first_prompt() -> None:
    target = TransformersTarget(stock_model("kimi_linear"), None)
    with target.installed(32):
        fresh = Engine(target, max_rows=2, max_model_len=32, compile=False)
        expected = fresh.generate([[1, 2, 3], [4]], max_new_tokens=6)
        warm = Engine(target, max_rows=2, max_model_len=32, compile=False)
        warm.warm_up()
        assert warm.generate([[1, 2, 3], [4]], max_new_tokens=6) == expected


@pytest.mark.parametrize("family", MTP_FAMILIES)
@pytest.mark.parametrize("where", ["nowhere", "not in the checkpoint", "the checkpoint is gone"])
def test_a_missing_mtp_layer_is_replaced_by_ngram_lookup_or_named(
    family: str, where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = stock_model(family)
    if where != "nowhere":
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if where == "the checkpoint is gone":
        model.config.name_or_path = str(tmp_path / "gone")
    expected = greedy(model, prompts(), STEPS)
    with pytest.raises(MLAError, match=r"(drafter|mtp): expected .*(without|gone|loaded from)"):
        accelerate(model, num_speculative_tokens=2, drafter="mtp")
    assert not caplog.records
    accelerate(model, num_speculative_tokens=2, compile=False)
    (record,) = caplog.records
    assert record.getMessage().startswith("n-gram lookup drafts")
    # Only the engine shows which drafter serves.
    assert model.mla._engine.config.drafter.name == "ngram"
    assert greedy(model, prompts(), STEPS) == expected


def test_a_text_past_the_limit_of_longrope_has_the_long_frequencies() -> None:
    model = stock_model("minicpm3", max_position_embeddings=512)
    long = [prompts((270,))[0]]
    expected, short = greedy(model, long, 8), greedy(model, prompts(), 8)
    accelerate(model, compile=False)
    assert greedy(model, long, 8) == expected
    assert greedy(model, prompts(), 8) == short
    restore(model)
    assert greedy(model, long, 8) == expected
