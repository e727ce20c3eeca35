"""Grammars from untrusted clients: a separate process compiles each first, within limits of time and memory.

If that process (`python -m mla_compile.serving.grammars FD`) succeeds, the engine's process compiles the grammar again:
a compiled grammar cannot be pickled.
"""

import asyncio
import resource
import signal
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakValueDictionary

from mla_compile.engine.grammar import Grammar
from mla_compile.errors import MLAError
from mla_compile.models import load_tokenizer
from mla_compile.serving import processes
from mla_compile.serving.engine_client import has_places
from mla_compile.serving.failures import Busy, NotReady
from mla_compile.serving.messages import GrammarSource
from mla_compile.serving.settings import ServerSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_LOADING_SECONDS = 120.0
_KEPT = 256
_KINDS = {
    "json_schema": Grammar.from_json_schema,
    "regex": Grammar.from_regex,
    "ebnf": Grammar.from_ebnf,
}


def compiled(source: GrammarSource, tokenizer: "PreTrainedTokenizerBase") -> Grammar:
    """Raises `MLAError` if llguidance rejects the grammar."""
    return _KINDS[source.kind](source.text, tokenizer)


class GrammarThread(Generic[T]):
    """One thread that works on grammars in order, and keeps the latest results."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._thread = ThreadPoolExecutor(1)
        self._known: OrderedDict[GrammarSource, Future[T]] = OrderedDict()

    def get(self, source: GrammarSource, work: Callable[[GrammarSource], T]) -> Future[T]:
        """The result of `work`, cached unless it failed or was cancelled: the next call retries."""
        known = self._known.get(source)
        if known is None or (known.done() and not self.has(source)):
            self._known[source] = known = self._thread.submit(work, source)
        self._known.move_to_end(source)
        while len(self._known) > self._num_kept and next(iter(self._known.values())).done():
            self._known.popitem(last=False)
        return known

    def has(self, source: GrammarSource) -> bool:
        """Whether `get` has its result at once."""
        known = self._known.get(source)
        return known is not None and known.done() and not known.cancelled() and known.exception() is None

    def stop(self) -> None:
        """Start no more work."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class GrammarCheck:
    """Checks whether a grammar compiles within limits; clients take turns."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._checks = GrammarThread[str | None](_KEPT)
        self._clients: list[str] = []  # of the requests that wait
        self._awaited: list[Future[str | None]] = []  # by each of them
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    async def why_not(self, source: GrammarSource, client: str = "") -> str | None:
        """Why the grammar is rejected; None if the engine may compile it.

        Raises:
            Busy: too many others wait. NotReady: the checking process was killed, or cannot be started.
        """
        room = self._settings.engine.max_rows + self._settings.max_waiting
        if not has_places(Counter(self._clients), client, 1, room):
            raise Busy
        self._clients.append(client)
        # The thread has one check of a client at a time, so those of others wait for one of it only.
        turn = nullcontext() if self._checks.has(source) else self._turns.setdefault(client, asyncio.Lock())
        try:
            async with turn:
                return await self._result(self._checks.get(source, self._ask))
        except TimeoutError as error:
            return str(error)
        finally:
            self._clients.remove(client)

    async def _result(self, check: Future[str | None]) -> str | None:
        """The result of a check, which ends if it has not begun when the last request that waits for it has gone."""
        self._awaited.append(check)
        try:
            return await asyncio.shield(asyncio.wrap_future(check))
        finally:
            self._awaited.remove(check)
            if check not in self._awaited:
                check.cancel()

    def stop(self) -> None:
        """End the process, and check no more."""
        self._checks.stop()
        self._end()

    def _end(self) -> int | None:
        """End the process; return its exit status, or None if there was none."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return None
        connection.close()
        return processes.end(process)

    def _ask(self, source: GrammarSource) -> str | None:
        """Like `why_not`, but raises TimeoutError if it takes too long."""
        seconds = self._settings.grammar_seconds
        if self._process is None or self._process.poll() is not None:
            self._start()
        connection = self._connection
        assert connection is not None
        try:
            connection.send(source)
            if connection.poll(seconds):
                found: str | None = connection.recv()
                return found
        except (EOFError, OSError):
            if self._end() in (None, -signal.SIGKILL):  # killed from outside
                raise NotReady from None
            return "compiling it takes too much memory"
        self._end()
        raise TimeoutError(f"compiling it takes more than {seconds:g} s")

    def _start(self) -> None:
        with suppress(EOFError, OSError):
            self._process, self._connection = processes.start("mla_compile.serving.grammars")
            tokenizer = self._settings.tokenizer or self._settings.model
            self._connection.send((tokenizer, self._settings.grammar_bytes))
            if self._connection.poll(_LOADING_SECONDS):
                self._connection.recv()
                return
        self._end()
        raise NotReady


def _limit_memory(more: int) -> None:
    """Limit this process to `more` bytes beyond its current size."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(fd: int) -> None:
    """Run the checking process."""
    processes.leave_signals()
    with Connection(fd) as connection, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        path, num_bytes = connection.recv()
        tokenizer = load_tokenizer(path)
        assert tokenizer is not None, "a server has a tokenizer"
        compiled(GrammarSource("regex", "a"), tokenizer)  # allocates what all grammars share
        _limit_memory(num_bytes)
        connection.send(None)
        while True:
            try:
                compiled(connection.recv(), tokenizer)
                connection.send(None)
            except MLAError as error:
                connection.send(str(error))
            except MemoryError:
                connection.send("compiling it takes too much memory")


if __name__ == "__main__":
    main(int(sys.argv[1]))
