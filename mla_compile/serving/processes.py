"""Child processes of the server: each runs a module with one end of a connection."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection


def start(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `python -m module FD`, with FD the other end of the returned connection.

    `multiprocessing` would run the caller's main module again.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a process group, so that its children end with it
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return process, Connection(ours.detach())


def leave_signals() -> None:
    """Ignore Ctrl-C and SIGTERM in a child process: systemd sends it to a whole service; the server handles both."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and its children, if they still run; return its exit status."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
