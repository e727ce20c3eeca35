"""What to show on stderr while something takes long: nothing else is there but errors."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from mla_compile.cli import interrupts

PATIENCE = 2.0
"""Seconds without a line where stderr is no terminal: what is quicker says nothing there."""
INTERVAL = 8.0
"""Seconds between lines there."""
_shown: list[object] = []
"""What is under way; the last is the innermost, which alone is shown."""


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say "what ... 12 s" while the block runs: one line that counts on a terminal, else lines some seconds apart."""
    start, done, me = time.perf_counter(), threading.Event(), object()
    is_terminal = sys.stderr.isatty()
    num_said = 0

    def say(end: str) -> None:
        nonlocal num_said
        if _shown and _shown[-1] is me:
            num_said += 1
            line = f"{what} ... {time.perf_counter() - start:.0f} s"
            with suppress(OSError), interrupts.writing:  # OSError: whoever read stderr has gone
                typer.echo(typer.style(line, dim=is_terminal) + end, err=True, nl=False)

    def tick() -> None:
        wait = 0.3 if is_terminal else PATIENCE
        while not done.wait(wait):
            say("\r" if is_terminal else "\n")
            wait = 0.3 if is_terminal else INTERVAL

    _shown.append(me)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if num_said:
            say("\n")
        _shown.remove(me)
