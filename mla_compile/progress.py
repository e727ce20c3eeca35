"""Showing what takes long: by a bar of bytes on a terminal, else by one warning.

Importing it imports nothing heavy.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that pass before anything is shown."""

Advance = Callable[[int], None]
"""Takes the number of bytes that were done since the last call."""


@contextmanager
def announce_if_slow(what: str, num_bytes: int = 0, *, is_shown: bool = True) -> Iterator[Advance]:
    """Show what is going on, "loading the checkpoint" say, once the block takes long.

    Without a bar it is one warning, which Python prints where a program has not set up logging.

    num_bytes: how many there are to do, if they are counted; the block gets a function that counts them.
    is_shown: of several processes that do the same, one shows it.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    bar = _bar_of(what, num_bytes) if num_bytes and is_terminal and is_shown else None
    begin, timer = time.monotonic(), threading.Timer(PATIENCE, log.warning, [f"{what} ..."])
    timer.daemon = True

    def advance(more: int) -> None:
        if bar is not None:
            bar.advance(bar.task_ids[0], more)
            if time.monotonic() - begin >= PATIENCE:
                bar.start()

    if bar is None and is_shown:
        timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        if bar is not None and bar.live.is_started:
            bar.stop()


def _bar_of(what: str, num_bytes: int) -> "Progress":
    """A bar of bytes, which shows once it is started."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task(what, total=num_bytes)
    return bar
