"""`mla-compile env`."""

import platform

import pytest
import torch

import mla_compile
from mla_compile.cli import environment


def rows(text):
    return {line[:14].strip(): line[15:] for line in text.partition("\n\n")[0].splitlines()}


def test_env_names_versions_and_devices(run):
    result = run("env")
    assert (result.exit_code, result.stderr) == (0, "")
    found = rows(result.stdout)
    assert found["mla_compile"] == mla_compile.__version__
    assert found["torch"] == torch.__version__
    assert platform.python_version() in found["python"]
    assert found["devices"].startswith("cpu (")
    assert found.keys() >= {"triton", "transformers", "C++ compiler", "CUDA graphs"}


def test_env_says_which_backends_work_and_why_others_do_not(run, monkeypatch):
    broken = environment.AttentionBackend("broken", "a test's", lambda: "needs a GPU")
    monkeypatch.setattr(environment, "ATTENTION_BACKENDS", (*environment.ATTENTION_BACKENDS, broken))
    table = run("env").stdout.partition("attention backends\n")[2].splitlines()
    triton, *others = (
        line.split(maxsplit=1) for line in sorted(table, key=lambda line: "triton" not in line)
    )
    assert triton[1].startswith("works" if torch.cuda.is_available() else "does not work here: ")
    assert others == [
        ["reference", "works (plain torch, any device)"],
        ["broken", "does not work here: needs a GPU (a test's)"],
    ]


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
