"""A checkpoint's safetensors files, seen as one table of named tensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla_compile.errors import MLAError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its shape, and its dtype in safetensors' words ("F32", "BF16", "F8_E4M3", ...)."""

    shape: tuple[int, ...]
    dtype: str
    file: Any  # safetensors' handle, which has no public type

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class SafetensorFiles:
    """Headers of every file, read at once; tensors are read one by one, so that no second copy of a model exists."""

    def __init__(self, directory: Path) -> None:
        """Open the files of `model.safetensors.index.json`, else `model.safetensors`, else every `*.safetensors`.

        Raises:
            MLAError: no file, a missing or unreadable one (truncated, say), a tensor that two files hold.
        """
        self.entries: dict[str, Entry] = {}
        for path in _paths(directory):
            try:
                file: Any = safe_open(path, framework="pt", device="cpu")
                for name in file.keys():  # noqa: SIM118, a handle is no dict
                    if name in self.entries:
                        raise MLAError(str(path), "each tensor in one file", f"a second {name}")
                    header = file.get_slice(name)
                    self.entries[name] = Entry(tuple(header.get_shape()), header.get_dtype(), file)
            except (OSError, SafetensorError) as error:
                raise MLAError(
                    str(path), "a readable safetensors file", error, "download it again"
                ) from error

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU; its memory is the file's, mapped."""
        tensor: Tensor = self.entries[name].file.get_tensor(name)
        return tensor


def _paths(directory: Path) -> list[Path]:
    index, single = directory / INDEX, directory / "model.safetensors"
    if index.exists():
        return _indexed_paths(index)
    paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise MLAError(
            str(directory), "at least one .safetensors file", "none", "convert the checkpoint first"
        )
    return paths


def _indexed_paths(index: Path) -> list[Path]:
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [index.parent / file for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MLAError(str(index), "JSON with a weight_map of tensors to files", repr(error)) from error
    for path in paths:
        if not path.exists():
            raise MLAError(str(path), f"the file that {index.name} names", "none", "download it again")
    return paths
