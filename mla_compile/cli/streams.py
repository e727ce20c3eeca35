"""Standard output that says when it is it that cannot be written."""

import io
import os
import sys
from contextlib import suppress


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
    if sys.stdout is not None:  # it is, where the process was started with it closed
        sys.stdout.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(1, "wb", closefd=False)),
            encoding=sys.stdout.encoding,
            errors="replace",
            line_buffering=sys.stdout.isatty(),
        )
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")


def drop_stdout() -> None:
    """What is left in stdout's buffer goes nowhere: Python would try to write it once more at exit."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
