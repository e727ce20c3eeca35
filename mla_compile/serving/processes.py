"""Processes of the server's own: a module that is run with one end of a connection."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection


def start(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `python -m module FD`; FD is its end of the connection that is returned.

    Not by `multiprocessing`, which would run the caller's main module again.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # with the processes that it starts, so that they end together
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return process, Connection(ours.detach())


def leave_signals() -> None:
    """In such a process: Ctrl-C, and the SIGTERM that systemd sends to all of a service, are for the server alone."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill a process and those that it has started, unless they have ended by themselves. Its exit status."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
