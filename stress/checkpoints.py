"""Checkpoints, EAGLE-3 heads and tokenizers whose files are changed: each loads and works, or one error names the file.

Changed are config.json (any setting, to any JSON, also what Python would not write), the index of the shards, headers
and bytes of safetensors files, which are cut, lie or overlap, and all files of a tokenizer. Random tokenizers that are
valid are compared with those of transformers.
"""

import argparse
import json
import logging
import re
import shutil
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mla_compile import MLAError, load_model
from stress.runner import Case, Draw, check_message, command
from tests.models import test_hostile_configs as configs
from tests.models import test_hostile_heads as heads
from tests.models.test_hostile_configs import HOSTILE
from tests.models.test_hostile_files import INDEX, SHARD, SIZES, TENSORS, packed, refused
from tests.models.test_tokenizer import assert_as_transformers_has_it, check_hostile
from tests.models_for_tests import tiny_model


class Files:
    """Valid directories, made once, and places for the changed ones."""

    def __init__(self) -> None:
        logging.disable(logging.WARNING)  # transformers warns of every config
        self._made = tempfile.TemporaryDirectory()
        self.root = Path(self._made.name)
        self.checkpoints = {name: configs.saved(name, self.new(name)) for name in configs.CONFIGS}
        self.heads = {kind: heads.head_of(kind, self.new(kind)) for kind in heads.KEYS}
        both = self.checkpoints | self.heads
        self.configs = {name: json.loads((path / "config.json").read_text()) for name, path in both.items()}
        self.target = tiny_model(torch.float32)
        self.indexed = shutil.copytree(self.checkpoints["v3"], self.root / "indexed")
        self.index = json.loads((self.indexed / INDEX).read_text())
        self.files = self.new("files")
        save_file(TENSORS, self.files / SHARD)
        content = (self.files / SHARD).read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        self.header, self.data = json.loads(content[8:end]), content[end:]

    def new(self, name: str) -> Path:
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path


def changed(value: Any, draw: Draw, depth: int = 0) -> Any:
    """A JSON value with something else in one place: another value, one key less, or a key twice as a list."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    places = [place for place, _ in inside]
    if not places or (depth and draw.random() < 0.3):
        return draw.choice([None, True, -1, 0, 3, 2**63, 1e300, "", "x", "a/../b", [], {}, [[]], {"a": 1}])
    place, copied = draw.choice(places), value.copy()
    match draw.randrange(8):
        case 0:
            del copied[place]
        case 1 if isinstance(value, dict):
            copied[draw.choice(("x", "", "__metadata__", "model.norm.weight"))] = copied.pop(place)
        case 2 if isinstance(value, dict):
            copied[place] = value[draw.choice(places)]
        case _:
            copied[place] = changed(value[place], draw, depth + 1)
    return copied


def changed_config(draw: Draw, files: Files) -> str:
    name = draw.choice(list(files.configs))
    keys = heads.KEYS.get(name, configs.KEYS)
    changes = {draw.choice(keys): draw.choice(HOSTILE) for _ in range(draw.choice((1, 1, 2, 3)))}
    draw.note(name, {key: text[:60] for key, text in changes.items()})
    if name in files.heads:
        loads = heads.check_config(files.heads[name], files.configs[name], files.target, changes)
        return "head's config, loads" if loads else "head's config, refused"
    loads = configs.check_config(files.checkpoints[name], files.configs[name], changes)
    return "config, loads" if loads else "config, refused"


def changed_index(draw: Draw, files: Files) -> str:
    index = files.index
    for _ in range(draw.randint(1, 3)):
        index = changed(index, draw)
    text = json.dumps(index)
    if draw.random() < 0.3:
        start, end = sorted(draw.randrange(len(text)) for _ in range(2))
        text = draw.choice((text[:start], text[:start] + text[end:], text[:start] + "\0" + text[start:]))
    (files.indexed / INDEX).write_text(text)
    draw.note(INDEX, text[:60], "...", text[-400:])
    try:
        configs.assert_finite(load_model(files.indexed))
    except MLAError as error:
        check_message(error, re.escape(str(files.indexed)))
        return "index, refused"
    return "index, loads"


def changed_header(draw: Draw, files: Files) -> str:
    header: dict[str, Any] = files.header
    data, length = files.data, None
    for _ in range(draw.randint(0, 3)):
        name, field = draw.choice(list(TENSORS)), draw.choice(("dtype", "shape", "data_offsets"))
        sizes = [draw.choice(SIZES) for _ in range(draw.randrange(4))]
        kinds = ["F32", "F16", "BF16", "F64", "U8", "F8_E5M2", "F4", "", 5, None]
        lie = draw.choice(kinds) if field == "dtype" else draw.choice((sizes, sizes, None, "x"))
        entry = header.get(name)
        if isinstance(entry, dict) and draw.random() < 0.7:
            header = header | {name: entry | {field: lie}}
        else:
            header = changed(header, draw)
    if draw.random() < 0.2:
        length = draw.choice((0, 1, 7, 10**6, 2**40, 2**63, 2**64 - 1))
    content = bytearray(packed(header, data, length))
    for _ in range(draw.choice((0, 0, 1, 3))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    if draw.random() < 0.2:
        content = content[: draw.randrange(len(content))]
    draw.note(bytes(content[:400]))
    return "safetensors, refused" if refused(files.files, bytes(content)) else "safetensors, read"


def changed_tokenizer(draw: Draw, files: Files) -> str:
    directory = files.new("tokenizer")
    if draw.random() < 0.3:
        assert_as_transformers_has_it(directory, draw)
        return "tokenizer, as transformers has it"
    return "tokenizer, loads" if check_hostile(directory, draw) else "tokenizer, refused"


@cache
def case() -> Case:
    files = Files()
    kinds = (changed_config, changed_index, changed_header, changed_tokenizer)
    return lambda draw: draw.choices(kinds, (3, 1, 3, 2))[0](draw, files)


def make(_: argparse.Namespace) -> Case:
    return case()


def main() -> None:
    command("checkpoints", make)


if __name__ == "__main__":
    main()
