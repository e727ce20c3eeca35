"""A config.json may say anything: a model that computes numbers comes of it, or one error that names the setting."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st

from mla_compile import MLAError, load_model
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.settings import ROPE_SETTINGS, SETTINGS
from tests.models.small import (
    YARN,
    Session,
    glm_config,
    reference_model,
    reference_mtp_layer,
    save,
    v2_config,
    v3_config,
)

CONFIGS = {
    "v3": v3_config(rope_parameters=dict(YARN)),
    "v2": v2_config(topk_method="group_limited_greedy"),
    "glm": glm_config(),
}
# What is written for a value, so that there can be what Python's json would not write.
HOSTILE = [
    *(
        "null",
        "true",
        "false",
        '""',
        '"x"',
        '"1"',
        "[]",
        "[0]",
        "[null]",
        "{}",
        '{"a": 1}',
        "[" * 60 + "]" * 60,
    ),
    *(
        "-1",
        "0",
        "1",
        "2",
        "7",
        "48",
        "1000",
        "1000000000",
        "1000000000000",
        "1" + "0" * 30,
        "1" + "0" * 5000,
    ),
    *("0.0", "-0.0", "0.5", "-0.5", "1e-300", "1e300", "48.0", "NaN", "Infinity", "-Infinity", "1e999"),
    "[" * 100_000,
]
ROPE = ("rope_parameters", "rope_scaling")
# Keys that transformers or Python would act on, and that nothing of ours reads.
FOREIGN = [
    *(
        "auto_map",
        "configuration_files",
        "per_layer_config",
        "layer_types",
        "attribute_map",
        "get_text_config",
    ),
    *(
        "dtype",
        "torch_dtype",
        "_attn_implementation",
        "name_or_path",
        "_name_or_path",
        "transformers_weights",
    ),
    *(
        "validate",
        "__class__",
        "head_dim",
        "num_local_experts",
        "num_mtp_layers",
        "sub_configs",
        "is_heterogeneous",
    ),
]
KEYS = [
    *SETTINGS,
    *("model_type", "quantization_config", "compression_config", "rope_theta", "partial_rotary_factor"),
    "original_max_position_embeddings",
    *ROPE,
    *(f"{table}.{name}" for table in ROPE for name in ROPE_SETTINGS),
    *FOREIGN,
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return {name: saved(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}


def saved(name: str, directory: Path) -> Path:
    model = reference_model(CONFIGS[name])
    return save(model, directory, reference_mtp_layer(model) if name != "v2" else None)


@pytest.fixture(scope="module")
def texts(checkpoints) -> dict[str, dict[str, Any]]:
    return {name: json.loads((path / "config.json").read_text()) for name, path in checkpoints.items()}


def written(config: dict[str, Any], changes: dict[str, str]) -> str:
    """The config as JSON, with these texts in place of its values; "a.b" is b in the object a."""
    config = json.loads(json.dumps(config))
    marks = {}
    for number, (key, text) in enumerate(changes.items()):
        table, _, name = key.rpartition(".")
        place = config.setdefault(table, dict(YARN)) if table else config
        if isinstance(place, dict):
            place[name] = f"mark {number}"
            marks[f'"mark {number}"'] = text
    out = json.dumps(config)
    for mark, text in marks.items():
        out = out.replace(mark, text)
    return out


def assert_finite(model: MLAForCausalLM) -> None:
    batch, positions = Session(model, 1).prefill([5], [0])
    hidden = model(torch.arange(5), positions, batch).hidden
    assert model.logits(hidden).isfinite().all()
    if model.has_mtp:
        assert model.logits(model.forward_mtp(torch.arange(5), hidden, positions, batch)).isfinite().all()


@pytest.mark.long
@runs(max_examples=250)
@given(
    name=st.sampled_from(list(CONFIGS)),
    changes=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(HOSTILE), min_size=1, max_size=2),
)
def test_a_config_gives_finite_logits_or_an_error_that_names_the_setting(checkpoints, texts, name, changes):
    check_config(checkpoints[name], texts[name], changes)


def check_config(path: Path, config: dict[str, Any], changes: dict[str, str]) -> bool:
    """Whether a checkpoint with these changes loads; else one error names a setting that has changed."""
    (path / "config.json").write_text(written(config, changes))
    start = time.process_time()
    try:
        model = load_model(path)
    except MLAError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 2000
        assert str(path) in message
        # A size that is possible but not the tensors' own is seen by those.
        parts = [part for key in changes for part in key.split(".")] + ["the tensors of its", "JSON object"]
        words = message.replace("number of ", "num_").replace(" ", "_")  # some errors are transformers' own
        assert any(part in message or part in words for part in parts), message
        return False
    else:
        assert_finite(model)
        return True
    finally:
        assert time.process_time() - start < 3, "no value may cost time"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": '"big"'}, "hidden_size: expected an integer in [1, 1048576], got 'big'"),
        ({"rms_norm_eps": '"x"'}, "rms_norm_eps: expected a number in [1e-12, 1], got 'x'"),
        ({"rms_norm_eps": "-1"}, "rms_norm_eps: expected a number in [1e-12, 1], got -1"),
        ({"rope_theta": "0"}, "rope_theta: expected a number in [2, 1e+15], got 0"),
        ({"rope_parameters.rope_theta": "0"}, "rope_parameters.rope_theta: expected a number in [2, 1e+15]"),
        ({"rope_scaling.factor": "0.5"}, "rope_scaling.factor: expected a number in [1, 1e+06], got 0.5"),
        ({"rope_scaling.beta_fast": "0.5"}, "rope_parameters.beta_fast: expected at least beta_slow = 1, got 0.5"),
        ({"qk_rope_head_dim": "7"}, "qk_rope_head_dim: expected an even number in [2, 65536], as pairs are"),
        ({"num_hidden_layers": "0"}, "num_hidden_layers: expected an integer in [1, 1024], got 0"),
        ({"num_hidden_layers": "100000"}, "num_hidden_layers: expected an integer in [1, 1024], got 100000"),
        ({"hidden_size": "1000000000"}, "hidden_size: expected an integer in [1, 1048576], got 1000000000"),
        ({"vocab_size": "1000000000000"}, "vocab_size: expected an integer in [1, 16777216], got 10000"),
        ({"routed_scaling_factor": "NaN"}, "expected a readable JSON object, got the number nan for 'routed_"),
        ({"routed_scaling_factor": "1e999"}, "expected a readable JSON object, got the number inf for 'routed_"),
        ({"vocab_size": "1" + "0" * 5000}, "expected a readable JSON object, got Exceeds the limit"),
        ({"eos_token_id": "[" * 100_000}, "expected a readable JSON object, got one nested too deeply"),
        ({"eos_token_id": "true"}, "eos_token_id: expected a token id"),
        ({"quantization_config": '"fp8"'}, "quantization_config: expected an object, or null, got 'fp8'"),
        ({"quantization_config": '{"quant_method": "fp8", "weight_block_size": [true, 1]}'}, "quantization_config: "),
        ({"n_routed_experts": "60000"}, "n_routed_experts: expected at most as many experts as the files have "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_file_and_the_setting(checkpoints, texts, changes, expected):
    path = checkpoints["v3"]
    (path / "config.json").write_text(written(texts["v3"], changes))
    with pytest.raises(MLAError) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path / 'config.json'}: {expected}")
    assert "mtp=" not in str(caught.value)


def test_a_setting_that_comes_twice_is_refused(checkpoints, texts):
    path = checkpoints["v3"]
    text = json.dumps(texts["v3"])
    (path / "config.json").write_text(text[:-1] + ', "hidden_size": 48}')
    with pytest.raises(MLAError, match="a readable JSON object, got the key 'hidden_size' twice"):
        load_model(path)


def test_settings_that_nothing_reads_are_passed_over(checkpoints, texts):
    path = checkpoints["v3"]
    (path / "config.json").write_text(written(texts["v3"], dict.fromkeys(FOREIGN, '"x"')))
    model = load_model(path)
    assert_finite(model)
    assert not any(getattr(model.config, name, None) == "x" for name in FOREIGN)


def test_a_number_without_a_point_is_a_number(checkpoints, texts):
    path = checkpoints["v3"]
    (path / "config.json").write_text(
        written(texts["v3"], {"routed_scaling_factor": "1", "rms_norm_eps": "1"})
    )
    assert load_model(path).arch.routing.scaling_factor == 1.0


def test_a_config_in_memory_has_the_same_limits():
    config = v3_config()
    for name in ("rms_norm_eps", "hidden_size", "max_position_embeddings", "eos_token_id"):
        value = getattr(config, name)
        vars(config)[name] = -1  # past transformers' own checks
        with torch.device("meta"), pytest.raises(MLAError, match=rf"^config\.{name}: expected "):
            MLAForCausalLM(config, mtp=False)
        vars(config)[name] = value


@pytest.mark.parametrize("layers", [4, 1000])
def test_layers_that_the_files_do_not_hold_are_refused_before_one_is_built(
    checkpoints, texts, layers, monkeypatch
):
    path = checkpoints["v2"]
    (path / "config.json").write_text(written(texts["v2"], {"num_hidden_layers": str(layers)}))
    monkeypatch.delattr("mla_compile.models.checkpoint.MLAForCausalLM")
    with pytest.raises(MLAError, match=r"num_hidden_layers: .* no tensor of layer 3"):
        load_model(path)


def test_the_config_is_checked_before_another_file_is_opened(checkpoints, texts, monkeypatch):
    path = checkpoints["v3"]
    (path / "config.json").write_text(written(texts["v3"], {"n_group": "3"}))
    monkeypatch.delattr("mla_compile.models.checkpoint.SafetensorFiles")
    with pytest.raises(MLAError, match=r"config\.json: n_group: expected a divisor of n_routed_experts = 8"):
        load_model(path)
