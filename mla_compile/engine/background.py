"""Compiles steps in a thread while the engine runs them eagerly."""

import contextvars
import logging
import queue
import sys
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

SWITCH_INTERVAL = 1e-4
"""Seconds that a thread may hold Python's interpreter lock while another one waits for it. A step waits for the lock
after each of its ops, so with Python's 5 ms an eager step of 40 ms takes 2.6 s beside a compilation; with this 0.2 s
(the shipped model, 2 cores)."""


class Background:
    """A thread that runs jobs one after another. It ends with the program, whatever it is doing."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, what: str, job: Callable[[], None]) -> None:
        """Run a job after those before it. what: its name in the warning if it fails."""
        self._jobs.put((what, job))
        if self._thread is None:
            # With the caller's context, which has its settings of torch.
            run = contextvars.copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run,), name="mla-compile", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            what, job = self._jobs.get()
            interval = sys.getswitchinterval()
            sys.setswitchinterval(min(interval, SWITCH_INTERVAL))
            try:
                job()
            except Exception as error:
                log.warning("%s failed; it runs eagerly: %s", what, error)
            finally:
                sys.setswitchinterval(interval)
