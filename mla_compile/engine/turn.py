"""One thread at a time: the others are told so, and wait for nobody."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from mla_compile.errors import MLAError


class Turn:
    """A context that one thread may be in, as deep as it likes.

    Raises:
        MLAError: on entry, while another thread is in it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner, self._depth = 0, 0
        self._waiting: deque[Callable[[], None]] = deque()

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
        if self._waiting:
            self._run_waiting()

    def when_free(self, call: Callable[[], None]) -> None:
        """Do it now or, while any thread is in, when that one leaves. It must not raise."""
        self._waiting.append(call)
        self._run_waiting()

    def _run_waiting(self) -> None:
        # Whoever is in looks after having left, so what was put here while he was in is not forgotten.
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # further out, in this very thread
                with self:
                    while self._waiting:
                        self._waiting.popleft()()
            finally:
                self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Turn":
        """A free one: nobody is in the copy."""
        return Turn()
