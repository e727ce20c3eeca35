"""README.md and docs/: Python blocks run, commands run or name flags and files that exist."""

import argparse
import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from mla_compile import backend
from mla_compile.cli.app import app
from tests.cli.conftest import END_ID, save_byte_tokenizer
from tests.examples.pages import ROOT, Block, blocks_of, commands_of, pages
from tests.models.hub_cache import snapshot_of
from tests.models.small import reference_model, reference_mtp_layer, save, v3_config

PRINTED = re.compile(r"^print\(.*\)  # (\d[\d.]*)\b", re.MULTILINE)
"""A comment behind a print that begins with a number: what it prints."""
NEW_TOKENS = "4"
"""Of a command that does not say: its text is no concern of these tests."""
DOWNLOADED = "zai-org/GLM-4.7-Flash"
"""A model that a page downloads."""
FILES = {
    "prompts.jsonl": '{"prompt": "Once", "max_tokens": 3, "temperature": 0.7}\n{"prompt_token_ids": [1, 2]}\n',
    "schema.json": '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}',
    "rules.lark": 'start: "a" | "b"\n',
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 checkpoint with an MTP layer and a tokenizer."""
    sizes = {"vocab_size": 257, "num_hidden_layers": 2, "first_k_dense_replace": 1, "qk_rope_head_dim": 16}
    config = v3_config(**sizes, max_position_embeddings=4096, eos_token_id=END_ID, num_nextn_predict_layers=1)
    model = reference_model(config)
    path = save(model, tmp_path_factory.mktemp("checkpoint"), reference_mtp_layer(model))
    save_byte_tokenizer(path)
    return path


@pytest.fixture(autouse=True)
def reader(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's folder, with the files that the examples name."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(checkpoint)
    snapshot_of(checkpoint, tmp_path / "hub", DOWNLOADED)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mla_compile.progress.PATIENCE", 3600)


# --- blocks


@pytest.mark.parametrize(
    "text",
    [
        "```\nprint(1)\n```\n",
        "```bash\nls\n```\n",
        "```python {gpu}\nprint(1)\n```\n",
        "- a list\n\n  ```python\n  print(1)\n  ```\n",
        "~~~python\nprint(1)\n~~~\n",
        "```python\nprint(1)\n",
        "<!-- test: gpus -->\n```python\nprint(1)\n```\n",
        "<!-- test: gpu -->\n\n```python\nprint(1)\n```\n",
    ],
)
def test_a_block_that_no_test_would_run_is_an_error(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n")
    assert [block.code for block in blocks_of(page)] == ["print(1)\n"]
    page.write_text(text)
    with pytest.raises(ValueError, match=re.escape("page.md")):
        blocks_of(page)


# --- Python


def programs() -> list[object]:
    """Each page's program; again with the blocks of a mark that only some machines run."""
    found = []
    for page in pages():
        marks = {block.mark for block in blocks_of(page) if block.language == "python" and not block.included}
        name = str(page.relative_to(ROOT))
        if marks & {"", "compiled"}:
            found.append(pytest.param(page, "", id=name))
        for mark in sorted(marks & {"gpu", "slow"}):
            marker = getattr(pytest.mark, mark)
            found.append(pytest.param(page, mark, id=f"{name}-{mark}", marks=marker))
    return found


@pytest.mark.parametrize(("page", "mark"), programs())
def test_a_pages_python_runs_and_prints_what_its_comments_say(
    page: Path, mark: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language == "python" and not block.included and block.mark in ("", "compiled", mark):
            run(block, names, monkeypatch)
            printed = capsys.readouterr().out.splitlines()
            wanted = PRINTED.findall(block.code)
            assert [line for line in printed if line in wanted] == wanted, f"{block} prints other numbers"


def run(block: Block, names: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    if block.mark in ("gpu", "slow"):
        exec(code, names)
        return
    if block.mark == "":
        with torch.compiler.set_stance("force_eager"):
            exec(code, names)
        return
    torch.compiler.reset()
    counters.clear()
    with monkeypatch.context() as patch:
        eager = lookup_backend("aot_eager")
        patch.setattr(backend, "lower_with_inductor", lambda gm, inputs, _: eager(gm, inputs))
        exec(code, names)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_a_page_includes_is_there_and_tested(page: Path) -> None:
    tested = (ROOT / "tests" / "examples" / "test_examples.py").read_text(encoding="utf-8")
    for block in blocks_of(page):
        if block.included is not None:
            file = ROOT / block.included
            assert file.is_file(), f"{block}: there is no {block.included}"
            assert block.language != "python" or f'@runs("{file.stem}")' in tested, (
                f"nothing runs {file.name}"
            )


# --- commands


@pytest.mark.parametrize(
    "page", [p for p in pages() if any(b.language == "sh" for b in blocks_of(p))], ids=str
)
def test_a_pages_commands_run_or_name_what_there_is(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks_of(page):
        for command in commands_of(block) if block.language == "sh" else ():
            words = shlex.split(command, comments=True)
            rule_for(words, f"{block}: `{command}`")(words, monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "ls",
        "python my_script.py",
        "python -m benchmarks.nothing",
        "python -m benchmarks.decode --typo",
        "python -m pytest tests/test_nothing.py",
        "make nothing",
        "pip install torch",
        "pip install '.[nothing]'",
        "mla-compile nothing",
        "mla-compile env --typo",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    with pytest.raises((AssertionError, SystemExit)):
        rule_for(words, command)(words, monkeypatch)


def rule_for(words: list[str], what: str) -> "Rule":
    """How a command is checked; a command without a rule fails."""
    rules = [rule for start, rule in RULES.items() if words[: len(start)] == list(start)]
    assert len(rules) == 1, f"{what} is no command that this test knows"
    return rules[0]


def runs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`mla-compile`, eagerly, with few tokens, in one process; `serve` stops before it serves."""
    words = ["1" if before == "--tensor-parallel-size" else word for before, word in pairwise(["", *words])]
    few = ["--max-new-tokens", NEW_TOKENS] if words[1] in ("generate", "demo") else []
    few *= "--max-new-tokens" not in words and "--help" not in words
    with torch.compiler.set_stance("force_eager"), monkeypatch.context() as patch:
        patch.setattr("mla_compile.cli.serve.serve_checkpoint", lambda **_: None)  # it would not end
        result = CliRunner().invoke(app, [*words[1:], *few])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.stderr


def is_a_target(words: list[str], _: pytest.MonkeyPatch) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert targets.issuperset(word for word in words[1:] if "=" not in word)


def is_an_extra(words: list[str], _: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words[2:]:
        if word != "-e":
            found = re.fullmatch(r"(?:\.|mla-compile)(?:\[([\w,-]+)\])?", word)
            assert found, f"{word} is not this project"
            assert project["optional-dependencies"].keys() >= set(filter(None, (found[1] or "").split(",")))


def has_such_flags(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark or a stress command; it stops before it runs."""

    class ParsedError(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *args: object) -> None:
        parse(parser)
        raise ParsedError

    main = importlib.import_module(words[2]).main
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", words[2:])
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        with pytest.raises(ParsedError):
            main()


def is_a_launch_of_torch(words: list[str], _: pytest.MonkeyPatch) -> None:
    """The launch of the page's own program, which tests/parallel runs."""
    assert words[1:3] == ["--standalone", "--nproc-per-node"] and words[4:] == ["program.py"], words


def is_a_download(words: list[str], _: pytest.MonkeyPatch) -> None:
    assert words[2:] == [DOWNLOADED], words


def is_an_example(words: list[str], _: pytest.MonkeyPatch) -> None:
    assert (ROOT / words[1]).is_file() and words[1].startswith("examples/"), words[1]


def is_a_test(words: list[str], _: pytest.MonkeyPatch) -> None:
    files = [word for word in words[3:] if word.endswith(".py")]
    assert files and all((ROOT / file).is_file() for file in files)


Rule = Callable[[list[str], pytest.MonkeyPatch], None]
RULES: dict[tuple[str, ...], Rule] = {
    ("mla-compile",): runs,
    ("make",): is_a_target,
    ("pip", "install"): is_an_extra,
    (".", ".venv/bin/activate"): lambda words, _: None,
    ("torchrun",): is_a_launch_of_torch,
    ("hf", "download"): is_a_download,
    ("curl",): lambda words, _: None,  # tests/serving runs it
    ("python", "-m", "pytest"): is_a_test,
    **{
        ("python", "-m", f"{folder}.{file.stem}"): has_such_flags
        for folder in ("benchmarks", "stress")
        for file in (ROOT / folder).glob("*.py")
    },
    **{("python", str(file.relative_to(ROOT))): is_an_example for file in (ROOT / "examples").glob("*.py")},
}
