"""`mla-compile env`."""

import importlib
import os
import pkgutil
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mla_compile
from mla_compile.cli.machine import defaults_here
from mla_compile.ops import library
from mla_compile.ops.attention.decode_backends import DECODE_BACKENDS
from tests.kernel_cases import BACKENDS

ROOT = Path(__file__).parents[2]


def facts(text):
    """The values of the two parts, by name, each on one line; "not used" may come twice."""
    text = text.replace("\n" + " " * 18, " ")
    return {line[2:18].strip(): line[18:] for line in text.splitlines() if line.startswith("  ")}


def implementations(text):
    """The text that `env --verbose` prints, by op and implementation."""
    text = text[text.index("\nops on ") :].partition("fastest first\n")[2].replace("\n" + " " * 24, " ")
    found = {}
    for line in text.splitlines():
        if line[0] != " ":
            op = line
        else:
            found[op, line[2:24].strip()] = line[24:]
    return found


def test_defaults_are_those_of_the_device(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    here = facts(run("env").stdout)
    assert (here["dtype"], here["page size"], here["rows"]) == ("float32", "16 tokens", "8")
    assert here["max_model_len"].endswith(" GB less weights")
    on_gpu = defaults_here(torch.device("cuda"), 80 * 10**9)
    assert (on_gpu["dtype"], on_gpu["page size"]) == ("bfloat16", "64 tokens")
    assert on_gpu["max_model_len"].endswith("fit in 50% of 80.0 GB less weights and 3.2 GB")


def fits_a_terminal(result):
    return all(len(line) <= 80 for line in result.stdout.splitlines())


def test_env_begins_with_what_runs_models_here(run):
    result = run("env")
    assert (result.exit_code, result.stderr) == (0, "")
    assert fits_a_terminal(result) and len(result.stdout.splitlines()) <= 25
    assert "does not work" not in result.stdout
    first, versions, hint = result.stdout.split("\n\n")
    found = facts(first)
    assert [*found][:6] == ["device", "steps", "CUDA graphs", "decode backend", "dtype", "page size"]
    assert "--verbose" in hint
    if not torch.cuda.is_available():
        assert found["device"].startswith(f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} thread")
        assert found["CUDA graphs"].startswith("none: ")
        assert found["decode backend"] == "reference"
        assert "not used" not in found, "kernels of GPUs are no news on a CPU"
    found = facts(versions)
    assert found["mla-compile"] == mla_compile.__version__
    assert found["torch"] == torch.__version__
    assert platform.python_version() in found["python"]
    assert found.keys() >= {"triton", "transformers", "C++ compiler"}


def test_env_names_what_keeps_this_machine_from_faster_candidates(run, monkeypatch):
    lacking = replace(BACKENDS["by_token"], name="newer", packages=("no_such_package",))
    others = [replace(lacking, name=f"newer_{i}") for i in range(4)]
    elsewhere = replace(lacking, name="elsewhere", device_types=("xpu",))
    on_host = replace(lacking, name="on_host", capturable=False)
    table = (lacking, *others, elsewhere, on_host, *DECODE_BACKENDS)
    monkeypatch.setitem(library.tables, "mla_decode", table)
    assert facts(run("env").stdout)["not used"] == (
        "newer of mla_decode, newer_0 of mla_decode, newer_1 of mla_decode and 2 more: "
        "needs the Python package no_such_package, which is not installed"
    )


def test_verbose_gives_each_implementations_limits_and_why_it_does_not_work(run, monkeypatch):
    newer = replace(BACKENDS["by_token"], name="newer", packages=("no_such_package",))
    monkeypatch.setitem(library.tables, "mla_decode", (newer, *DECODE_BACKENDS))
    result = run("env", "--verbose")
    assert fits_a_terminal(result)
    found = implementations(result.stdout)
    assert list(found) == [
        (op, candidate.name) for op, table in library.tables.items() for candidate in table
    ]
    dtypes = ". Requires dtype: float16, bfloat16, float32, float64"
    lacking = "does not work: needs the Python package no_such_package, which is not installed"
    assert found["mla_decode", "newer"] == f"batch-invariant; {lacking}{dtypes}"
    assert found["mla_decode", "by_token"] == f"batch-invariant; works{dtypes}"
    assert found["mla_decode", "reference"] == f"works{dtypes}"
    uniform = "not captured; query tokens: the same number in every row; "
    assert found["mla_decode", "flashinfer"].startswith(uniform)
    assert found["mla_append", "reference"] == "works", "this op has no batch-invariant choice"
    assert found["mla_prefill", "by_token"] == "batch-invariant; works"
    widths = "qk_head_dim: 8..256 by 8; v_head_dim: 8..256 by 8"
    assert found["mla_prefill", "flash_attn"].endswith(f"Requires dtype: float16, bfloat16; {widths}")
    absorbed = found["mla_prefill", "absorbed"].partition("Requires ")[2].split("; ")
    assert [limit.partition(": ")[0] for limit in absorbed[:3]] == ["dtype", "tokens", "keys per token"]
    assert absorbed[2].endswith(" or more")
    assert absorbed[3:] == ["kv_lora_rank: 1..512", "qk_rope_head_dim: 1..128"]
    if not torch.cuda.is_available():
        kernels = [text for (op, name), text in found.items() if name not in SERVES_ANYWHERE]
        assert kernels and all("does not work: " in text for text in kernels)
        assert "does not work: runs on cuda, not cpu" in found["mla_decode", "triton"]


SERVES_ANYWHERE = {
    candidate.name
    for table in library.tables.values()
    for candidate in table
    if candidate.device_types is None
}


def test_every_op_that_env_prints_comes_with_the_package():
    """The table does not depend on other imports."""
    ops = "(op for op, table in tables.items() if table)"
    code = f"import mla_compile.ops; from mla_compile.ops.library import tables; print(*{ops})"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for module in pkgutil.walk_packages(mla_compile.ops.__path__, "mla_compile.ops."):
        # What needs Triton declares no ops.
        if ".kernels" not in module.name and module.name != "mla_compile.ops.dependent_launch":
            importlib.import_module(module.name)
    assert {*alone.stdout.split()} == {op for op, table in library.tables.items() if table}


def test_version_is_the_packages(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mla-compile {mla_compile.__version__}\n")


@pytest.mark.parametrize("lacking", ["compiler", "headers"])
def test_env_prints_what_the_cpu_compiler_lacks_and_a_hint(run, monkeypatch, lacking):
    if lacking == "compiler":
        monkeypatch.setattr("mla_compile.cli.machine.cpp_compiler", lambda: None)
    else:
        monkeypatch.setattr("mla_compile.cli.machine.sysconfig.get_path", lambda name: "/nowhere")
    found = facts(run("env").stdout)
    assert ": install" in found["C++ compiler"]
    if not torch.cuda.is_available():
        assert found["steps"] == f"not compiled: {found['C++ compiler']}"
