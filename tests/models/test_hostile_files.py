"""A checkpoint's files may be cut, lie or lead elsewhere: what is read is theirs, or one error names the file."""

import json
import math
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs
from hypothesis import strategies as st
from safetensors.torch import save_file

from mla_compile import MLAError, load_model
from mla_compile.engine import Checkpoint
from mla_compile.models.safetensor_files import FLOATS, SafetensorFiles
from tests.models.hub_cache import snapshot_of

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(6.0, dtype=torch.bfloat16).view(2, 3),
    "c": torch.ones(5, dtype=torch.float8_e4m3fn),
}
INDEX = "model.safetensors.index.json"
SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> tuple[Path, dict[str, Any], bytes]:
    """A directory with one file, and that file's header and data."""
    directory = tmp_path_factory.mktemp("files")
    save_file(TENSORS, directory / SHARD)
    content = (directory / SHARD).read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return directory, json.loads(content[8:end]), content[end:]


def packed(header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def refused(directory: Path, content: bytes) -> bool:
    """Whether a file is refused, by name and at once. Else all that is read of it are its own bytes."""
    (directory / SHARD).write_bytes(content)
    start = time.process_time()
    try:
        files = SafetensorFiles(directory)
    except MLAError as error:
        message = str(error)
        assert str(directory / SHARD) in message
        assert "\n" not in message
        return True
    finally:
        assert time.process_time() - start < 1
    read = 0
    for name, entry in files.entries.items():
        if entry.dtype in (*FLOATS, "F8_E4M3"):
            tensor = files.read(name)
            assert tuple(tensor.shape) == entry.shape
            assert tensor.nbytes == 0 or bytes(tensor.flatten().view(torch.uint8)) in content
            read += tensor.nbytes
    assert read <= len(content)
    return False


@runs(max_examples=100)
@given(cut=st.integers(0, 10**6))
def test_a_cut_file_is_refused(good, cut):
    directory, header, data = good
    content = packed(header, data)
    assert refused(directory, content[: cut % len(content)])


@runs(max_examples=200)
@given(edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_header_of_other_bytes_is_refused_or_fits_the_data(good, edits):
    directory, header, data = good
    content = bytearray(packed(header, data))
    for place, byte in edits:
        content[place % (len(content) - len(data))] = byte
    refused(directory, bytes(content))


SIZES = [0, 1, 2, 3, 4, 5, 12, 17, 48, 60, 65, 10**6, -1, 2**31, 2**63, 2**64, 1.5, "3", None]
SIZE_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "F8_E5M2": 1}
LIES = {
    "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "U8", "F8_E5M2", "F4", "F33", "", 5, None]),
    "shape": st.lists(st.sampled_from(SIZES), max_size=4) | st.sampled_from([None, "x", {}]),
    "data_offsets": st.lists(st.sampled_from(SIZES), max_size=3) | st.sampled_from([None, "x", {}]),
}


@runs(max_examples=200)
@given(data=st.data(), name=st.sampled_from(list(TENSORS)), field=st.sampled_from(list(LIES)))
def test_a_header_that_does_not_fit_the_data_is_refused(good, data, name, field):
    directory, header, body = good
    lie = data.draw(LIES[field])
    tensor = TENSORS[name]
    if field == "dtype":
        fits = SIZE_OF.get(lie) == tensor.element_size()
    elif field == "shape":
        fits = isinstance(lie, list) and {type(n) for n in lie} <= {int} and math.prod(lie) == tensor.numel()
        fits = fits and min(lie, default=1) > 0
    else:
        fits = lie == header[name]["data_offsets"]
    assert refused(directory, packed(header | {name: header[name] | {field: lie}}, body)) == (not fits)


@pytest.mark.parametrize(
    "spoil",
    {
        "a tensor twice, with another shape": lambda h, d: packed(
            b'{"a": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]},' + json.dumps(h)[1:].encode(), d
        ),
        "overlapping tensors": lambda h, d: packed(h | {"d": h["c"]}, d),
        "a header longer than the file": lambda h, d: packed(h, d, length=10**6),
        "a header of 8 exabytes": lambda h, d: packed(h, d, length=2**63),
        "a header of 100 MB and more": lambda h, d: packed(h, d, length=100_000_001),
        "a deep header": lambda _, d: packed(b'{"a":' * 100_000, d),
        "no header": lambda _, d: packed(b"", d),
        "data that no tensor has": lambda h, d: packed(h, d + b"x"),
        "less data": lambda h, d: packed(h, d[:-1]),
        "a list": lambda _, d: packed(b"[]", d),
        "not UTF-8": lambda _, d: packed(b'{"\xff": 1}', d),
    }.items(),
    ids=lambda case: case[0],
)  # fmt: skip
def test_a_file_that_lies_is_refused(good, spoil):
    directory, header, data = good
    assert not refused(directory, packed(header, data))
    assert refused(directory, spoil[1](header, data))


def cut(file: Path) -> None:
    os.truncate(file, 100)


def write_over(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-8, os.SEEK_END)
        opened.write(b"\0" * 8)


def append_to(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


def replace_file(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"others")
    other.replace(file)


@pytest.mark.parametrize("at", ["before its first tensor", "after its last tensor"])
@pytest.mark.parametrize("change", [cut, write_over, append_to, replace_file, Path.unlink])
def test_a_file_that_changes_while_it_is_loaded_is_named(checkpoint, copy, monkeypatch, change, at):
    """A file that is deleted or replaced is loaded as it was when it was opened."""
    read, changed = SafetensorFiles.read, copy / "model-00004-of-00017.safetensors"
    calls = []

    def counted(files: SafetensorFiles, name: str) -> torch.Tensor:
        calls.append(files.entries[name].file.path)
        if len(calls) == when:
            change(changed)
        return read(files, name)

    monkeypatch.setattr(SafetensorFiles, "read", counted)
    when = 0
    expected = load_model(copy).state_dict()
    last = len(calls) - calls[::-1].index(changed)
    assert calls.index(changed) > 1 and last < len(calls), "other files are read before and after"
    when = 1 if at.startswith("before") else last + 1
    calls.clear()
    if change in (replace_file, Path.unlink):
        found = load_model(copy).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        return
    with pytest.raises(MLAError, match=rf"^{changed}: .* does not change .* written to .*complete$"):
        load_model(copy)
    shutil.copy(checkpoint / changed.name, changed)
    load_model(copy)


def name_shard(directory: Path, shard: object) -> None:
    index = directory / INDEX
    table = json.loads(index.read_text())
    table["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(table))


def test_an_index_names_plain_files_only(copy):
    for place in (copy.parent, copy / "sub"):  # it would be found
        place.mkdir(exist_ok=True)
        shutil.copy(copy / "mtp.safetensors", place / "x.safetensors")
    absolute = str(copy.parent / "x.safetensors")
    paths = [
        "../x.safetensors",
        absolute,
        "sub/../x.safetensors",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "~/x",
        "a\\b",
    ]
    for shard in [
        *paths,
        "x.safetensors\0",
        "\ud800",
        "x" * 300,
        "none.safetensors",
        5,
        None,
        ["mtp.safetensors"],
        {},
    ]:
        name_shard(copy, shard)
        with pytest.raises(MLAError) as caught:
            load_model(copy)
        assert str(caught.value).startswith(str(copy))
        assert "\n" not in str(caught.value)


def test_an_index_that_is_no_table_is_refused(copy):
    for text in (
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": 5}',
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        "\xff",
    ):
        (copy / INDEX).write_bytes(text.encode("latin-1"))
        with pytest.raises(MLAError, match=INDEX):
            load_model(copy)


def tokenizer_of(path: Path) -> None:
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text("")
    (path / "tokenizer.json").write_text(
        '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )


OPENED = [
    *("config.json", INDEX, "mtp.safetensors", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
]


def link_outside(file: Path) -> None:
    outside = file.parent.parent / f"outside-{file.name}"
    file.rename(outside)
    file.symlink_to(outside)


def link_outside_twice(file: Path) -> None:
    link_outside(file)
    file.rename(file.with_name("between"))
    file.symlink_to("between")


def link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("nothing")


def link_to_itself(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "spoil", [link_outside, link_outside_twice, link_to_nothing, link_to_itself, fifo, directory, device]
)
def test_what_is_opened_is_a_regular_file_inside_the_directory(copy, spoil: Callable[[Path], None]):
    tokenizer_of(copy)
    for name in OPENED:
        spoiled = copy.parent / f"spoiled {name}"
        shutil.copytree(copy, spoiled)
        spoil(spoiled / name)
        with pytest.raises(MLAError) as caught:
            Checkpoint.load(spoiled)
        assert str(caught.value).startswith(str(spoiled / name))


def test_links_inside_the_directory_are_followed(copy):
    (copy / "files").mkdir()
    for file in [path for path in copy.iterdir() if path.is_file()]:
        file.rename(copy / "files" / file.name)
        file.symlink_to(Path("files") / file.name)
    load_model(copy)
    (copy.parent / "link").symlink_to(copy)
    load_model(copy.parent / "link")


@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_in_the_hugging_face_cache_loads(checkpoint, tmp_path, shared):
    snapshot = snapshot_of(checkpoint, tmp_path, shared=shared)
    ours, theirs = load_model(snapshot).state_dict(), load_model(checkpoint).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    inner = snapshot / "main" / "model"
    inner.mkdir(parents=True)
    for file in [path for path in snapshot.iterdir() if path.is_symlink()]:
        (inner / file.name).symlink_to(Path("../..") / file.readlink())
    ours = load_model(inner).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    other = tmp_path / "models--other--model" / "blobs" / "0" / "secret"
    other.parent.mkdir(parents=True)
    shutil.copy(checkpoint / "config.json", other)
    for target in (
        other,
        tmp_path / "blobs" / "0" / "secret",
        tmp_path / "models--some--model" / "refs" / "main",
    ):
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(checkpoint / "config.json", target)
        with pytest.raises(
            MLAError, match=r"config\.json: expected a file inside the checkpoint's directory"
        ):
            load_model(snapshot)


def test_blobs_beside_another_directory_are_outside_of_it(checkpoint, tmp_path):
    snapshot = snapshot_of(checkpoint, tmp_path)
    moved = snapshot.parent.with_name("elsewhere")
    snapshot.parent.rename(moved)
    with pytest.raises(MLAError, match="expected a file inside the checkpoint's directory"):
        load_model(moved / snapshot.name)


LARGEST = {
    **dict.fromkeys(
        ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"], 2**24
    ),
    **dict.fromkeys(["tokenizer.json", INDEX], 2**28),
}


@pytest.mark.parametrize("name", LARGEST)
def test_a_file_that_is_read_whole_has_a_largest_size(copy, name):
    tokenizer_of(copy)
    with (copy / name).open("ab") as file:
        file.truncate(LARGEST[name] + 1)
    with pytest.raises(
        MLAError, match=rf"{name}: expected at most {LARGEST[name]} bytes, got {LARGEST[name] + 1}"
    ):
        Checkpoint.load(copy)


def test_a_sparse_shard_costs_no_memory(copy):
    """A header of many bytes that the file does not have, and a file that has them and no tensors for them."""
    with (copy / "mtp.safetensors").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(MLAError, match=r"mtp\.safetensors: expected a readable safetensors file, got "):
        load_model(copy)
