"""The runner of the stress commands: it continues where it stopped, and a failure is made small and can be repeated."""

import json
from pathlib import Path
from typing import Any

import pytest

from stress import ops
from stress.runner import Draw, Failure, attempt, command, reduced, report, run


def sums(draw: Draw) -> str:
    values = [draw.randrange(100) for _ in range(draw.randrange(20))]
    draw.note("values", values)
    assert sum(values) < 300, f"{sum(values)}"
    return "many" if len(values) > 5 else "few"


def go(path: Path | None, case: Any = lambda draw: f"kind {draw.randrange(2)}", **given: Any) -> int:
    settings = {"cases": 30, "seed": 0, "seconds": 60.0, "device": "cpu", "most": 3}
    return run("stress.sums", case, output=path, **(settings | given))


def test_the_same_command_continues_after_the_last_seed(tmp_path: Path) -> None:
    path, whole = tmp_path / "in/parts.json", tmp_path / "whole.json"
    assert go(path, cases=10) == go(path, seconds=0.0) == go(path, cases=17) == go(path) == go(whole) == 0
    (parts,), (at_once,) = (json.loads(each.read_text())["ranges"] for each in (path, whole))
    assert (parts["first"], parts["end"]) == (0, 30) and sum(parts["counts"].values()) == 30
    assert parts["counts"] == at_once["counts"]
    assert go(path) == 0
    assert json.loads(path.read_text())["ranges"][0]["end"] == 30


def test_a_failure_is_made_smaller_and_its_record_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    seed = next(seed for seed in range(100) if isinstance(attempt(sums, Draw(seed)), Failure))
    failure = attempt(sums, Draw(seed))
    assert isinstance(failure, Failure)
    small = reduced(sums, failure)
    assert small.error.startswith("AssertionError: 300")
    again = attempt(sums, Draw(record=small.draw.taken))
    assert isinstance(again, Failure) and again.error == small.error
    text = report("stress.sums", seed, small)
    assert f"--case {seed}" in text and "values [" in text and "--record " in text
    assert len(small.draw.taken) <= 7 < len(failure.draw.taken)  # a length, and values of up to 99


def test_failures_are_counted_and_end_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(tmp_path / "x.json", sums, cases=1000) == 3
    (found,) = json.loads((tmp_path / "x.json").read_text())["ranges"]
    assert len(found["failures"]) == 3 and found["end"] == found["failures"][-1]["seed"] + 1 < 1000
    assert capsys.readouterr().out.count("again: python -m stress.sums --case ") == 3


@pytest.mark.parametrize(("device", "repeats"), [(None, True), ("aarch64 CPU", True), ("NVIDIA H200", False)])
def test_a_later_run_repeats_what_failed_on_such_a_device(
    device: str | None, repeats: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x.json"
    assert go(path, sums, cases=1000, most=2) == 2
    known = json.loads(path.read_text())
    known["ranges"][0]["device"] = device or known["ranges"][0]["device"]
    path.write_text(json.dumps(known))
    assert go(path, lambda draw: "fixed" if draw.random() < 2 else "", cases=10) == 0
    found = json.loads(path.read_text())["ranges"][0]
    assert ["fixed" in failure for failure in found["failures"]] == [repeats, repeats]


@pytest.mark.long
def test_jobs_run_disjoint_ranges_that_become_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    for cases in ("20", "60"):
        line = ["x", "--jobs", "2", "--cases", cases, "--output", str(path)]
        monkeypatch.setattr("sys.argv", line)
        with pytest.raises(SystemExit, match="False"):
            ops.main()
    (found,) = json.loads(path.read_text())["ranges"]
    assert (found["first"], found["end"], found["failures"]) == (0, 60, [])
    assert sum(found["counts"].values()) == 60 and "60 of 60: all" in capsys.readouterr().out


def test_cases_of_a_block_share_what_its_draw_gives() -> None:
    def of(seed: int, name: str, record: list[int] | None = None) -> tuple[int, int, list[int]]:
        draw = Draw(seed, record)
        draw.share(100, name)
        return draw.block.randrange(2**40), draw.randrange(2**40), draw.taken

    first, second, other, op = of(100, "a"), of(199, "a"), of(200, "a"), of(199, "b")
    assert first[0] == second[0] != other[0] and second[0] != op[0]
    assert first[1] != second[1] == op[1]
    assert of(0, "a", second[2])[:2] == second[:2]


def test_a_case_that_hangs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stress.runner.SECONDS_PER_CASE", 1)

    def hangs(draw: Draw) -> str:
        while True:
            draw.taken.clear()

    found = attempt(hangs, Draw())
    assert isinstance(found, Failure) and found.kind.startswith("TimeoutError")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--record 1,2,foo", "--record: invalid list of choices value: '1,2,foo'"),
        ("--cases -3", "--cases: invalid number of cases value: '-3'"),
    ],
)
def test_a_bad_flag_is_named(
    flags: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sums", *flags.split()])
    with pytest.raises(SystemExit):
        command("sums", lambda args: sums)
    assert why in capsys.readouterr().err
