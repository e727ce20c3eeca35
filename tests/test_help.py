"""`help` of the public calls: every argument with its type, and the errors."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from mla_compile import Engine, Grammar, SamplingParams, generate, load_model
from mla_compile.cli import commands
from mla_compile.cli.app import app
from mla_compile.defaults import DrafterName
from mla_compile.engine import EngineConfig
from mla_compile.engine_settings import EngineFields
from mla_compile.integrations.transformers import accelerate

CALLS: dict[str, Callable[..., object]] = {
    "Engine": Engine.__init__,
    **{f"Engine.{name}": getattr(Engine, name) for name in ("add", "abort", "generate", "stream", "warm_up")},
    "accelerate": accelerate,
    "generate": generate,
    "load_model": load_model,
}


@pytest.mark.parametrize("name", CALLS)
def test_help_has_every_argument_with_its_type_and_the_errors(name: str) -> None:
    text, signature = inspect.getdoc(CALLS[name]) or "", inspect.signature(CALLS[name])
    for parameter in list(signature.parameters.values())[name.startswith("Engine") :]:
        explained = re.search(rf"^ *([\w, ]+, )?{parameter.name}(, [\w, ]+)?: ", text, re.MULTILINE)
        assert explained, f"{parameter.name} is not in the docstring"
        assert parameter.annotation is not inspect.Parameter.empty
    assert "Raises:\n    MLAError: " in text


def test_the_docstrings_of_parameter_classes_name_all_parameters() -> None:
    for of in (SamplingParams, Grammar):
        text = inspect.getdoc(of) or ""
        for name in inspect.signature(of).parameters:
            assert re.search(rf"\b{name}\b", text), f"{of.__name__} does not name {name}"


@pytest.mark.parametrize("name", get_args(DrafterName))
def test_every_drafter_is_documented_by_its_name(name: str) -> None:
    page = Path(__file__).parents[1] / "docs" / "speculation.md"
    documented = {
        "`--drafter`'s help in mla_compile/engine_settings.py": f" {name}: " in flags_of("generate"),
        "the docstring of `EngineConfig`": f'"{name}", ' in (inspect.getdoc(EngineConfig) or ""),
        "the table of docs/speculation.md": f'| `"{name}"` |' in page.read_text(encoding="utf-8"),
    }
    missing = [where for where, found in documented.items() if not found]
    assert not missing, f"document {name} there: {missing}"


def flags_of(command: str) -> str:
    return " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.split())


def test_every_engine_setting_is_explained_and_a_flag_of_the_commands_that_it_names() -> None:
    constraints = {
        each: inspect.signature(getattr(commands, each)).parameters for each in ("generate", "serve", "plan")
    }
    for setting in fields(EngineFields):
        assert re.search(rf"^    {setting.name}: ", inspect.getdoc(EngineConfig) or "", re.MULTILINE)
        assert [each for each in constraints if setting.name in constraints[each]] == setting.metadata[
            "commands"
        ]


def test_the_list_of_commands_cuts_no_sentence() -> None:
    listed = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout.partition("Commands:")[2]
    assert listed.count("\n  ") == len(app.registered_commands) and "..." not in listed
