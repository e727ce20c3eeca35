"""Telling of what takes long, so that nobody waits in silence: by logging, or as the command shows it."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

log = logging.getLogger(__name__)

PATIENCE = 3.0
"""Seconds that pass before anything is said."""

Show = Callable[[str], AbstractContextManager[None]]
"""Makes of a few words what is shown while a block runs."""


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """One line, once it is long. A warning: Python prints those where a program has not set up logging."""
    timer = threading.Timer(PATIENCE, log.warning, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_show: Show = _logged


@contextmanager
def told(what: str) -> Iterator[None]:
    """Say what is going on, "loading the checkpoint" say, if the block takes long."""
    with _show(what):
        yield


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Inside, what takes long is shown so instead of being logged, in all threads."""
    global _show
    before, _show = _show, show
    try:
        yield
    finally:
        _show = before
