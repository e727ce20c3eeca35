"""The first seconds: what needs no model comes at once, imports nothing heavy, and can be interrupted."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mla_compile
from mla_compile.cli import machine

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
COMMAND = [sys.executable, "-c", "from mla_compile.cli import main; main()"]
HEAVY = ("torch", "transformers", "numpy", "safetensors")
GOOD = '{"prompt": "hello"}\n'
NUM_INTERRUPTS = int(os.environ.get("MLA_INTERRUPTS", "2"))
ROOT = Path(mla_compile.__file__).parents[1]

IMPORTS = f"""
import json, sys
from mla_compile.cli import main
codes = []
for args in json.loads(sys.argv[1]):
    sys.argv = ["mla-compile", *args]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps([codes, [name for name in {HEAVY} if name in sys.modules]]))
"""


READY = "from mla_compile.cli import main; print(flush=True); main()"


def command(*args: object, **settings) -> subprocess.CompletedProcess[str]:
    argv = [*COMMAND, *map(str, args)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, **settings)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["generate", "serve"])
def test_on_a_busy_machine_threads_sleep_while_they_wait(name):
    """`OMP_DISPLAY_ENV` has torch's OpenMP library print its settings when torch is imported."""
    mine = {key: value for key, value in os.environ.items() if key not in WAITING} | {
        "OMP_DISPLAY_ENV": "true"
    }
    no_checkpoint = [name, "--model", ROOT, *(["--prompt", "a"] if name == "generate" else [])]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        result = command(*no_checkpoint, env=mine)
        busy.kill()
    assert result.returncode == 2 and "OMP_WAIT_POLICY = 'PASSIVE'" in result.stderr


@pytest.mark.parametrize(
    ("others", "given", "expected"),
    [
        (0.0, {}, {}),
        (0.4, {}, {}),
        (0.5, {}, {"OMP_WAIT_POLICY": "passive"}),
        (9.0, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        (9.0, {"GOMP_SPINCOUNT": "70"}, {"GOMP_SPINCOUNT": "70"}),
    ],
)
def test_threads_wait_as_the_user_says_and_on_free_cores_as_by_default(monkeypatch, others, given, expected):
    for key in WAITING:
        monkeypatch.setenv(key, given.get(key, ""))  # so that the end of the test restores it
        if key not in given:
            monkeypatch.delenv(key)
    monkeypatch.setattr(machine, "_num_others_running", lambda: others)
    machine.share_cores()
    assert {key: os.environ[key] for key in WAITING if key in os.environ} == given, "torch has been imported"
    monkeypatch.delitem(sys.modules, "torch")
    machine.share_cores()
    assert {key: os.environ[key] for key in WAITING if key in os.environ} == expected


@pytest.fixture
def mistakes(tmp_path) -> list[list[str]]:
    """Each is found before a model is needed."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "max_tokens": "many"}\n')
    generate = ["generate", "--prompt", "a"]
    return [
        [],
        ["frobnicate"],
        ["--frobnicate"],
        ["generate"],
        ["generate", "--prompt"],
        [*generate, "--max-new-tokens", "x"],
        [*generate, "--num-speculative-tokens", "99"],
        [*generate, "--temperature", "-1"],
        [*generate, "--dtype", "int4"],
        [*generate, "--input", str(prompts)],
        [*generate, "--model", str(tmp_path / "none")],
        [*generate, "--output", str(tmp_path / "none" / "out.jsonl")],
        [*generate, "--regex", "a", "--grammar", "b"],
        [*generate, "--json-schema", str(tmp_path / "none.json")],
        ["generate", "--input", str(prompts)],
        ["generate", "--input", str(tmp_path / "none.jsonl")],
        ["inspect", "--rows", "x"],
        ["inspect", "--step", "--prefill-tokens", "3"],
        ["inspect", "--output", "picture.png"],
        ["demo", "--max-new-tokens", "1"],
        ["demo", "--model", str(tmp_path / "none")],
        ["env", "--all"],
    ]


def test_help_the_version_and_mistakes_in_flags_import_nothing_heavy(mistakes):
    helps = [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in ("generate", "inspect", "env", "demo")),
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps([*helps, *mistakes])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    codes, imported = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0] * len(helps) + [2] * len(mistakes), done.stderr
    assert not imported, f"import {imported} in the modules of what commands do, not of their flags"
    assert done.stderr.count("\n") == len(mistakes), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("args", [["--help"], ["generate", "--prompt", "a", "--seed", "x"]])
def test_they_come_at_once(args):
    times = []
    for _ in range(3):
        start = time.perf_counter()
        command(*args)
        times.append(time.perf_counter() - start)
    assert min(times) < 5, "it takes 0.3 s where nothing else runs"


@pytest.mark.long
def test_an_interrupt_at_any_time_is_one_line_and_130(checkpoint, tmp_path):
    """While it starts, imports, loads, compiles or completes; never lost, never a traceback."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(GOOD * 200)
    output = tmp_path / "out.jsonl"
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    seen = []
    for seed in range(NUM_INTERRUPTS):
        rng = random.Random(seed)
        args = [
            "generate",
            "--model",
            checkpoint,
            "--max-new-tokens",
            200,
            "--input",
            prompts,
            "--output",
            output,
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", READY, *map(str, args)],
            cwd=ROOT,
            env=os.environ | cache,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "\n"
        delay = rng.choice(
            [rng.uniform(0, 0.3), rng.uniform(0, 4), rng.uniform(2, 7) if seed < 3 else rng.uniform(4, 20)]
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        sent = time.perf_counter()
        stdout, stderr = process.communicate(timeout=60)
        seen.append((delay, process.returncode, stdout, stderr, time.perf_counter() - sent))
        *before, last = stderr.splitlines()
        assert (process.returncode, stdout, last) == (130, "", "mla-compile: interrupted"), seen[-1]
        assert all(line.endswith(" ...") for line in before), seen[-1]
        assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["prompts.jsonl"], seen[-1]


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["env"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line(args):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *args], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    *before, last = done.stderr.splitlines()
    assert done.returncode == 2
    assert last.endswith("standard output: No space left on device")
    assert all(line.endswith(" ...") for line in before)


def test_a_closed_pipe_ends_it_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, "--help"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


GENERATE = "generate --prompt hi --no-compile --max-new-tokens 1"


@pytest.mark.parametrize(
    "args", ["--version >&-", "--version 2>&-", pytest.param(f"{GENERATE} >&-", marks=pytest.mark.long)]
)
def test_closed_streams_are_no_traceback(args):
    done = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {args}', COMMAND[0], COMMAND[2]],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert all(line.endswith(" ...") for line in done.stderr.splitlines())
