"""`mla-compile env`."""

import importlib
import pkgutil
import platform
import re
from dataclasses import replace

import pytest
import torch

import mla_compile
from mla_compile.cli import environment
from mla_compile.ops import library
from mla_compile.ops.backends import DECODE_BACKENDS
from tests.kernel_cases import BACKENDS


def rows(text):
    return {line[:14].strip(): line[15:] for line in text.partition("\n\n")[0].splitlines()}


def row_of(op, lines):
    """The first line of an op's implementations."""
    return next(line for line in lines if line[0] == op)


def test_env_names_versions_and_devices(run):
    result = run("env")
    assert (result.exit_code, result.stderr) == (0, "")
    found = rows(result.stdout)
    assert found["mla_compile"] == mla_compile.__version__
    assert found["torch"] == torch.__version__
    assert platform.python_version() in found["python"]
    assert found["devices"].startswith("cpu (")
    assert found.keys() >= {"triton", "transformers", "C++ compiler", "CUDA graphs"}


def test_env_prints_the_table_of_decode_backends(run, monkeypatch):
    newer = replace(BACKENDS["by_token"], name="newer", packages=("no_such_package",))
    monkeypatch.setattr(environment, "DECODE_BACKENDS", (newer, *DECODE_BACKENDS))
    text = run("env").stdout.partition("decode backends, fastest first\n")[2]
    header, *lines = text.partition("\n\n")[0].splitlines()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert re.split(r"  +", header.strip()) == [
        "name",
        "query tokens",
        "captured",
        "batch-invariant",
        "kv_lora_rank + qk_rope_head_dim",
        "dtypes",
        f"on {device}",
    ]
    table = {name: cells for name, *cells in (re.split(r"  +", line.strip()) for line in lines)}
    assert list(table) == ["newer", *(backend.name for backend in DECODE_BACKENDS)]
    lacking = "does not work: needs the Python package no_such_package, which is not installed"
    dtypes = "float16, bfloat16, float32, float64"
    assert table["newer"] == ["VARLEN", "yes", "yes", "any + any", dtypes, lacking]
    assert table["by_token"] == ["VARLEN", "yes", "yes", "any + any", dtypes, "works"]
    assert table["reference"] == ["VARLEN", "yes", "no", "any + any", dtypes, "works"]
    assert table["flashinfer"][:5] == ["UNIFORM", "no", "no", "512 + 64", "float16, bfloat16"]
    if device == "cpu":
        assert table["triton"][-1] == "does not work: runs on cuda, got cpu"


def test_env_says_of_every_op_who_serves_it_here_and_why_the_faster_ones_do_not(run):
    text = run("env").stdout.partition("implementations of the other ops, fastest first\n")[2]
    header, *lines = (re.split(r"  +", line.strip()) for line in text.splitlines())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert header == ["op", "name", "batch-invariant", f"on {device}", "takes"]
    first = [line[0] for line in lines if len(line) == len(header)]
    assert first == [op for op, table in library.tables.items() if table and op != "mla_decode"]
    everywhere = {row.name for table in library.tables.values() for row in table if row.device_types is None}
    plain = [line for line in lines if line[-4] in everywhere]
    assert len(plain) >= len(first)
    assert all(rest[-2:] == ["works", "all"] for rest in plain)
    kernels = [line for line in lines if line not in plain]
    start = lines.index(row_of("mla_prefill", lines))
    prefill = {line[-4]: (line[-3], line[-1]) for line in lines[start : start + 5]}
    assert {name: invariant for name, (invariant, _) in prefill.items()} == {
        "absorbed": "no",
        "flash_attn": "yes",
        "triton": "yes",
        "reference": "no",
        "by_token": "yes",
    }
    assert row_of("mla_append", lines)[-3] == "-", "it cannot be asked for such a row"
    if device == "cpu":
        assert {row[-2] for row in kernels} == {"does not work: runs on cuda, got cpu"}
    limits = {name: takes for name, (_, takes) in prefill.items()}
    widths = "qk_head_dim: 8..256 by 8; v_head_dim: 8..256 by 8"
    absorbed = limits["absorbed"].split("; ")
    assert [limit.partition(": ")[0] for limit in absorbed[:3]] == ["dtype", "tokens", "keys per token"]
    assert absorbed[2].endswith(" or more")
    assert absorbed[3:] == ["kv_lora_rank: 1..512", "qk_rope_head_dim: 1..128"]
    assert limits["flash_attn"] == f"dtype: float16, bfloat16; {widths}"
    assert limits["triton"] == "dtype: float16, bfloat16, float32; qk_head_dim: 1..384; v_head_dim: 1..256"


def test_every_op_that_env_tells_of_comes_with_the_package():
    """So that the table does not depend on what else has been imported."""
    for module in pkgutil.iter_modules(mla_compile.ops.__path__):
        importlib.import_module(f"mla_compile.ops.{module.name}")
    assert {op for op, table in library.tables.items() if table} <= {*mla_compile.ops.__all__}


def test_version_is_the_packages(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mla-compile {mla_compile.__version__}\n")


@pytest.mark.parametrize("lacking", ["compiler", "headers"])
def test_env_says_what_the_cpu_compiler_lacks_and_how_to_mend_it(run, monkeypatch, lacking):
    if lacking == "compiler":
        monkeypatch.setattr("mla_compile.cli.machine.cpp_compiler", lambda: None)
    else:
        monkeypatch.setattr("mla_compile.cli.machine.sysconfig.get_path", lambda name: "/nowhere")
    found = rows(run("env").stdout)
    assert found["C++ compiler"].startswith("unusable: ") and ": install" in found["C++ compiler"]
