"""Showing what takes long: by one warning or a bar in a program, by a line on stderr in the command.

Importing it imports nothing heavy.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mla_compile.ending import writing

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that pass before anything is shown, but for the command's line on a terminal."""
INTERVAL = 8.0
"""Seconds between the command's lines where stderr is no terminal."""

Advance = Callable[[int], None]
"""Takes the number of bytes that were done since the last call."""
Show = Callable[[str, int], AbstractContextManager[Advance]]
"""Makes of a few words, and of the number of bytes to do or 0, what is shown while a block runs."""

_ERASE_REST = "\x1b[K"
_lines: list[object] = []
"""The command's lines under way; the last is the innermost, which alone is shown."""


@contextmanager
def announce_if_slow(what: str, num_bytes: int = 0, *, is_shown: bool = True) -> Iterator[Advance]:
    """Show what is going on, "loading the checkpoint" say, if the block takes long.

    num_bytes: how many there are to do, if they are counted; the block gets a function that counts them.
    is_shown: of several processes that do the same, one shows it.
    """
    if not is_shown:
        yield _ignore
        return
    with _show(what, num_bytes) as advance:
        yield advance


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Inside, what takes long is shown so instead, in all threads."""
    global _show
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before


@contextmanager
def in_program(what: str, num_bytes: int = 0) -> Iterator[Advance]:
    """Once it is long: a bar on a terminal, where bytes are counted; else one warning, which Python prints where a
    program has not set up logging."""
    bar = _bar_of(what, num_bytes) if num_bytes and sys.stderr.isatty() else None
    begin, timer = time.monotonic(), threading.Timer(PATIENCE, log.warning, [f"{what} ..."])
    timer.daemon = True

    def advance(more: int) -> None:
        if bar is not None:
            bar.advance(bar.task_ids[0], more)
            if time.monotonic() - begin >= PATIENCE:
                bar.start()

    if bar is None:
        timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        if bar is not None and bar.live.is_started:
            bar.stop()


_show: Show = in_program


@contextmanager
def in_command(what: str, num_bytes: int = 0, *, brief: bool = False) -> Iterator[Advance]:
    """Show "what ... 12 s" while the block runs: one line that counts on a terminal, else lines some seconds apart.

    num_bytes: how many there are to do, if they are counted; the line shows how many are done, on a terminal by a bar.
    brief: the line waits longer before it shows, is erased at the end, and is for terminals only.
    """
    start, done, me = time.perf_counter(), threading.Event(), object()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if brief and not is_terminal:
        yield _ignore
        return
    bar = _bar_of(what, num_bytes) if num_bytes else None
    num_shown = 0

    def line() -> str:
        if bar is not None and is_terminal:
            with bar.console.capture() as drawn:
                bar.console.print(bar.get_renderable())
            return drawn.get().partition("\n")[0] + _ERASE_REST
        so_far = "" if bar is None else f"{bar.tasks[0].completed / 1e9:.1f} of {num_bytes / 1e9:.1f} GB, "
        text = f"{what} ... {so_far}{time.perf_counter() - start:.0f} s"
        return f"\x1b[2m{text}\x1b[0m" if is_terminal else text

    def show(end: str) -> None:
        nonlocal num_shown
        if _lines and _lines[-1] is me and sys.stderr is not None:
            num_shown += 1
            with suppress(OSError), writing:  # OSError: the reader of stderr has gone
                print(line(), end=end, file=sys.stderr, flush=True)

    def tick() -> None:
        wait = 0.3 if is_terminal and not brief else PATIENCE
        while not done.wait(wait):
            show("\r" if is_terminal else "\n")
            wait = 0.3 if is_terminal else INTERVAL

    _lines.append(me)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield lambda more: None if bar is None else bar.advance(bar.task_ids[0], more)
    finally:
        done.set()
        thread.join()
        if num_shown:
            show("\r" + _ERASE_REST if brief else "\n")
        _lines.remove(me)


def importing() -> AbstractContextManager[Advance]:
    """While torch is imported: seconds on most machines, and nothing to keep in a log."""
    return in_command("importing torch", brief=True)


def _bar_of(what: str, num_bytes: int) -> "Progress":
    """A bar of bytes, which shows once it is started."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    bar = _on_stderr(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar.add_task(what, total=num_bytes)
    return bar


def _on_stderr(*columns: Any) -> "Progress":
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True))


def _ignore(_: int) -> None:
    pass
