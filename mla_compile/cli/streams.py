"""Standard output and error of the command."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def prepare() -> None:
    """Let both streams print what their encoding lacks as "?"."""
    if sys.stdout is None:  # the process was started with it closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def cannot_write() -> str | None:
    """Why standard output cannot be written, its disk being full say; None where it can.

    What is left in its buffer goes nowhere then: Python would try to write it once more at exit.
    """
    try:
        print(flush=True)  # what failed to be written may be gone from the buffer
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return error.strerror
    return None


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop what libraries write to stderr past Python, as tokenizers does before it panics: an error says it again."""
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
