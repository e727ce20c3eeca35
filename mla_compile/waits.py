"""Telling of what takes long, so that nobody waits in silence: by logging, by a bar, or as the command shows it."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that pass before anything is said."""

Advance = Callable[[int], None]
"""Is told of so many bytes more that are done."""
Show = Callable[[str, int], AbstractContextManager[Advance]]
"""Makes of a few words, and of the number of bytes to do or 0, what is shown while a block runs."""


def bar_of(what: str, num_bytes: int) -> "Progress":
    """A bar of bytes for stderr, which shows once it is started."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task(what, total=num_bytes)
    return bar


@contextmanager
def _logged(what: str, num_bytes: int) -> Iterator[Advance]:
    """Once it is long, one line. A warning: Python prints those where a program has not set up logging."""
    timer = threading.Timer(PATIENCE, log.warning, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield _silent
    finally:
        timer.cancel()


@contextmanager
def _drawn(what: str, num_bytes: int) -> Iterator[Advance]:
    """Once it is long, a bar."""
    bar, begin = bar_of(what, num_bytes), time.monotonic()

    def advance(more: int) -> None:
        bar.advance(bar.task_ids[0], more)
        if time.monotonic() - begin >= PATIENCE:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def _shown(what: str, num_bytes: int) -> Iterator[Advance]:
    """A bar on a terminal, where bytes are counted; else a line."""
    show = _drawn if num_bytes and sys.stderr.isatty() else _logged
    with show(what, num_bytes) as advance:
        yield advance


def _silent(_: int) -> None:
    pass


_show: Show = _shown


@contextmanager
def told(what: str, num_bytes: int = 0, *, is_shown: bool = True) -> Iterator[Advance]:
    """Say what is going on, "loading the checkpoint" say, if the block takes long.

    num_bytes: how many there are to do, if they are counted; the block is given what to tell of each.
    is_shown: of several processes that do the same, one says it.
    """
    if not is_shown:
        yield _silent
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
