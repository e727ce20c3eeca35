"""A checkpoint's safetensors files, seen as one table of named tensors."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.models.files import parse_object, plain_file, read_object
from mla_compile.models.sharding import Division

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that are plain floats, in safetensors' words."""
_MOST_INDEX = 2**28  # bytes
_MOST_HEADER = 100_000_000  # bytes, as in safetensors


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
            MLAError: no file; one that is missing, outside the directory, or unreadable (truncated, say, or with a
                header that does not fit it); a tensor that comes twice.
        """
        self.entries: dict[str, Entry] = {}
        for name in _names(directory):
            path, real = directory / name, plain_file(directory, name)
            if real is None:
                mend = "download it again"
                raise MLAError(str(path), f"the file that {INDEX} names", "none", mend)
            try:
                _refuse_repeats(real, path)
                file: Any = safe_open(real, framework="pt", device="cpu")
                for tensor in file.keys():  # noqa: SIM118, a handle is no dict
                    if tensor in self.entries:
                        raise MLAError(str(path), "each tensor in one file", f"a second {tensor}")
                    header = file.get_slice(tensor)
                    self.entries[tensor] = Entry(tuple(header.get_shape()), header.get_dtype(), file)
            except (OSError, SafetensorError) as error:
                raise MLAError(
                    str(path), "a readable safetensors file", error, "download it again"
                ) from error

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU; its memory is the file's, mapped."""
        tensor: Tensor = self.entries[name].file.get_tensor(name)
        return tensor

    def read_part(self, name: str, how: Division, rank: int, size: int) -> Tensor:
        """`how.part` of the tensor, on the CPU; no more of the file is read."""
        entry = self.entries[name]
        whole = entry.file.get_slice(name)
        each = entry.shape[how.dim] // how.stacked
        begins = [stack * each + rank * each // size for stack in range(how.stacked)]
        before = (slice(None),) * how.dim
        pieces = [whole[(*before, slice(begin, begin + each // size))] for begin in begins]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, how.dim)


def _names(directory: Path) -> list[str]:
    index = read_object(directory, INDEX, most=_MOST_INDEX)
    if index is not None:
        table = index.get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise MLAError(str(directory / INDEX), "a weight_map of tensors to files", f"{table!r:.80}")
        return sorted(set(table.values()))
    if plain_file(directory, "model.safetensors") is not None:
        return ["model.safetensors"]
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise MLAError(
            str(directory), "at least one .safetensors file", "none", "convert the checkpoint first"
        )
    return names


def _refuse_repeats(real: Path, path: Path) -> None:
    """Refuse a header with a name twice: safetensors would take the last one. It checks all else itself."""
    with real.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        header = file.read(length) if length <= _MOST_HEADER else b""
    if length and len(header) == length:
        parse_object(header.decode("utf-8", errors="replace"), f"{path} header")
