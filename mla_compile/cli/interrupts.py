"""Ctrl-C: one line, exit code 130, whatever is going on.

Python's own handler raises an exception. During imports, in callbacks and in C extensions such an exception prints a
traceback, or is swallowed. So ours ends the process itself.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

EXIT_CODE = 130
"""128 + SIGINT, as shells have it."""

writing = threading.RLock()
"""Held by threads that write to stderr, so that nothing comes after the last line."""

unfinished: list[Path] = []
"""Files to delete then."""


def interrupted(*_: object) -> None:
    """Handles SIGINT."""
    for path in unfinished:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    # Not by `sys.stderr`, which may be in the middle of a line. A terminal shows "^C" or a line of progress.
    newline = b"\n" if os.isatty(2) else b""
    writing.acquire(timeout=1)  # and never released
    with suppress(OSError):
        os.write(2, newline + b"mla-compile: interrupted\n")
    os._exit(EXIT_CODE)
