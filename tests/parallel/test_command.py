"""`mla-compile generate --tensor-parallel-size`: its tokens, its errors, and how its processes end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mla_compile import generate
from tests.models.small import v3_config
from tests.parallel.test_parallel import checkpoint
from tests.serving.servers import children, served

COMMAND = [
    sys.executable,
    "-c",
    "from mla_compile.cli import main; main()",
    "generate",
    "--device",
    "cpu",
    "--no-compile",
]
SOON = 30
"""Seconds in which all processes have ended once one has."""
LOST = re.compile(r"\brank (\d) of \d\b.*\brank (\d)")
"""A line of the log that names a lost rank, and the rank that ends with it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), v3_config(vocab_size=96))


def prompts(folder: Path, count: int) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt_token_ids': [1, 5, 6, i]})}\n" for i in range(count)))
    return file


def run(model: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, "--model", str(model), *words],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_its_output_is_that_of_one_process(model: Path, tmp_path: Path) -> None:
    asked = "--input", str(prompts(tmp_path, 3)), "--max-new-tokens", "8"
    alone, shared = run(model, *asked), run(model, *asked, "--tensor-parallel-size", "2", "--expert-parallel")
    assert shared.returncode == 0, shared.stderr
    assert shared.stdout == alone.stdout and shared.stdout.count("token_ids") == 3


def test_a_size_that_does_not_divide_is_one_line(model: Path, tmp_path: Path) -> None:
    done = run(model, "--input", str(prompts(tmp_path, 1)), "--tensor-parallel-size", "3")
    assert done.returncode == 2
    assert re.search(r"--tensor-parallel-size: .*1, 2, 4.*\b3\b.*; .*divide", done.stderr)
    assert "Traceback" not in done.stderr


def test_expert_parallel_for_one_process_is_one_line(model: Path, tmp_path: Path) -> None:
    done = run(model, "--input", str(prompts(tmp_path, 1)), "--expert-parallel")
    *before, last = done.stderr.splitlines()
    assert done.returncode == 2
    assert re.match(r"mla-compile: --expert-parallel: .*\b1\b", last)
    assert all(line.endswith(" ...") for line in before)  # announcements on a slow machine


def is_gone(pid: int) -> bool:
    """Whether a process has ended; its parent may not have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Running:
    """The running command: rank 0, which leads a process group, and the others; waits for `until` in the log."""

    def __init__(self, model: Path, folder: Path, until: str = "completing", size: int = 2) -> None:
        self.log = folder / "stderr.txt"
        words = "--input", str(prompts(folder, 32)), "--max-new-tokens", "4000"
        words += "--output", str(folder / "completions.jsonl")
        words += "--tensor-parallel-size", str(size)
        with self.log.open("w") as log:
            self.rank_0 = subprocess.Popen(
                [*COMMAND, "--model", str(model), *words],
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while until not in self.log.read_text() or len(children(self.rank_0.pid)) < size - 1:
            assert time.monotonic() < deadline and self.rank_0.poll() is None, self.log.read_text()
            time.sleep(0.2)
        time.sleep(1 if until else 0)
        self.others = sorted(children(self.rank_0.pid))
        self.rank_1 = self.others[0]

    def wait_for_end(self, *pids: int) -> None:
        deadline = time.monotonic() + SOON
        while not all(map(is_gone, pids)):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def end(self) -> None:
        for pid in (self.rank_0.pid, *self.others):
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        self.rank_0.wait()


@pytest.fixture
def running(model: Path, tmp_path: Path) -> Iterator[Running]:
    found = Running(model, tmp_path)
    yield found
    found.end()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for processes")
class TestEnds:
    def test_ctrl_c_ends_all_ranks_without_a_traceback(self, running: Running) -> None:
        os.killpg(running.rank_0.pid, signal.SIGINT)
        running.wait_for_end(running.rank_0.pid, running.rank_1)
        assert running.rank_0.wait() == 130
        assert "Traceback" not in running.log.read_text() and not LOST.search(running.log.read_text())

    def test_ctrl_c_while_a_rank_starts_is_no_traceback_either(self, model: Path, tmp_path: Path) -> None:
        running = Running(model, tmp_path, until="")
        os.killpg(running.rank_0.pid, signal.SIGINT)
        running.wait_for_end(running.rank_0.pid, running.rank_1)
        assert running.rank_0.wait() == 130 and "Traceback" not in running.log.read_text()

    def test_ctrl_c_works_while_rank_0_waits_for_a_rank_that_is_stopped(self, running: Running) -> None:
        os.kill(running.rank_1, signal.SIGSTOP)
        time.sleep(3)
        os.killpg(running.rank_0.pid, signal.SIGINT)
        assert running.rank_0.wait(5) == 130
        running.wait_for_end(running.rank_1)
        assert running.log.read_text().endswith("mla-compile: interrupted\n")

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
    def test_all_others_name_a_lost_rank_and_leave_nothing_behind(
        self, model: Path, tmp_path: Path, how: signal.Signals
    ) -> None:
        running = Running(model, tmp_path, size=4)
        try:
            os.kill(running.others[1], how)
            running.wait_for_end(running.rank_0.pid, *running.others)
            assert running.rank_0.wait() == 1
            assert {("2", rank) for rank in "013"} <= set(LOST.findall(running.log.read_text()))
            assert {file.name for file in tmp_path.iterdir()} == {"stderr.txt", "prompts.jsonl"}
        finally:
            running.end()

    def test_ctrl_c_works_while_a_rank_that_starts_is_stopped(self, model: Path, tmp_path: Path) -> None:
        running = Running(model, tmp_path, until="")
        os.kill(running.rank_1, signal.SIGSTOP)
        time.sleep(3)
        os.kill(running.rank_0.pid, signal.SIGINT)
        running.wait_for_end(running.rank_0.pid, running.rank_1)
        assert running.rank_0.wait() == 130 and running.log.read_text().endswith("mla-compile: interrupted\n")

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("how", "why"), [(signal.SIGKILL, "exit status is -9"), (signal.SIGSTOP, "it is stopped")]
    )
    def test_a_rank_that_is_lost_while_it_starts_is_named(
        self, model: Path, tmp_path: Path, how: signal.Signals, why: str
    ) -> None:
        running = Running(model, tmp_path, until="")
        os.kill(running.rank_1, how)
        running.wait_for_end(running.rank_0.pid, running.rank_1)
        *before, last = running.log.read_text().splitlines()
        assert running.rank_0.wait() == 1 and re.fullmatch(rf"mla-compile: rank 1 .*{why}", last)
        assert all(line.endswith(" ...") for line in before)

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
    def test_the_others_name_rank_0(self, running: Running, how: signal.Signals) -> None:
        os.kill(running.rank_0.pid, how)
        running.wait_for_end(running.rank_1)
        assert ("0", "1") in LOST.findall(running.log.read_text())


def test_a_server_of_two_ranks_ends_with_both(tmp_path: Path) -> None:
    with served("--tensor-parallel-size", "2") as server:
        asked = {"model": "shipped", "prompt": "In the beginning", "max_tokens": 8, "temperature": 0}
        body = json.dumps(asked).encode()
        request = urllib.request.Request(
            f"{server.url()}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)["choices"][0]["text"]
        (completion,) = generate(["In the beginning"], max_new_tokens=8, compile=False)
        assert text == completion.text
        started = [child for engine in children(server.process.pid) for child in children(engine)]
        server.signal(signal.SIGTERM)
        assert server.ends() == 0 and not LOST.search("".join(server.log))
        assert started and all(map(is_gone, started))


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_loses_a_rank_ends_its_requests_by_name_and_comes_back(how: signal.Signals) -> None:
    def asks(**fields: object) -> urllib.request.Request:
        body = {
            "model": "shipped",
            "prompt": "In the beginning",
            "temperature": 0,
            "ignore_eos": True,
        } | fields
        headers = {"Content-Type": "application/json"}
        return urllib.request.Request(f"{server.url()}/v1/completions", json.dumps(body).encode(), headers)

    def text() -> str:
        with urllib.request.urlopen(asks(max_tokens=8)) as answer:
            found: str = json.load(answer)["choices"][0]["text"]
        return found

    with served("--tensor-parallel-size", "2") as server:
        expected = text()
        (rank_1,) = [child for engine in children(server.process.pid) for child in children(engine)]
        with urllib.request.urlopen(asks(max_tokens=480, stream=True)) as answer:
            answer.readline()
            os.kill(rank_1, how)
            begin = time.monotonic()
            rest = answer.read().decode()
        assert time.monotonic() - begin < SOON
        assert "the engine failed: its process exited with status 1" in rest
        assert ("1", "0") in LOST.findall("".join(server.log))
        while True:  # until then 503
            with suppress(urllib.error.HTTPError):
                assert text() == expected
                break
            assert time.monotonic() - begin < 120
            time.sleep(0.2)
        assert is_gone(rank_1)


def test_a_rank_that_does_not_start_is_one_line(model: Path, tmp_path: Path) -> None:
    """Its interpreter exits before it joins the others."""
    fails = "import os, sys\nif 'mla_compile.engine.rank_process' in sys.orig_argv:\n    os._exit(3)\n"
    # No announcement on a slow machine.
    fails += "from mla_compile import progress\nprogress.PATIENCE = 3600\n"
    (tmp_path / "sitecustomize.py").write_text(fails)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    asked = "--input", str(prompts(tmp_path, 1)), "--tensor-parallel-size", "2"
    done = run(model, *asked, PYTHONPATH=path)
    assert done.returncode == 1
    assert re.fullmatch(r"mla-compile: rank 1 .*\b3\b.*\n", done.stderr)


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("models.weight_loader.WeightLoader.run", "os._exit(9)", "rank 1 of 2"),
        ("models.checkpoint.connect", "1 / 0", "rank 1: .*division by zero"),
    ],
    ids=["one dies while it loads", "one alone fails"],
)
def test_a_rank_that_fails_while_it_loads_is_named(
    name: str, body: str, expected: str, model: Path, tmp_path: Path
) -> None:
    *owner, last = name.split(".")
    module = ".".join(["mla_compile", *owner[:2]])
    fails = f"""
import os, sys, threading, time

def fails(*_):
    {body}

def patch():
    while not hasattr(sys.modules.get("{module}"), "{name.split(".")[2]}"):
        time.sleep(0.01)
    owner = sys.modules["{module}"]
    for part in {owner[2:]}:
        owner = getattr(owner, part)
    setattr(owner, "{last}", fails)

if "mla_compile.engine.rank_process" in sys.orig_argv:
    threading.Thread(target=patch, daemon=True).start()
"""
    (tmp_path / "sitecustomize.py").write_text(fails)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    asked = "--input", str(prompts(tmp_path, 1)), "--tensor-parallel-size", "2"
    done = run(model, *asked, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert re.search(rf"mla-compile: .*{expected}", done.stderr) and ("1", "0") in LOST.findall(done.stderr)
    assert "Traceback" not in done.stderr


def test_a_load_that_fails_is_one_line(model: Path, tmp_path: Path) -> None:
    cut = shutil.copytree(model, tmp_path / "cut")
    os.truncate(cut / "mtp.safetensors", 100)
    done = run(cut, "--input", str(prompts(tmp_path, 1)), "--tensor-parallel-size", "2")
    *before, last = done.stderr.splitlines()
    assert done.returncode == 2 and "mtp.safetensors: " in last
    assert all(line.endswith(" ...") for line in before)
