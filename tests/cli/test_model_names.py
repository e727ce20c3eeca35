"""A model in the local Hugging Face cache is found by its name, ORG/NAME; what the cache lacks is a command."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mla_compile
from mla_compile import MLAError, load_model, load_tokenizer
from mla_compile.cli import serve
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.serving.settings import ServerSettings
from tests.cli.conftest import Run
from tests.cli.test_startup import command
from tests.models.hub_cache import snapshot_of

NAME = "some-org/a.model_1"
COMMAND = f"run `hf download {NAME}`"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in the place that HF_HOME named when huggingface_hub was imported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def snapshot(cache: Path, checkpoint: Path) -> Path:
    return snapshot_of(checkpoint, cache, NAME)


def test_the_library_finds_it(snapshot: Path, checkpoint: Path) -> None:
    ours, theirs = load_model(NAME).state_dict(), load_model(checkpoint).state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert load_tokenizer(Path(NAME))("hello") == load_tokenizer(checkpoint)("hello")
    settings: dict[str, Any] = {"max_new_tokens": 3, "compile": False}
    ours, theirs = (
        mla_compile.generate(["hello"], model=m, tokenizer=m, **settings) for m in (NAME, checkpoint)
    )
    assert ours == theirs


def test_the_commands_find_it_and_call_it_by_its_name(
    snapshot: Path, checkpoint: Path, run: Run, generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = generate("--prompt", "hello", "--model", NAME)
    assert (by_name.exit_code, by_name.stdout) == (0, generate("--prompt", "hello").stdout)
    assert run("plan", NAME).stdout.startswith(f"{NAME}: ")
    assert run("inspect", "--model", NAME).stdout == run("inspect", "--model", checkpoint).stdout
    served = SimpleNamespace()
    monkeypatch.setattr(
        serve, "_server", lambda replicas: lambda settings, **_: vars(served).update(it=settings)
    )
    assert run("serve", "--model", NAME, "--device", "cpu").exit_code == 0
    assert (served.it.served_model_name, served.it.model) == (NAME, snapshot)
    assert run("serve", "--model", snapshot, "--device", "cpu", "--served-model-name", "mine").exit_code == 0
    assert served.it.served_model_name == "mine"
    assert ServerSettings(model=Path(NAME)).served_model_name == NAME


@pytest.mark.long
def test_the_cache_is_that_of_hf_home(tmp_path: Path, checkpoint: Path) -> None:
    snapshot_of(checkpoint, tmp_path / "hub", NAME)
    for home, status in ((tmp_path, 0), (tmp_path / "other", 2)):
        done = command("plan", NAME, env={"HF_HOME": str(home), "PATH": ""})
        assert done.returncode == status, done.stderr
    assert done.stderr == (
        f"mla-compile: MODEL_DIR {NAME}: expected a directory, or a model in the Hugging Face cache "
        f"{tmp_path / 'other' / 'hub'}, got neither; {COMMAND}\n"
    )


def test_a_directory_of_that_name_wins(snapshot: Path, run: Run) -> None:
    shutil.copytree(SHIPPED_MODEL, NAME)
    assert run("plan", NAME).stdout.startswith("a.model_1: 11.4 million parameters")


@pytest.mark.parametrize("name", [NAME, "path/to", "deep--org/model", "a" * 99 + "/b"])
def test_a_name_that_is_not_there_is_an_error_with_the_command_and_nothing_is_fetched(
    cache: Path, generate: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("a connection"))
    result = generate("--prompt", "a", "--model", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"--model {name}: expected a directory, or a model in the Hugging Face cache" in result.stderr
    assert f"`hf download {name}`" in result.stderr and result.stderr.count("\n") == 1
    for load in (load_model, load_tokenizer, lambda path: ServerSettings(model=path)):
        with pytest.raises(MLAError, match=f"hf download {name}"):
            load(name)
    assert f"`hf download {name}`" in generate("--prompt", "a", "--tokenizer", name).stderr


@pytest.mark.parametrize(
    "path", ["./a/b/c", "/a/b", "../a", "a", "~a/b", ".a/b", "a/b c", "a/é\n", f"./{NAME}", f"{NAME}/"]
)
def test_what_is_no_name_is_a_directory(snapshot: Path, generate: Run, path: str) -> None:
    with pytest.raises(MLAError, match="got no such directory"):
        load_model(path)
    assert (
        "expected a checkpoint's directory, got no such directory"
        in generate("--prompt", "a", "--model", path).stderr
    )


def test_what_is_no_path_is_an_error_of_the_argument() -> None:
    for name in ("model", "tokenizer"):
        with pytest.raises(MLAError, match=rf"^{name}: expected a checkpoint's directory, got 5$"):
            mla_compile.generate(["hello"], **{name: 5})


def test_an_incomplete_snapshot_names_the_file_and_the_command(
    snapshot: Path, run: Run, generate: Run
) -> None:
    def error() -> str:
        with pytest.raises(MLAError) as caught:
            load_model(NAME)
        return str(caught.value)

    index = json.loads((snapshot / "model.safetensors.index.json").read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    target = (snapshot / first).readlink()
    (snapshot / first).unlink()
    assert error().startswith(f"{snapshot / first}: expected the file that") and COMMAND in error()
    assert run("plan", NAME).exit_code == 0  # needs config.json alone
    (snapshot / first).symlink_to("../../blobs/none")
    assert f"{first}: expected a file, got a broken link; {COMMAND}" in error()
    (snapshot / first).unlink()
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model-00002-of-00003.safetensors").symlink_to(target)
    (snapshot / "model-00003-of-00003.safetensors").symlink_to(target)
    assert "model-00001-of-00003.safetensors: expected this shard too, got none" in error()
    assert COMMAND in error()
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    assert error() == f"{snapshot}: expected at least one .safetensors file, got none; {COMMAND}"
    (snapshot / "config.json").unlink()  # the tokenizer is still there
    assert f"config.json: expected a checkpoint's config, got none; {COMMAND}" in error()
    assert COMMAND in generate("--prompt", "a", "--model", NAME).stderr
