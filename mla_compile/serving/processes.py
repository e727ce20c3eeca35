"""Processes of the server's own: a module that is run with one end of a connection."""

import os
import socket
import subprocess
import sys
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
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return process, Connection(ours.detach())


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait so long for a process to end by itself, then kill it."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
