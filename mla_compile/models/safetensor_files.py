"""A checkpoint's safetensors files as one table of named tensors."""

import math
import os
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.hub import download_hint
from mla_compile.models.files import parse_object, plain_file, read_object
from mla_compile.models.sharding import Division

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Float dtypes of weights, by safetensors' names."""
FLOAT8 = "F8_E4M3"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1}
_MAX_INDEX = 2**28  # bytes
_MAX_HEADER = 100_000_000  # bytes, as in safetensors


@dataclass(frozen=True)
class MappedFile:
    """An open file. handle: safetensors', which has no public type. before: its status when it was opened."""

    path: Path
    real: Path
    handle: Any
    before: os.stat_result

    def check_unchanged(self) -> None:
        """Raises `MLAError` if the file was written to. What was deleted or replaced stays as it was while mapped."""
        with suppress(FileNotFoundError):
            before, now = self.before, self.real.stat()
            if now.st_ino == before.st_ino and (now.st_size, now.st_mtime_ns) != (
                before.st_size,
                before.st_mtime_ns,
            ):
                expected = f"a file that does not change while it is loaded ({before.st_size} bytes)"
                hint = "load it when it is complete"
                raise MLAError(str(self.path), expected, f"one written to ({now.st_size} bytes)", hint)


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its shape, and its dtype by safetensors' name ("F32", "BF16", "F8_E4M3", ...)."""

    shape: tuple[int, ...]
    dtype: str
    file: MappedFile
    name: str  # in the file

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Bytes in the file, for the dtypes of weights and their scales."""
        return math.prod(self.shape) * _SIZES[self.dtype]


class SafetensorFiles:
    """Reads the headers of all files at once, and tensors one by one, so that no second copy of a model exists."""

    def __init__(self, directory: Path, prefix: str = "") -> None:
        """Open `model.safetensors`, else the files of `model.safetensors.index.json`, else every `*.safetensors`.

        An index that names `model.safetensors` has precedence.

        prefix: of the tensors to list, by their names without it.

        Raises:
            MLAError: no file; one that is missing, outside the directory, of another length than in its header, or
                unreadable (such as a header that does not fit it); a repeated tensor.
        """
        self.entries: dict[str, Entry] = {}
        self._files: list[MappedFile] = []
        for name, real in _files(directory).items():
            path = directory / name
            try:
                before = real.stat()
                _check_header(real, path)
                handle: Any = safe_open(real, framework="pt", device="cpu")
                file = MappedFile(path, real, handle, before)
                self._files.append(file)
                for stored in handle.keys():  # noqa: SIM118, a handle is no dict
                    if not stored.startswith(prefix):
                        continue
                    tensor = stored.removeprefix(prefix)
                    if tensor in self.entries:
                        raise MLAError(str(path), "each tensor in one file", f"a second {stored}")
                    header = handle.get_slice(stored)
                    shape = tuple(header.get_shape())
                    self.entries[tensor] = Entry(shape, header.get_dtype(), file, stored)
            except (OSError, SafetensorError) as error:
                hint = download_hint(directory)
                raise MLAError(str(path), "a readable safetensors file", error, hint) from error

    def read(self, name: str) -> Tensor:
        """The tensor on the CPU; its memory is the file's, mapped.

        Raises:
            MLAError: the file has changed.
        """
        entry = self.entries[name]
        entry.file.check_unchanged()  # a page beyond the end of a file that was cut would end the process
        tensor: Tensor = entry.file.handle.get_tensor(entry.name)
        return tensor

    def read_range(self, name: str, dim: int, begin: int, end: int) -> Tensor:
        """Indices `begin` to `end` of the tensor along `dim`, like `read`; the rest of it is not read."""
        entry = self.entries[name]
        entry.file.check_unchanged()
        whole = entry.file.handle.get_slice(entry.name)
        part: Tensor = whole[(*(slice(None),) * dim, slice(begin, end))]
        return part

    def check_unchanged(self) -> None:
        """Raises `MLAError` if a file has changed. A mapped tensor is read while it is copied: call it after that."""
        for file in self._files:
            file.check_unchanged()

    def read_part(self, name: str, how: Division, rank: int, size: int) -> Tensor:
        """`how.part` of the tensor, like `read_range`; a copy if it stacks several matrices."""
        ranges = how.ranges(self.entries[name].shape[how.dim], rank, size)
        pieces = [self.read_range(name, how.dim, *each) for each in ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, how.dim)


def _files(directory: Path) -> dict[str, Path]:
    """The files' resolved paths, by name."""
    found = {name: plain_file(directory, name) for name in _names(directory)}
    missing = [name for name, real in found.items() if real is None]
    if missing:
        hint = f"{download_hint(directory)}; files that are missing: {len(missing)} of {len(found)}"
        expected = f"the file that {INDEX} names" if (directory / INDEX).exists() else "this shard too"
        raise MLAError(str(directory / missing[0]), expected, "none", hint)
    return {name: real for name, real in found.items() if real is not None}


def _names(directory: Path) -> list[str]:
    index = read_object(directory, INDEX, most=_MAX_INDEX)
    is_single = plain_file(directory, _SINGLE) is not None
    if index is not None:
        table = index.get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise MLAError(str(directory / INDEX), "a weight_map of tensors to files", f"{table!r:.80}")
        # Beside another file it is an older one, which transformers ignores too.
        if not is_single or _SINGLE in table.values():
            return sorted(set(table.values()))
    if is_single:
        return [_SINGLE]
    names = sorted(path.name for path in directory.glob("[!.]*.safetensors"))  # macOS writes ._NAME too
    if not names:
        hint = download_hint(directory, "convert the checkpoint first")
        raise MLAError(str(directory), "at least one .safetensors file", "none", hint)
    # Without an index, the names of shards tell how many there are.
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    all_shards = {f"{s[1]}-{i:05}-of-{s[3]}.safetensors" for s in shards for i in range(1, int(s[3]) + 1)}
    return sorted({*names, *all_shards})


def _check_header(real: Path, path: Path) -> None:
    """Reject a repeated name, for which safetensors would use the last entry; it checks everything else itself."""
    with real.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        header = file.read(length) if length <= _MAX_HEADER else b""
    if header and len(header) == length:
        parse_object(header.decode("utf-8", errors="replace"), f"{path} header")
