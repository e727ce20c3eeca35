"""Ends this process at once, whatever its main thread waits for, by `os._exit`, which runs no Python cleanup.

It imports no torch, so that the command can be interrupted while torch is imported.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 + SIGINT, as in shells."""

before_end: list[Callable[[], Any]] = []
"""Called first, to delete files or kill children. Any thread may call these, and two threads at once."""

_ending = threading.Lock()


def end_now(what: str, status: int) -> NoReturn:
    """End with one line on stderr."""
    for call in tuple(before_end):
        with suppress(Exception):
            call()
    # Not by `sys.stderr`, which may be in the middle of a line. A terminal shows "^C", or a bar that hides the cursor.
    before = b"\x1b[?25h\n" if os.isatty(2) else b""
    _ending.acquire(timeout=1)  # never released: only one thread prints its line
    with suppress(OSError):
        os.write(2, before + f"mla-compile: {what}\n".encode())
    os._exit(status)


def interrupted(*_: object) -> None:
    """Handles SIGINT.

    Python's own handler raises an exception. During imports, in callbacks and in C extensions such an exception prints
    a traceback, or is swallowed.
    """
    end_now("interrupted", INTERRUPTED)


@contextmanager
def ending_at_ctrl_c(applies: Callable[[], bool]) -> Iterator[None]:
    """Inside, Ctrl-C ends this process, also while the main thread is in C code, where no Python handler runs.

    applies: whether Ctrl-C should end the process at that moment, as other code may have set its own handler. Outside
        the main thread this does nothing: Python handles signals only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals, wakes = socket.socketpair()
    wakes.setblocking(False)
    before = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(signals, applies), name="ctrl-c", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wakes.close()  # which ends the thread
        listener.join()
        signals.close()


def _listen(signals: socket.socket, applies: Callable[[], bool]) -> None:
    """signals: receives a byte for each signal of this process."""
    while got := signals.recv(64):
        if signal.SIGINT in got and applies():
            end_now("interrupted", INTERRUPTED)
