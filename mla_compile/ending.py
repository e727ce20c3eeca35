"""Ending this process at once, whatever its main thread waits for: by `os._exit`, at which Python runs nothing more.

It imports no torch: the command can be interrupted before that is there.
"""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

before_end: list[Callable[[], Any]] = []
"""What is called first: files to delete, children to kill. It may be called by any thread, and by two at once."""

_ending = threading.Lock()


def end_now(what: str, status: int) -> NoReturn:
    """End with one line on stderr."""
    for call in tuple(before_end):
        with suppress(Exception):
            call()
    # Not by `sys.stderr`, which may be in the middle of a line. A terminal shows "^C", or a bar that hides the cursor.
    before = b"\x1b[?25h\n" if os.isatty(2) else b""
    _ending.acquire(timeout=1)  # and never released: one thread says the last line
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
    """Inside, Ctrl-C ends this process, also while the main thread is in C, where no handler runs.

    applies: whether it does so yet, as others may have set a handler of their own. In another thread than the main one
        nothing is changed: signals are not heard there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals, wakes = socket.socketpair()
    wakes.setblocking(False)
    before = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    hearer = threading.Thread(target=_hear, args=(signals, applies), name="ctrl-c", daemon=True)
    hearer.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wakes.close()  # which ends the thread
        hearer.join()
        signals.close()


def _hear(signals: socket.socket, applies: Callable[[], bool]) -> None:
    """signals: which this process has got, a byte for each."""
    while got := signals.recv(64):
        if signal.SIGINT in got and applies():
            end_now("interrupted", INTERRUPTED)
