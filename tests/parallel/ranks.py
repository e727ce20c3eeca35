"""Processes that share a model, each of them a rank.

They are forked from a process that has imported what they need, 5 s of a core for each rank. With a GPU each is a new
interpreter: once a process has asked for CUDA, which an import may do, its forks cannot use it.
"""

import json
import os
import subprocess
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path

import torch

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""No multicast: it may put GPUs that others share out of service. Ranks may share a GPU."""
MODULES = (
    "tests.parallel.worker",
    "tests.parallel.engines",
    "tests.parallel.loads",
    "tests.parallel.lost_rank",
)
"""Imported once. Importing them starts no thread, which no fork would survive."""
SECONDS = 550
"""Ranks that still run then are killed."""


def run_ranks(module: str, size: int, folder: Path, *words: str) -> None:
    """`exit_statuses`, which must all be 0; a failure shows the ends of their logs."""
    statuses = exit_statuses(module, size, folder, *words)
    assert not any(statuses), "\n".join(log_of(folder, rank).read_text()[-3000:] for rank in range(size))


def exit_statuses(module: str, size: int, folder: Path, *words: str) -> list[int]:
    """Runs `main` of a module as `python -m MODULE RANK SIZE FOLDER WORDS` for each rank, in a new process."""
    (folder / "meeting").unlink(missing_ok=True)
    if torch.cuda.is_available():
        return _statuses_of_interpreters(module, size, folder, *words)
    starter = _starter()
    assert starter.stdin is not None and starter.stdout is not None
    starter.stdin.write(f"{json.dumps([module, size, str(folder), *words])}\n")
    starter.stdin.flush()
    statuses: list[int] = json.loads(starter.stdout.readline())
    return statuses


def _statuses_of_interpreters(module: str, size: int, folder: Path, *words: str) -> list[int]:
    line, deadline = [sys.executable, "-m", "tests.parallel.ranks", module], time.monotonic() + SECONDS
    jobs = [
        subprocess.Popen([*line, str(rank), str(size), str(folder), *words], env=os.environ | ENVIRONMENT)
        for rank in range(size)
    ]
    for job in jobs:
        try:
            job.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()
    return [job.wait() for job in jobs]


@cache
def _starter() -> "subprocess.Popen[str]":
    """Ends with this process, which closes its standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.ranks"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
    )


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"log.{rank}.txt"


def _wait(pid: int, deadline: float) -> int:
    """The exit status of a child, which is killed at the deadline."""
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.02)
    return os.waitstatus_to_exitcode(ended[1])


def _run(module: str, rank: str, size: str, folder: str, *words: str) -> None:
    """In the new process, which ends afterwards as every Python program does."""
    null, log = (
        os.open(os.devnull, os.O_RDONLY),
        os.open(log_of(Path(folder), int(rank)), os.O_WRONLY | os.O_CREAT),
    )
    for file, stream in ((null, 0), (log, 1), (log, 2)):
        os.dup2(file, stream)
    sys.argv = [module, rank, size, folder, *words]
    import_module(module).main()


def main() -> None:
    """Starts the ranks that a line of standard input asks for, and answers with their exit statuses; or is a rank."""
    if len(sys.argv) > 1:
        _run(*sys.argv[1:])
        return
    for module in MODULES:
        import_module(module)
    for line in sys.stdin:
        module, size, *words = json.loads(line)
        deadline, pids = time.monotonic() + SECONDS, []
        for rank in range(size):
            pids.append(os.fork())
            if pids[-1] == 0:
                _run(module, str(rank), str(size), *words)
                return
        print(json.dumps([_wait(pid, deadline) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
