"""A non-blocking lock of an engine: a call from a second thread raises instead of waiting."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mla_compile.errors import MLAError


class SingleOwner:
    """A reentrant lock as a context: one thread at a time owns it.

    Raises:
        MLAError: on entry, while another thread owns it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner, self._depth = 0, 0
        self._deferred: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            got = f"{threading.current_thread().name} while {names.get(self._owner, 'another')} is in it"
            hint = "run it in one thread, and hand requests over to that one"
            raise MLAError("engine", "one thread at a time", got, hint)
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()
        if self._deferred:
            self._run_deferred()

    def when_released(self, call: Callable[[], None]) -> None:
        """Run a call, which must not raise, now or, while any thread owns the lock, when that thread releases it."""
        self._deferred.append(call)
        self._run_deferred()

    def _run_deferred(self) -> None:
        # An owner checks the queue after its release, so a call that is queued meanwhile is not lost.
        while self._deferred and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # this thread owns the lock in an outer frame, which will run them
                with self:
                    while self._deferred:
                        self._deferred.popleft()()
            finally:
                self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SingleOwner":
        """The copy is not owned by any thread."""
        return SingleOwner()
