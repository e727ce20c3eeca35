"""Every kernel has tests to run under compute-sanitizer, and what the tool prints is read."""

import subprocess
import sys
from collections import Counter

import pytest

from stress.sanitize import GROUPS, ROOT, Result, kernels_of_package, reports_in, summary

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
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vectorized_elementwise_kernel<int>(int)+0x30
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching split_kernel
========= ERROR SUMMARY: 5 errors
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
    assert found == {
        ("split_kernel", "Invalid __shared__ read of size 16 bytes (softmax.py:88)"): 2,
        (
            "combine_kernel",
            "Error: Race reported between Write access at combine_kernel+... in softmax.py:150 (softmax.py:160)",
        ): 1,
        (
            "",
            "Internal Sanitizer Error: The Sanitizer encountered an error while launching split_kernel",
        ): 1,
    }


def test_a_kernel_counts_where_its_tests_pass() -> None:
    rows = [
        Result(
            "a",
            "memcheck",
            "passed",
            2,
            3,
            {"decode.split_kernel"},
            Counter({("split_kernel", "Invalid"): 2}),
        ),
        Result("b", "memcheck", "unfinished", 1, 9, {"wide.wide_kernel"}, Counter()),
    ]
    found = summary("memcheck", rows)
    assert found["kernels"] == ["decode.split_kernel"] and "wide.wide_kernel" in found["missing"]
    assert found["reports"] == [{"kernel": "split_kernel", "report": "Invalid", "count": 2, "explained": ""}]
