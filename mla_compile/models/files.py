"""Reads a checkpoint's files, which must be regular files with plain names inside its directory, with strict JSON."""

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from mla_compile.errors import MLAError
from mla_compile.hub import download_hint, snapshot_of

MAX_CONFIG = 2**24
"""Maximum bytes of a file of settings."""
_PLAIN_NAME = re.compile(r"\w[\w.+ -]*")
# A file of the Hugging Face cache's store, which repositories share.
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


def plain_file(directory: Path, name: str) -> Path | None:
    """The path of the file `name` of a checkpoint, with links resolved; None if there is none.

    Raises:
        MLAError: the name is a path, the file is a link out of the checkpoint, or not a regular file.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise MLAError(str(directory), "plain names of files inside it", repr(name[:80]))
    file = directory / name
    try:
        real = file.resolve(strict=True)
        mode = real.stat().st_mode
    except FileNotFoundError as error:
        if not file.is_symlink():
            return None
        raise MLAError(str(file), "a file", "a broken link", download_hint(directory)) from error
    except (OSError, RuntimeError) as error:  # pathlib raises a RuntimeError for a loop of links
        raise MLAError(str(file), "a readable file", error) from error
    if not _belongs(real, directory.resolve()):
        hint = "put the file itself there"
        raise MLAError(str(file), "a file inside the checkpoint's directory", f"a link to {real}", hint)
    if not stat.S_ISREG(mode):
        raise MLAError(str(file), "a regular file", stat.filemode(mode))
    return real


def _belongs(real: Path, directory: Path) -> bool:
    """Whether a file is in the directory, or where the Hugging Face cache keeps the files of a snapshot.

    `<cache>/models--<name>/snapshots/<commit>/` holds links to `<cache>/models--<name>/blobs/<etag>`, and since
    huggingface_hub 2 those may be links to `<cache>/blobs/<two digits>/<hash>`.
    """
    if real.is_relative_to(directory):
        return True
    snapshot = snapshot_of(directory)
    if snapshot is None:
        return False
    repository, cache = snapshot.parents[1:3]
    shared = _SHARED_BLOB.fullmatch(real.name) and real.parent == cache / "blobs" / real.name[:2]
    return real.parent == repository / "blobs" or bool(shared)


def read_text(directory: Path, name: str, *, most: int) -> str | None:
    """A UTF-8 file of at most `most` bytes; None if there is none. Raises `MLAError` as `plain_file` does."""
    real = plain_file(directory, name)
    if real is None:
        return None
    file = directory / name
    try:
        with real.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > most:
                raise MLAError(str(file), f"at most {most} bytes", size)
            return opened.read(most).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MLAError(str(file), "a readable file in UTF-8", error) from error


def read_object(directory: Path, name: str, *, most: int) -> dict[str, Any] | None:
    """The JSON object in a file of at most `most` bytes; None if there is no file.

    Raises:
        MLAError: as `plain_file` does; invalid JSON, nested too deeply, a repeated key, NaN or an infinite number,
            something other than an object.
    """
    text = read_text(directory, name, most=most)
    return None if text is None else parse_object(text, str(directory / name))


def parse_object(text: str, name: str) -> dict[str, Any]:
    """The JSON object in `text`, called `name` in errors. Raises `MLAError` as `read_object` does."""
    try:
        value = json.loads(text, object_pairs_hook=_finite_without_repeats)
    except RecursionError as error:
        raise MLAError(name, "a readable JSON object", "one nested too deeply") from error
    except ValueError as error:
        raise MLAError(name, "a readable JSON object", error) from error
    if not isinstance(value, dict):
        raise MLAError(name, "a readable JSON object", type(value).__name__)
    return value


class RepeatedKey(ValueError):
    """A JSON object has a key twice; Python's reader would keep only the last one."""

    def __init__(self, key: str) -> None:
        self.key = key[:80]
        super().__init__(f"the key {self.key!r} twice")


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads` that raises `RepeatedKey`."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RepeatedKey(repeated)
    return table


def _finite_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, value in pairs:
        if (number := _not_finite(value)) is not None:
            raise ValueError(f"the number {number} for {key[:80]!r}")
    return without_repeats(pairs)


def _not_finite(value: object) -> float | None:
    """A number in a value or in its lists that is NaN or infinite, as Python's reader allows; None if there is none."""
    if isinstance(value, list):
        return next((number for each in value if (number := _not_finite(each)) is not None), None)
    return value if isinstance(value, float) and not math.isfinite(value) else None
