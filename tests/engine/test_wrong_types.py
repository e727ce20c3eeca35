"""Arguments of wrong types, whatever they are, are errors by name, and the engine serves afterwards as before."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from mla_compile import Engine, Grammar, MLAError, SamplingParams
from tests.engine.engines import engine, finish
from tests.engine.test_grammar import SMALL
from tests.models_for_tests import one_layer_model

WRONG = [
    *(
        None,
        "x",
        b"x",
        "",
        1.5,
        -1,
        0,
        10**400,
        True,
        float("nan"),
        [],
        {},
        (),
        object(),
        range(3),
        {"a"},
        {1: 2},
    ),
    *([None], ["x"], [[None]], [[1.5]], [[True]], [[1]], torch.tensor(1), torch.zeros(2), SamplingParams()),
]
"""Some of them are right for some arguments."""


SERVES: dict[str, tuple[Callable[..., object], dict[str, object], str]] = {
    "add": (Engine.add, {"prompt": [1, 2], "max_new_tokens": 3}, "sampling stop_ids grammar priority client"),
    "abort": (Engine.abort, {"request": None}, ""),
    "generate": (
        Engine.generate,
        {"prompts": [[1, 2]], "max_new_tokens": 3},
        "sampling stop_ids grammars",
    ),
    "stream": (
        lambda *args, **kwargs: list(Engine.stream(*args, **kwargs)),
        {"prompts": [[1, 2]], "max_new_tokens": 3},
        "sampling stop_ids grammars choose",
    ),
    "warm_up": (Engine.warm_up, {}, "sampling prompts"),
    "SamplingParams": (
        lambda of, **kwargs: of.generate([[1, 2]], SamplingParams(**kwargs), max_new_tokens=2),
        {},
        " ".join(field.name for field in fields(SamplingParams)),
    ),
    "Engine": (
        lambda of, **kwargs: Engine(**kwargs).generate([[1]], max_new_tokens=1),
        {"max_rows": 2, "max_model_len": 16, "page_size": 4, "compile": False},
        "model num_speculative_tokens drafter num_pages max_tokens_per_step prefix_caching "
        "tokenizer mode decode_backend capture_budget",
    ),
    "from_json_schema": (
        lambda _, **kwargs: Grammar.from_json_schema(**kwargs),
        {"schema": {}, "tokenizer": SMALL},
        "",
    ),
    "from_regex": (lambda _, **kwargs: Grammar.from_regex(**kwargs), {"regex": "a", "tokenizer": SMALL}, ""),
    "from_ebnf": (
        lambda _, **kwargs: Grammar.from_ebnf(**kwargs),
        {"rules": 'start: "a"', "tokenizer": SMALL},
        "",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SERVES)
def test_a_wrong_type_is_refused_by_name_and_nothing_changes(name: str) -> None:
    call, right, others = SERVES[name]
    mine, (expected,) = engine(), engine().generate([[5, 6]], max_new_tokens=3)
    for parameter in [*right, *others.split()]:
        for wrong in WRONG:
            given = {**right, parameter: wrong}
            if parameter == "compile" and (wrong is True or wrong is None):
                continue  # right, and seconds of compiling
            if name == "Engine" and parameter != "model":
                given["model"] = one_layer_model()
            try:
                call(mine, **given)
            except MLAError:
                pass
            except Exception as error:
                raise AssertionError(f"{parameter}={wrong!r}") from error
            finish(mine)
    assert mine.generate([[5, 6]], max_new_tokens=3) == [expected]
    assert mine.stats.pages_in_use == 0


@pytest.mark.parametrize("wrong", ["no", 0, 1, [], torch.tensor(True)], ids=str)
def test_compile_is_a_flag_or_none(wrong: object) -> None:
    with pytest.raises(MLAError, match="compile: expected True, False or None, got "):
        engine(compile=wrong)


@pytest.mark.parametrize("wrong", ["x", None, 3])
def test_what_is_no_request_of_this_engine_is_not_aborted(wrong: object) -> None:
    mine, other = engine(), engine()
    generation = mine.add([1, 2], max_new_tokens=3)
    with pytest.raises(MLAError, match=r"^request: expected what this engine's `add` returned, got "):
        mine.abort(wrong)
    with pytest.raises(MLAError, match=r"^request: "):
        other.abort(generation)
    finish(mine)
    assert generation.completion.finish_reason == "length"


def test_what_is_no_model_is_not_served() -> None:
    for wrong in ("x", torch.nn.Linear(2, 2), None):
        with pytest.raises(MLAError, match=r"^model: expected a model that an engine can serve, got "):
            Engine(wrong)
