"""Tables that say who serves on one model of GPU: what they may say, and that ops choose by them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_compile import Engine, MLAError
from mla_compile.ops import cublas, tuned
from mla_compile.ops.library import candidates, choose, serving
from mla_compile.ops.tuned import Tuned, read
from tests.models_for_tests import one_layer_model
from tests.ops.test_choice import fake, on

HOPPER = (9, 0)
PLAIN = {"op": "fused_linear", "batch_invariant": False, "takes": {"tokens": 2, "k": 64}, "row": "reference"}
EXACT = {"op": "batch_invariant_matmul", "batch_invariant": True, "takes": {"k": 64}, "row": "triton"}
SHIPPED = sorted(Path(tuned.__file__).parent.glob("*.json"))


def written(file: Path, *lines: object, **more: object) -> Path:
    file.write_text(json.dumps({"gpu": "A GPU", "versions": "torch 2", "lines": lines} | more))
    return file


def serve_by(patch: pytest.MonkeyPatch, file: Path, *lines: object) -> None:
    """Have every "cuda" device be of SM 90, with a table of these lines, and cuBLAS be batch-invariant."""
    on(HOPPER, patch)
    table = read(written(file, *lines))
    patch.setattr(tuned, "table_of", lambda device: table if device.type == "cuda" else None)
    patch.setattr(cublas, "has_same_bits", lambda x, w: x.device.type == "cuda")


def linear(tokens: int, k: int = 64, n: int = 96, *, exact: bool = False, machine: Any = HOPPER) -> Any:
    x, w = torch.empty(tokens, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
    return fake((x, w, None, exact), machine)


def matmul(tokens: int, k: int = 64, groups: int = 1, n: int = 96) -> Any:
    x, w = torch.empty(tokens, groups, k, dtype=torch.half), torch.empty(groups, k, n, dtype=torch.half)
    return fake((x, w), HOPPER)


def names(op: str, args: Any) -> str:
    """Who serves, by the quick choice and the one with reasons."""
    selection = choose(op, args)
    assert serving(op, args) is selection.chosen
    assert all(reason for _, reason in selection.passed_over)
    return selection.chosen.name


def test_a_line_decides_the_calls_that_it_speaks_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_by(monkeypatch, tmp_path / "t.json", PLAIN, PLAIN | {"row": "triton", "takes": {"tokens": [1, 9]}})
    assert names("fused_linear", linear(2)) == "reference"
    assert choose("fused_linear", linear(2)).passed_over == (
        ("triton", "the GPU's table chooses reference"),
        ("blocks", "takes tokens of 3..16, got 2"),
    )
    assert names("fused_linear", linear(2, 65)) == names("fused_linear", linear(1)) == "triton"
    assert names("fused_linear", linear(2, machine=None)) == "reference", "the CPU has no table"


def test_the_first_line_that_speaks_of_a_call_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_by(monkeypatch, tmp_path / "t.json", PLAIN | {"row": "triton"}, PLAIN)
    assert names("fused_linear", linear(2)) == "triton"


def test_a_line_whose_row_does_not_take_the_call_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_by(monkeypatch, tmp_path / "t.json", PLAIN | {"row": "triton", "takes": {}})
    assert names("fused_linear", linear(3)) == "blocks", "the kernel takes two tokens at most"
    double = tuple(x.double() if isinstance(x, torch.Tensor) else x for x in linear(1))
    assert names("fused_linear", double) == "reference"
    on((7, 5), monkeypatch)
    assert names("fused_linear", linear(1)) == "reference", "it does not run there"


def test_a_batch_invariant_row_is_chosen_by_the_weights_for_every_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_by(monkeypatch, tmp_path / "t.json", EXACT, EXACT | {"takes": {"groups": [2, None]}})
    for tokens in (1, 2, 7, 64, 600):
        assert names("batch_invariant_matmul", matmul(tokens)) == "triton"
        assert names("batch_invariant_matmul", matmul(tokens, 128)) == "cublas"
        assert names("batch_invariant_matmul", matmul(tokens, 128, groups=16)) == "triton"
        assert names("fused_linear", linear(tokens, exact=True)) == "each_matmul"


def test_lines_of_calls_that_need_not_be_batch_invariant_are_not_for_those_that_must(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_by(monkeypatch, tmp_path / "t.json", PLAIN | {"takes": {}})
    assert names("fused_linear", linear(1)) == "reference"
    assert names("fused_linear", linear(1, exact=True)) == "each_matmul"


def test_a_symbolic_size_is_in_no_range_and_gets_no_guard() -> None:
    table = Tuned("", "", "", (tuned.Line("op", True, {"k": range(9)}, "a row"),))
    assert table.row_of("op", True, {"k": 8, "n": 3}) == "a row"
    assert table.row_of("op", True, {"k": torch.SymInt(None)}) is None
    assert table.row_of("op", True, {}) is table.row_of("other", True, {"k": 8}) is None


def test_candidates_are_the_rows_that_may_be_fastest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serve_by(monkeypatch, tmp_path / "t.json", PLAIN, EXACT)

    def found(op: str, args: Any) -> list[str]:
        return [row.name for row in candidates(op, args)]

    assert found("fused_linear", linear(2)) == ["triton", "reference"], "whatever a table says"
    assert found("fused_linear", linear(3)) == ["blocks", "reference"]
    assert found("batch_invariant_matmul", matmul(3)) == ["cublas", "triton"]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_table_of_the_package_is_sound_and_has_the_name_of_its_gpu(file: Path) -> None:
    table = read(file)
    assert tuned.file_name(table.gpu) == file.name
    assert {line.op for line in table.lines} <= tuned.tunable.keys()


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    lines = (PLAIN, EXACT, PLAIN | {"takes": {"tokens": [3, 9], "columns": [8193, None]}})
    table = read(written(tmp_path / "a.json", *lines))
    (tmp_path / "b.json").write_text(table.dump())
    assert json.loads(table.dump())["lines"] == list(lines)
    assert read(tmp_path / "b.json").lines == table.lines
    empty = Tuned("", "A GPU", "torch 2", ())
    (tmp_path / "c.json").write_text(empty.dump())
    assert read(tmp_path / "c.json").lines == ()


WRONG = {
    "none of its keys": ({}, "lines[0]: expected an object with op, batch_invariant, takes, row, got none"),
    "no object": ("fast", "lines[0]: expected an object with op, batch_invariant, takes, row, got str"),
    "a key too many": (PLAIN | {"us": 3}, "lines[0]: expected an object with op, "),
    "a flag that is a number": (PLAIN | {"batch_invariant": 1}, "lines[0].batch_invariant: expected a bool"),
    "another op": (PLAIN | {"op": "mla_decode"}, "lines[0].op: expected one of "),
    "no row": (
        PLAIN | {"row": "fast"},
        "lines[0].row: expected a row of fused_linear: triton, blocks, reference, ",
    ),
    "a row whose bits depend on the batch": (
        PLAIN | {"batch_invariant": True, "takes": {}},
        "lines[0].row: expected a batch-invariant row of fused_linear: each_matmul, got 'reference'",
    ),
    "a choice by tokens where bits count": (
        EXACT | {"takes": {"tokens": 1}},
        "lines[0].takes: expected facts of the weights, as bits may not depend on the batch: groups, k, n, got",
    ),
    "an op that is always batch-invariant": (
        EXACT | {"batch_invariant": False},
        "lines[0].batch_invariant: expected true, as all calls of batch_invariant_matmul are so, got false",
    ),
    "no fact": (PLAIN | {"takes": {"n": 3}}, "lines[0].takes: expected facts: k, columns, tokens, got 'n'"),
    **{
        f"the range {taken!r}": (PLAIN | {"takes": {"k": taken}}, "lines[0].takes['k']: expected a size, or ")
        for taken in (0, -1, True, 1.0, "4", None, [], [1], [1, 2, 3], [3, 2], [None, 3], [0, 3], {})
    },
}


@pytest.mark.parametrize(("line", "message"), WRONG.values(), ids=WRONG)
def test_a_line_that_says_what_no_table_may_say_is_named(line: object, message: str, tmp_path: Path) -> None:
    file = written(tmp_path / "t.json", line)
    with pytest.raises(MLAError) as error:
        read(file)
    assert str(error.value).startswith(f"{file}: {message}")
    assert str(error.value).endswith("; write it anew with `mla-compile tune`")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a table that `mla-compile tune` wrote, got Expecting"),
        ("[" * 100_000, "expected a table that `mla-compile tune` wrote, got "),
        ("\udcff", "expected a table that `mla-compile tune` wrote, got 'utf-8' codec"),
        ("[]", "expected an object with gpu, versions, lines, got list"),
        ('{"gpu": 3, "versions": "", "lines": []}', "expected a str, got int"),
        (None, "expected a table that `mla-compile tune` wrote, got No such file or directory"),
    ],
    ids=["cut off", "nested", "no text", "a list", "a number", "no file"],
)
def test_a_file_that_is_no_table_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(MLAError) as error:
        read(file)
    assert message in str(error.value) and str(error.value).startswith(str(file))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A GPU of which the driver says "NVIDIA H200", though none is here."""
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "NVIDIA H200" if device.type == "cuda" else None)
    tuned.table_of.cache_clear()
    yield torch.device("cuda:0")
    tuned.table_of.cache_clear()


def test_a_gpu_has_the_packages_table_of_its_name(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tuned.table_of(gpu)
    assert table is not None and (table.gpu, Path(table.file)) == ("NVIDIA H200", SHIPPED[0])
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "NVIDIA GPU that nobody has measured")
    tuned.table_of.cache_clear()
    assert tuned.table_of(gpu) is None


def test_the_environment_names_another_table(
    gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuned.VARIABLE, str(written(tmp_path / "mine.json", EXACT, gpu="NVIDIA H200")))
    table = tuned.table_of(gpu)
    assert table is not None and [line.row for line in table.lines] == ["triton"]
    assert tuned.table_of(torch.device("cpu")) is None


def test_a_table_of_another_gpu_is_refused(
    gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "mine.json")
    monkeypatch.setenv(tuned.VARIABLE, str(file))
    with pytest.raises(MLAError) as error:
        tuned.table_of(gpu)
    assert str(error.value) == (
        f"{file}: gpu: expected the GPU of this machine, 'NVIDIA H200', got 'A GPU'; "
        "write it anew with `mla-compile tune`"
    )


def test_an_engine_is_not_made_with_a_wrong_table(
    gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "gpu_name", lambda device: "A GPU")
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(MLAError, match=r"none\.json: expected a table that `mla-compile tune` wrote"):
        Engine(one_layer_model(), compile=False)
