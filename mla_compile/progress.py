"""Progress of slow operations: a bar of bytes on a terminal, otherwise one warning.

The import is light.
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
"""Seconds before the bar or the warning appears."""

Advance = Callable[[int], None]
"""Takes the number of bytes processed since the last call."""


@contextmanager
def announce_if_slow(what: str, num_bytes: int = 0, *, is_shown: bool = True) -> Iterator[Advance]:
    """Show `what`, for example "loading the checkpoint", if the block takes more than `PATIENCE` seconds.

    Without a bar it logs one warning, which Python prints even if the program has not configured logging.

    num_bytes: the bytes to process, or 0 for no bar; the block gets a function that counts them.
    is_shown: False in all but one of several processes that do the same work.
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
    """A bar of bytes, not yet started."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task(what, total=num_bytes)
    return bar
