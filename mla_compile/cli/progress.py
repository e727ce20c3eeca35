"""What to show while something takes long."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress(what: str, console: Console) -> Iterator[None]:
    """Say "what ... 12 s" while the block runs: one line that counts on a terminal, else a line every five seconds."""
    start, done = time.perf_counter(), threading.Event()
    interval, end = (0.2, "\r") if console.is_terminal else (5.0, "\n")

    def show(end: str) -> None:
        seconds = time.perf_counter() - start
        console.print(f"{what} ... {seconds:.0f} s", style="dim", highlight=False, end=end, soft_wrap=True)

    def tick() -> None:
        show(end)
        while not done.wait(interval):
            show(end)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        show("\n")
