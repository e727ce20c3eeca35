"""A server in a process of its own, as a user starts it."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-c", "from mla_compile.cli import main; main()", "serve", "--port", "0"]
EAGER = ["--no-compile", "--max-model-len", "512", "--device", "cpu"]


class ServerProcess:
    """`mla-compile serve`. log: its lines so far."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        self.log: list[str] = []
        self._url = self._ready = ""
        self._told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._told:
                self.log.append(line)
                if found := re.search(r"(listening at|ready:) (http://\S+?),?\s", line):
                    self._url = found[2]
                    self._ready = found[2] if found[1] == "ready:" else self._ready
                self._told.notify_all()

    def url(self, *, ready: bool = True) -> str:
        """Wait until it listens, or is ready."""
        with self._told:
            found = self._told.wait_for(
                lambda: (self._ready if ready else self._url) or self.process.poll() is not None, 300
            )
        assert found and self.process.poll() is None, "".join(self.log)
        return self._url

    def ends(self, seconds: float = 60) -> int:
        """Wait for its end; the exit status."""
        status = self.process.wait(seconds)
        self._reader.join(10)  # the log is whole then
        return status

    def signal(self, which: signal.Signals) -> None:
        self.process.send_signal(which)


@contextmanager
def served(*arguments: str, **env: str) -> Iterator[ServerProcess]:
    """A server with these flags, beside EAGER, and this environment; killed in the end."""
    server = ServerProcess([*EAGER, *arguments], env)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
