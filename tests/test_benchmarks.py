"""What benchmarks do besides measuring."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import loading, random_checkpoint, transformers_generate
from benchmarks.reporting import add_row
from mla_compile import load_model, load_tokenizer
from mla_compile.models.safetensor_files import SafetensorFiles


def test_an_unknown_variant_is_refused_before_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transformers_generate, "random_model", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr(sys, "argv", ["transformers_generate", "--variants", "ours_k1@8,32", "typo"])
    with pytest.raises(SystemExit) as ended:
        transformers_generate.main()
    assert ended.value.code == 2
    assert "--variants: invalid choice: 'typo' (choose from stock_dynamic, " in capsys.readouterr().err


def test_a_row_is_printed_and_is_in_the_file_before_the_next_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report = tmp_path / "report.json", {"torch": "2.13", "rows": []}
    for k in range(3):
        add_row(report, {"k": k}, file)
        assert json.loads(file.read_text()) == {"torch": "2.13", "rows": [{"k": i} for i in range(k + 1)]}
        assert json.loads(capsys.readouterr().out) == {"k": k}
    add_row(report, {"k": 3}, None)
    assert len(json.loads(file.read_text())["rows"]) == 3, "without a file nothing is written"


def test_a_random_checkpoint_loads_as_any_other(tmp_path: Path) -> None:
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank")
    settings = dict.fromkeys(names, 32) | {"vocab_size": 50, "n_routed_experts": 8, "num_attention_heads": 2}
    random_checkpoint.write(tmp_path, 2, settings | {"num_key_value_heads": 2})
    model = load_model(tmp_path)
    assert len(model.layers) == 2 and model.has_mtp and load_tokenizer(tmp_path) is not None
    assert 0.9 < model.layers[1].mlp.shared_experts.up_proj.weight.std() * 32**0.5 < 1.1


@pytest.mark.long
def test_loading_keeps_no_copy_on_the_host_and_one_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"hidden_size": 1024, "vocab_size": 20_000, "n_routed_experts": 16}
    random_checkpoint.write(tmp_path, 1, settings)
    load_model(tmp_path)  # what is imported for it counts elsewhere
    row = loading.measure(tmp_path, "cpu", None)
    allowed = 1.2 * row["largest_tensor_mb"] + 32
    assert row["same_values"] and row["anonymous_mb"] < allowed < 1000 * row["gb_asked_for"] / 2
    kept, read = [], SafetensorFiles.read
    monkeypatch.setattr(SafetensorFiles, "read", lambda *args: kept.append(read(*args).clone()) or kept[-1])
    assert loading.measure(tmp_path, "cpu", None)["anonymous_mb"] > allowed
