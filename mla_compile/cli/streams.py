"""Standard output that says when it is it that cannot be written."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class StdoutError(OSError):
    """Standard output cannot be written: its disk is full, or whoever read it has gone."""


class _Stdout(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise StdoutError(error.errno, error.strerror) from error


def prepare() -> None:
    """Let errors of stdout be `StdoutError`, and both streams print what their encoding lacks as "?"."""
    if sys.stdout is None:  # the process was started with it closed
        sys.stdout = io.TextIOWrapper(io.FileIO(os.devnull, "w"), errors="replace")
    else:
        sys.stdout.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(1, "wb", closefd=False)),
            encoding=sys.stdout.encoding,
            errors="replace",
            line_buffering=sys.stdout.isatty(),
        )
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")


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


def drop_stdout() -> None:
    """What is left in stdout's buffer goes nowhere: Python would try to write it once more at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
