"""What a model has room for bounds an engine, whatever it is that the engine serves."""

import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from mla_compile import MLAError, SamplingParams
from mla_compile.engine import Engine, EngineConfig
from mla_compile.engine.config import config_of
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.models import MLAForCausalLM
from tests.integrations.families import stock_model
from tests.models.small import v3_config


def served(draw: random.Random) -> tuple[Any, int, int]:
    """A model of our own or of transformers, its positions and its vocabulary."""
    positions, vocab_size = draw.randrange(3, 4000), draw.randrange(8, 300)
    with torch.device("meta"):
        if draw.random() < 0.7:
            config = v3_config(max_position_embeddings=positions, vocab_size=vocab_size, num_hidden_layers=1)
            return MLAForCausalLM(config, mtp=False), positions, vocab_size
    model = stock_model("youtu", max_position_embeddings=positions, vocab_size=vocab_size)
    return TransformersTarget(model, None), positions, vocab_size


@pytest.mark.parametrize("seed", range(30))
def test_the_length_and_the_ids_of_requests_are_those_of_the_model(seed: int) -> None:
    draw = random.Random(seed)
    model, positions, vocab_size = served(draw)
    assert EngineConfig(compile=False).fitted_to(model).max_model_len == positions
    assert EngineConfig(compile=False).fitted_to(model, left=0).max_model_len == min(2048, positions)
    asked = draw.choice([2, positions - 1, positions, positions + 1, draw.randrange(2, 5000)])
    config = EngineConfig(compile=False, max_model_len=asked, max_rows=1)
    if asked > positions:
        with pytest.raises(
            MLAError, match=rf"max_model_len: .*the model's {positions} positions, got {asked}"
        ):
            Engine(model, config)
        return
    engine = Engine(model, config)
    ids = [draw.choice([0, vocab_size - 1, vocab_size, -1, draw.randrange(-9, 400)]) for _ in range(3)]
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    expected = rf"token ids in \[0, {vocab_size}\), got {wrong[0]}" if wrong else ""
    calls = {
        "stop_ids": lambda: engine.add([0], max_new_tokens=1, stop_ids=ids),
    }
    if min(ids) >= 0:
        params = SamplingParams(stop_token_ids=ids)
        calls["stop_token_ids"] = lambda: engine.generate([[0]], params, max_new_tokens=1)
    if wrong:
        for name, call in calls.items():
            with pytest.raises(MLAError, match=f"{name}: expected {expected}"):
                call()
    else:
        engine.add([0], max_new_tokens=1, stop_ids=ids)


@pytest.mark.parametrize("seed", range(20))
def test_a_name_that_is_no_setting_is_refused_with_those_near_it(seed: int) -> None:
    draw = random.Random(seed)
    names = [field.name for field in fields(EngineConfig)]
    name = draw.choice(names)
    at = draw.randrange(len(name))
    wrong = draw.choice([name[:at] + name[at + 1 :], name[:at] + "x" + name[at:], name.upper(), name + "s"])
    if wrong in names:
        return
    with torch.device("meta"):
        model = MLAForCausalLM(v3_config(), mtp=False)
    settings: dict[str, Any] = {"compile": False, wrong: 1}
    with pytest.raises(MLAError, match=rf"^{wrong}: expected a setting of an engine.* mean .*\b{name}\b"):
        Engine(model, **settings)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("block_size", r"did you mean page_size\?$"),
        ("max_num_seqs", r"did you mean max_rows\?$"),
        ("dtype", "the settings are num_speculative_tokens, "),
        ("foo", "the settings are num_speculative_tokens, "),
    ],
)
def test_another_programs_word_leads_to_ours_and_a_strange_one_to_all(wrong: str, hint: str) -> None:
    settings: Any = {wrong: 1}
    with pytest.raises(MLAError, match=rf"^{wrong}: .*; {hint}"):
        config_of(None, settings)


def test_a_model_that_names_no_limit_has_none() -> None:
    with torch.device("meta"):
        model: Any = MLAForCausalLM(v3_config(max_position_embeddings=16), mtp=False)

    class Own:
        """With what an engine asks for, and no more."""

        def __getattr__(self, name: str) -> Any:
            if name == "max_position_embeddings":
                raise AttributeError(name)
            return getattr(model, name)

        __call__ = MLAForCausalLM.forward

    assert EngineConfig(compile=False, max_model_len=4096).fitted_to(Own()).max_model_len == 4096
