"""What `mla-compile serve` sets an engine to, by the config of a model alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from mla_compile.cli import serve
from mla_compile.cli.app import app
from mla_compile.errors import MLAError
from mla_compile.models.checkpoint import meta_model
from mla_compile.serving.app import create_app
from mla_compile.serving.settings import ServerSettings
from tests.models import published


@pytest.mark.parametrize(
    ("name", "drafts"), [("DEEPSEEK_V3", 3), ("GLM_4_7_FLASH", 3), ("KIMI_K2", 0), ("DEEPSEEK_V2", 0)]
)
def test_a_published_model_drafts_where_its_config_names_an_mtp_layer(
    name: str, drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(getattr(published, name))
    served = SimpleNamespace()
    monkeypatch.setattr(
        serve, "_server", lambda replicas: lambda settings, **_: vars(served).update(it=settings)
    )
    result = CliRunner().invoke(app, ["serve", "--model", str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    settings: Any = served.it
    assert settings.engine.fitted_to(meta_model(tmp_path)).num_speculative_tokens == drafts


@pytest.mark.parametrize("flag", ["--request-timeout", "--shutdown-timeout"])
def test_a_bad_number_is_named_by_its_flag(flag: str) -> None:
    result = CliRunner().invoke(app, ["serve", flag, "-1", "--device", "cpu"])
    assert f"{flag}: expected a number > 0, got -1.0" in result.stderr


@pytest.mark.parametrize("compile", ["--compile", "--no-compile"])
def test_an_unknown_mode_is_named_by_its_flag(compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_server", lambda replicas: lambda *_, **__: None)
    result = CliRunner().invoke(app, ["serve", compile, "--mode", "nope", "--device", "cpu"])
    assert result.exit_code == 2 and "--mode: expected one of default, " in result.stderr


def test_an_empty_tokenizer_is_not_the_models() -> None:
    with pytest.raises(MLAError, match=r"^tokenizer: expected a checkpoint's directory, got an empty path"):
        create_app(ServerSettings(tokenizer=""))


def test_replicas_have_one_gpu_each() -> None:
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--tensor-parallel-size", "2"])
    assert "--tensor-parallel-size: expected 1 with --replicas" in result.output + result.stderr
