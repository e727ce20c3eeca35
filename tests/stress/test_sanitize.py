"""Every kernel has tests to run under compute-sanitizer, and what the tool prints is read."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from stress import sanitize
from stress.sanitize import EXPLAINED, GROUPS, ROOT, Result, kernels_of_package, reports_in, summary

LOG = """\
========= COMPUTE-SANITIZER
========= Invalid __shared__ read of size 16 bytes
=========     at split_kernel+0x1e40 in softmax.py:88
=========     by thread (12,0,0) in block (0,0,0)
=========     Address 0x1c010 is out of bounds
=========         Device Frame: split_kernel+0x30 in decode.py:80
=========
========= Invalid __shared__ read of size 16 bytes
=========     at split_kernel+0x1e40 in softmax.py:88
=========     by thread (13,0,0) in block (0,0,0)
========= Error: Race reported between Write access at combine_kernel+0x120 in softmax.py:150
=========     and Read access at combine_kernel+0x230 in softmax.py:160 [64 hazards]
=========     and Read access at combine_kernel+0x270 in softmax.py:163 [9 hazards]
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vectorized_elementwise_kernel<int>(int)+0x30
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching split_kernel
========= ERROR SUMMARY: 5 errors
========= ERROR SUMMARY: 1234 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""


def test_every_kernel_has_tests() -> None:
    listed = {kernel for group in GROUPS.values() for kernel in group.kernels}
    assert listed == kernels_of_package().keys() and len(listed) > 40


@pytest.mark.long
def test_the_tests_exist() -> None:
    tests = [test for group in GROUPS.values() for test in group.tests]
    line = [sys.executable, "-m", "pytest", "-q", "--collect-only", *tests]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert f"{len(set(tests))} tests collected" in done.stdout, done.stdout + done.stderr


def test_reports_of_the_package_are_counted_once_for_each_place() -> None:
    found = reports_in(LOG, {"split_kernel", "combine_kernel"})
    race = "Error: Race reported between Write access at combine_kernel+... in softmax.py:150"
    assert found == {
        ("split_kernel", "Invalid __shared__ read of size 16 bytes (softmax.py:88)"): 2,
        ("combine_kernel", f"{race} (softmax.py:160)"): 1,
        ("combine_kernel", f"{race} (softmax.py:163)"): 1,
        (
            "",
            "Internal Sanitizer Error: The Sanitizer encountered an error while launching split_kernel",
        ): 1,
        (
            "",
            "Too many reports: errors were not printed. "
            "Use --print-limit option to adjust the number of printed errors",
        ): 1,
    }


def test_a_kernel_counts_where_one_of_its_tests_passes() -> None:
    (line,) = (line for _, kernel, line in EXPLAINED if kernel == "weighted_sum_kernel")
    report = f"Uninitialized __global__ memory read of size 4 bytes ({line}"
    reports = Counter({("split_kernel", "Invalid"): 2, ("weighted_sum_kernel", report): 1})
    rows = [
        Result("a", "initcheck", "passed", 3, {"decode.split_kernel"}, reports),
        Result("b", "initcheck", "failed", 4, {"decode.split_kernel"}, Counter()),
        Result("c", "initcheck", "unfinished", 9, {"wide.wide_kernel"}, Counter()),
        Result("d", "initcheck", "skipped", 2, {"wide.wide_kernel"}, Counter()),
    ]
    found = summary([row.row() for row in rows])
    assert found["kernels"] == ["decode.split_kernel"] and "wide.wide_kernel" in found["missing"]
    assert found["tests"] == 1 and found["not passed"] == {"b": "failed, 4 s", "c": "unfinished, 9 s"}
    unexplained, explained = found["reports"]
    assert unexplained == {"kernel": "split_kernel", "report": "Invalid", "count": 2, "explained": ""}
    assert "padding" in explained["explained"]


def test_explanations_are_of_lines_that_the_files_have() -> None:
    """An edit above such a line moves it: its report is unexplained until it is looked at again."""
    files = {path.name: path for path in (ROOT / "mla_compile").rglob("kernels/**/*.py")}
    for tool, kernel, part in EXPLAINED:
        assert tool in sanitize.TOOLS
        assert not kernel or kernel in {name.partition(".")[2] for name in kernels_of_package()}
        for name, line in re.findall(r"(\w+\.py):(\d+)", part):
            assert int(line) <= len(files[name].read_text(encoding="utf-8").splitlines())


PROGRAM = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
if "--help" in words:
    print("{sanitize.SEES_ALL_WRITES} arg (=yes)")
elif "--version" in words:
    print("Version 2026.4.0.0")
else:
    at = words.index({sys.executable!r})
    log = words[words.index("--log-file") + 1]
    open(log, "w").write("Internal Sanitizer Error: broken" if "racecheck" in words else " ".join(words[:at]))
    if "racecheck" in words:
        sys.exit(1)
    os.execv(words[at], words[at:])
"""
"""Runs tests as compute-sanitizer does, without its checks; its racecheck fails."""


@pytest.mark.long
def test_a_tool_that_fails_in_one_test_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sanitizer"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    tests = "test_every_kernel_has_tests", "test_no_such_test"
    group = sanitize.Group(
        ("decode.split_kernel",), tuple(f"tests/stress/test_sanitize.py::{x}" for x in tests)
    )
    monkeypatch.setattr(sanitize, "GROUPS", {"a group": group})
    words = ["--tools", "initcheck", "racecheck", "--sanitizer", program, "--folder", tmp_path, "--jobs", "2"]
    output = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["sanitize", *map(str, words), "--output", str(output)])
    with pytest.raises(SystemExit, match="True"):
        sanitize.main()
    results = json.loads(output.read_text())["results"]
    assert {one["sanitizer"] for one in results} == {"compute-sanitizer 2026.4.0.0"}
    found = sanitize.summaries(results)
    initcheck, racecheck = found["initcheck"], found["racecheck"]
    assert initcheck["tests"] == 1 and racecheck["tests"] == 0
    assert [name.partition("::")[2] for name in initcheck["not passed"]] == ["test_no_such_test"]
    assert len(racecheck["not passed"]) == 2 and racecheck["reports"][0]["count"] == 2
    output.write_text(json.dumps({"results": [*results, results[0] | {"test": "of no group"}]}))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--tools", "racecheck"])
    with pytest.raises(SystemExit, match="True"):
        sanitize.main()
    again = json.loads(output.read_text())["results"]
    assert len(again) == len(results) and sanitize.summaries(again) == found
    assert "--kernel-name kne=split_kernel" in (tmp_path / "a_group_0.initcheck.report").read_text()
