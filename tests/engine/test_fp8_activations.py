"""`fp8_activations=True`: where it is refused, and that all steps with prompts are compiled with it."""

import pytest
import torch

from mla_compile import Engine, MLAError, load_model
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine import config
from tests.engine.engines import engine
from tests.models_for_tests import caches_of, one_layer_model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": False}, "False with compile=False, got True; leave one"),
        ({"batch_invariant": True}, "False with batch_invariant=True, got True; leave one"),
        ({"fp8_activations": 1}, "True or False, got 1"),
        ({}, "False on this device, as it runs on cuda, not cpu, got True"),
    ],
)
def test_where_it_cannot_serve_it_is_refused_by_name(settings: dict, message: str) -> None:
    model = one_layer_model()
    with pytest.raises(MLAError, match=f"^fp8_activations: expected {message}"):
        Engine(model, **{"fp8_activations": True, **settings})
    assert not caches_of(model)


def test_a_model_without_fp8_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "describe_device", lambda device: ("cuda", (9, 0)))
    with pytest.raises(
        MLAError, match=r"^fp8_activations: expected False for a model without FP8.*quantize='fp8'"
    ):
        Engine(one_layer_model(), fp8_activations=True)


def test_steps_are_compiled_with_the_option_and_those_with_prompts_from_the_first_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "_check_for_fp8_activations", lambda model: None)
    assert not engine(compile=True)._launcher.steps.compiles_prompts
    quantising = engine(compile=True, fp8_activations=True)
    assert quantising._launcher.steps.compiles_prompts
    assert quantising.config.compile_options["fp8_activations"]


@pytest.mark.long
def test_on_a_cpu_the_option_of_the_backend_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_check_for_fp8_activations", lambda model: None)
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, quantize="fp8")
    size = {
        "max_rows": 2,
        "max_model_len": 64,
        "num_speculative_tokens": 0,
        "compile": True,
        "mode": "default",
    }
    found = [
        Engine(model, **size, fp8_activations=given).generate([[5, 9, 1], [30] * 9], max_new_tokens=6)
        for given in (False, True)
    ]
    assert [one.token_ids for one in found[0]] == [other.token_ids for other in found[1]]
