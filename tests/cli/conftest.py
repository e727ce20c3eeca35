"""A tiny DeepSeek-V3 checkpoint with an MTP layer and a tokenizer of bytes, and the command that runs on it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from mla_compile.cli.app import app
from tests.models.small import reference_model, reference_mtp_layer, save, v3_config

END = "<|endoftext|>"
END_ID = 256


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = v3_config(
        vocab_size=257,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        eos_token_id=END_ID,
    )
    model = reference_model(config)
    path = save(model, tmp_path_factory.mktemp("checkpoint"), reference_mtp_layer(model))
    save_byte_tokenizer(path)
    return path


def save_byte_tokenizer(path: Path) -> None:
    """One token per byte, so that random tokens cut characters in half."""
    ids = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=ids | {END: END_ID}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(path)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """The same checkpoint, to be changed."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.fixture
def without_tokenizer(copy: Path) -> Path:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    return copy


@pytest.fixture
def without_mtp(copy: Path) -> Path:
    (copy / "mtp.safetensors").unlink()
    index = copy / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"] = {k: v for k, v in table["weight_map"].items() if v != "mtp.safetensors"}
    index.write_text(json.dumps(table))
    return copy


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow machines print no progress lines."""
    monkeypatch.setattr("mla_compile.progress.PATIENCE", 3600)


Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """`mla-compile` in this process; whatever it raises, it may not be a traceback."""

    def run(*args: object, input: str | None = None) -> Result:
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def generate(run: Run, checkpoint: Path) -> Run:
    """`mla-compile generate --no-compile` on the tiny checkpoint, or on the one that a later --model names."""
    first = ("generate", "--no-compile", "--model", checkpoint, "--max-new-tokens", 12)
    return lambda *args, **settings: run(*first, *args, **settings)


@pytest.fixture
def complete(generate: Run, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The output lines for these input lines, each without the number of its line."""

    def complete(lines: list[dict[str, Any]], *args: object) -> list[dict[str, Any]]:
        prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = generate("--input", prompts, "--output", output, *args)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
        found = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line.pop("line") for line in found] == list(range(1, len(lines) + 1))
        return found

    return complete
