"""Standard output and error of the command."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def prepare() -> None:
    """Print characters that a stream's encoding lacks as "?"."""
    if sys.stdout is None:  # the process was started with it closed
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def cannot_write() -> str | None:
    """Why standard output cannot be written, such as a full disk; None if it can.

    Discards what is left in its buffer then, as Python would try to write it again at exit.
    """
    try:
        print(flush=True)  # the text that failed may have left the buffer
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return error.strerror
    return None


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Drop what libraries write to stderr past Python: tokenizers does before a panic, and the error repeats it."""
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
