"""On a CUDA device: `mla-compile tune` writes a table, and another process is served by it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_compile.ops.tuned import VARIABLE, read
from tests.models.small import v3_config

pytestmark = [pytest.mark.gpu, pytest.mark.long]
ROOT = Path(__file__).parents[1]
COMMAND = "from mla_compile.cli import main; main()"
WHO_SERVES = """
import torch
from mla_compile.ops.library import choose, serving
from mla_compile.ops import fused_linear
x, w = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 96))
print(serving("fused_linear", (x, w, None, False)).name, choose("fused_linear", (x, w, None, False)).chosen.name)
torch.testing.assert_close(fused_linear(x, w), x @ w.T, atol=0.1, rtol=0.02)
"""


def said(code: str, *args: object, **environment: object) -> str:
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    env |= {name: str(value) for name, value in environment.items()}
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_table_that_was_measured_serves_another_process(tmp_path: Path) -> None:
    v3_config(hidden_size=64).save_pretrained(tmp_path)
    file = tmp_path / "tuned.json"
    report = said(COMMAND, "tune", tmp_path, "--tokens", "1,8", "--output", file)
    print(report)
    assert (
        "batch_invariant_matmul groups 4, k 16, n 32" in report and "fused_linear k 64, columns 97" in report
    )
    assert report.count("*") == 1 + report.count(" tokens "), "one row of each line of times serves"
    table = read(file)

    environment = said(COMMAND, "env", **{VARIABLE: file})
    print(environment)
    assert f"tuned table {file} (measured by {table.versions}) " in " ".join(environment.split())
    assert said(WHO_SERVES) == "triton triton\n", "no line of the package's table speaks of one token"
    line = {
        "op": "fused_linear",
        "batch_invariant": False,
        "takes": {"tokens": 1, "k": 64},
        "row": "reference",
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lines": [line]}))
    assert said(WHO_SERVES, **{VARIABLE: file}) == "reference reference\n"
