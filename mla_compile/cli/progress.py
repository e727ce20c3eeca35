"""What to show on stderr while something takes long: nothing else is there but errors."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import typer

from mla_compile.ending import writing
from mla_compile.waits import Advance, bar_of

PATIENCE = 2.0
"""Seconds without a line where stderr is no terminal, or where the line is brief: what is quicker says nothing."""
INTERVAL = 8.0
"""Seconds between lines where stderr is no terminal."""
_ERASE_REST = "\x1b[K"
_shown: list[object] = []
"""What is under way; the last is the innermost, which alone is shown."""


@contextmanager
def progress(what: str, num_bytes: int = 0, *, brief: bool = False) -> Iterator[Advance]:
    """Say "what ... 12 s" while the block runs: one line that counts on a terminal, else lines some seconds apart.

    num_bytes: how many there are to do, if they are counted; the line says then how many are done, on a terminal by a
    bar. The block is given what to tell of each.
    brief: the line waits longer before it shows, is erased at the end, and is for terminals only.
    """
    start, done, me = time.perf_counter(), threading.Event(), object()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if brief and not is_terminal:
        yield lambda _: None
        return
    bar = bar_of(what, num_bytes) if num_bytes else None
    num_said = 0

    def line() -> str:
        if bar is not None and is_terminal:
            with bar.console.capture() as drawn:
                bar.console.print(bar.get_renderable())
            return drawn.get().partition("\n")[0] + _ERASE_REST
        so_far = "" if bar is None else f"{bar.tasks[0].completed / 1e9:.1f} of {num_bytes / 1e9:.1f} GB, "
        return typer.style(f"{what} ... {so_far}{time.perf_counter() - start:.0f} s", dim=is_terminal)

    def say(end: str) -> None:
        nonlocal num_said
        if _shown and _shown[-1] is me:
            num_said += 1
            with suppress(OSError), writing:  # OSError: whoever read stderr has gone
                typer.echo(line() + end, err=True, nl=False)

    def tick() -> None:
        wait = 0.3 if is_terminal and not brief else PATIENCE
        while not done.wait(wait):
            say("\r" if is_terminal else "\n")
            wait = 0.3 if is_terminal else INTERVAL

    _shown.append(me)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield lambda more: None if bar is None else bar.advance(bar.task_ids[0], more)
    finally:
        done.set()
        thread.join()
        if num_said:
            say("\r" + _ERASE_REST if brief else "\n")
        _shown.remove(me)


def importing() -> AbstractContextManager[Advance]:
    """While torch is imported: seconds on most machines, and nothing to keep in a log."""
    return progress("importing torch", brief=True)
