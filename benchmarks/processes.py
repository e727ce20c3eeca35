"""Processes that measure together: starting and ending them, turns, and messages between them and the starter."""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

PATIENCE = timedelta(minutes=20)
"""Time-out of a wait for other processes."""
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""NVLink multicast has put shared GPUs out of service."""
ROWS = "rows"
DUMP_STACKS = signal.SIGUSR1
"""Makes a process print its stacks, whatever it waits for."""
LOG_TAIL = 12_000
"""Characters of the log of a failed process that the error has."""


class ProcessFailed(Exception):
    """A process failed. All others were ended."""


def run(commands: Sequence[Sequence[str]], take: Callable[[dict[str, Any]], None]) -> None:
    """Run commands in parallel, each in a process whose last argument is the port of `meet`.

    take: is called with each row of `send_row`, as it comes.

    After Ctrl-C each process prints its stacks, and the ends of all logs are printed.

    Raises:
        ProcessFailed: a process failed; with the end of its log.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    cores = os.cpu_count() or 1
    # Each process has its own compilers, for few different kernels.
    each = {
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores // (2 * len(commands)))),
        "OMP_NUM_THREADS": str(max(1, cores // (2 * len(commands)))),
    }
    running: dict[subprocess.Popen[bytes], Path] = {}
    num_taken = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            for i, command in enumerate(commands):
                log = Path(folder) / str(i)
                with log.open("wb") as file:
                    environment = os.environ | each | NO_MULTICAST
                    started = subprocess.Popen(
                        [*command, str(store.port)], stdout=file, stderr=file, env=environment
                    )
                running[started] = log
            while running:
                ended = [process for process in running if process.poll() is not None]
                while store.check([f"{ROWS}/{num_taken}"]):
                    take(json.loads(store.get(f"{ROWS}/{num_taken}")))
                    num_taken += 1
                for process in ended:
                    if process.returncode != 0:
                        raise ProcessFailed(_log_tail(process, running[process]))
                    del running[process]
                time.sleep(0.1)
        except KeyboardInterrupt:
            for process in running:
                process.send_signal(DUMP_STACKS)
            time.sleep(2)
            for process, log in running.items():
                print(_log_tail(process, log), file=sys.stderr, flush=True)
            raise
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()


def _log_tail(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end = log.read_text(errors="replace")[-LOG_TAIL:]
    return f"exit code {process.returncode} of {process.args!r}:\n{end}"


def meet(port: str) -> Store:
    """The store that all processes of a `run` share."""
    faulthandler.register(DUMP_STACKS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter, which ends all
    return TCPStore("localhost", int(port), is_master=False, timeout=PATIENCE)


def send_row(store: Store, row: dict[str, Any]) -> None:
    """Send a row to the starter."""
    store.set(f"{ROWS}/{store.add(ROWS, 1) - 1}", json.dumps(row))


class Group:
    """The processes of one configuration. Configurations prepare in parallel and are timed one after the other.

    Args:
        store: of `meet`.
        rank, size: this process's rank, and the number of processes of the configuration.
        place, count: the configuration's index, and the number of configurations.
    """

    def __init__(self, store: Store, rank: int, size: int, place: int, count: int) -> None:
        self.rank, self.size = rank, size
        self._of_all, self._place, self._count = store, place, count
        self.store = PrefixStore(f"configuration {place}", store)
        """Shared by the processes of the configuration alone."""

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Begins when all configurations have reached it and earlier ones have finished theirs; ends with the last.

        Waiting processes use no GPU, nor do those that have had their turn. Rank 0 acts for its configuration.
        """
        leads, turns = self.rank == 0, PrefixStore(f"turn {name}", self._of_all)
        if leads and turns.add("here", 1) == self._count:
            turns.set("0", "")
        turns.wait([str(self._place)])
        yield
        if leads:
            turns.set(str(self._place + 1), "")
        turns.wait([str(self._count)])

    def gathered(self, name: str, value: object) -> list[Any]:
        """The value of each process, as JSON, by rank."""
        self.store.set(f"{name} {self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{name} {rank}")) for rank in range(self.size)]


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]
