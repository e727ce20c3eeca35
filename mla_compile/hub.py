"""Models by name, ORG/NAME, in the local Hugging Face cache. Nothing is downloaded."""

import re
from os import PathLike
from pathlib import Path

from mla_compile.errors import MLAError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ("config.json", "tokenizer.json")  # a snapshot with either is a checkpoint or a tokenizer


def find_checkpoint(path: object, name: str = "path") -> Path:
    """`path` unless it is the name of a model and no file or directory; then the model's snapshot in the cache.

    The snapshot is that of the branch `main`, in the cache that HF_HOME or HF_HUB_CACHE names. It may be incomplete.

    name: of the argument, for errors.

    Raises:
        MLAError: `path` is neither a str nor a path; the cache has no such model.
    """
    if not isinstance(path, str | PathLike):
        raise MLAError(name, "a checkpoint's directory", f"{path!r:.80}")
    text = str(path)  # as a Path, "./org/name" and "org/name/" would be names too
    if not text or "\0" in text:
        raise MLAError(name, "a checkpoint's directory", f"{text!r:.80}" if text else "an empty path")
    directory = Path(path)
    try:
        if directory.exists() or not _NAME.fullmatch(text):
            return directory
    except OSError as error:  # a name that is too long, say
        raise MLAError(name, "a checkpoint's directory", error) from error
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in _FILES:
        try:
            found = try_to_load_from_cache(text, file)
        except HFValidationError:  # two dashes, say, which no repository may have
            break
        if isinstance(found, str):
            return Path(found).parent
    expected = f"a directory, or a model in the Hugging Face cache {constants.HF_HUB_CACHE}"
    raise MLAError(f"{name} {text}", expected, "neither", f"run `hf download {text}`")


def snapshot_of(directory: Path) -> Path | None:
    """The snapshot in a Hugging Face cache, `models--ORG--NAME/snapshots/COMMIT`, that is or has the directory."""
    for each in (directory, *directory.parents):
        if each.parent.name == "snapshots" and each.parents[1].name.startswith("models--"):
            return each
    return None


def repository_of(directory: Path) -> str | None:
    """ORG/NAME of a snapshot in a Hugging Face cache, or of a directory in one; None for others."""
    snapshot = snapshot_of(directory)
    return None if snapshot is None else snapshot.parents[1].name.removeprefix("models--").replace("--", "/")


def model_name(directory: Path) -> str:
    """The name of a checkpoint: ORG/NAME of a snapshot, else the directory's name."""
    directory = directory.resolve()
    return repository_of(directory) or directory.name


def download_hint(directory: Path, otherwise: str = "download it again") -> str:
    """How to get what a checkpoint lacks: the command for a snapshot, else `otherwise`."""
    repository = repository_of(directory.resolve())
    return otherwise if repository is None else f"run `hf download {repository}`"
