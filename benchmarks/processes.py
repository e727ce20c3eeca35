"""Processes that measure together: they are started and ended, take turns, and tell each other and the starter."""

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
"""How long anybody waits for the others."""
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""NVLink multicast has put shared GPUs out of service."""
ROWS = "rows"
TELL = signal.SIGUSR1
"""Has a process say where it is, whatever it waits for."""
TOLD = 12_000
"""Characters of what a process that failed has said last."""


class ProcessFailed(Exception):
    """One ended badly. All others were ended."""


def run(commands: Sequence[Sequence[str]], take: Callable[[dict[str, Any]], None]) -> None:
    """Run commands side by side, each in a process that is told by its last argument where to `meet`.

    take: gets each row that one of them tells, when it does.

    After Ctrl-C each process says where it is, and what it has said last is printed.

    Raises:
        ProcessFailed: one ended badly; with the end of what it said.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    cores = os.cpu_count() or 1
    # Each has compilers of its own, for few different kernels.
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
                        raise ProcessFailed(_said(process, running[process]))
                    del running[process]
                time.sleep(0.1)
        except KeyboardInterrupt:
            for process in running:
                process.send_signal(TELL)
            time.sleep(2)
            for process, log in running.items():
                print(_said(process, log), file=sys.stderr, flush=True)
            raise
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()


def _said(process: "subprocess.Popen[bytes]", log: Path) -> str:
    end = log.read_text(errors="replace")[-TOLD:]
    return f"exit code {process.returncode} of {process.args!r}:\n{end}"


def meet(port: str) -> Store:
    """What all processes of a `run` share."""
    faulthandler.register(TELL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter, which ends all
    return TCPStore("localhost", int(port), is_master=False, timeout=PATIENCE)


def tell(store: Store, row: dict[str, Any]) -> None:
    """Give the starter a row."""
    store.set(f"{ROWS}/{store.add(ROWS, 1) - 1}", json.dumps(row))


class Group:
    """The processes of one configuration, several of which get ready side by side and are timed one after the other.

    Args:
        store: of `meet`.
        rank, size: this process's place, and how many the configuration has.
        place, count: the configuration's place, and how many there are.
    """

    def __init__(self, store: Store, rank: int, size: int, place: int, count: int) -> None:
        self.rank, self.size = rank, size
        self._everyone, self._place, self._count = store, place, count
        self.store = PrefixStore(f"configuration {place}", store)
        """Of its processes alone."""

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Begins when all configurations have come here and those before have had their turns.

        Who waits has nothing to do on a GPU. The first process speaks for all of its configuration.
        """
        leads, turns = self.rank == 0, PrefixStore(f"turn {name}", self._everyone)
        if leads and turns.add("here", 1) == self._count:
            turns.set("0", "")
        turns.wait([str(self._place)])
        yield
        if leads:
            turns.set(str(self._place + 1), "")

    def gathered(self, name: str, value: object) -> list[Any]:
        """What each process says, in JSON, by its rank."""
        self.store.set(f"{name} {self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{name} {rank}")) for rank in range(self.size)]


def module_command(module: str, *arguments: str) -> list[str]:
    """That runs a module by this Python."""
    return [sys.executable, "-m", module, *arguments]
