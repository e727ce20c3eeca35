"""The server's side of the engine's process: sends requests, and receives updates for answers."""

import asyncio
import itertools
import logging
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from mla_compile.engine.stats import EngineStats
from mla_compile.serving import processes
from mla_compile.serving.failures import Busy, NotReady
from mla_compile.serving.messages import (
    Abort,
    Add,
    Asked,
    Failed,
    FromEngine,
    Progress,
    Ready,
    ToEngine,
    Update,
)
from mla_compile.serving.settings import ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds before a failed process is restarted; doubles each time."""
_PATIENCE, _MOST_SILENT = 60.0, 10
"""A ready process that sends nothing for this many times these seconds hangs. Once is no proof: this process may have
been stopped itself, and has not read yet."""


class Answer:
    """The completions of one request.

    num_running: those not ended. client: the sender of the request.
    """

    def __init__(self, num_completions: int, client: str | None = None) -> None:
        self.num_running, self.client = num_completions, client
        self._news: dict[int, tuple[Update, float]] = {}  # by the completion's index, oldest first
        self._has_news = asyncio.Event()
        self._is_late = False

    def put(self, index: int, update: Update, read_at: float) -> None:
        """Add an update of one completion; updates of several steps are merged until they are read."""
        self.num_running -= update.finish_reason is not None
        if index in self._news:
            self._news[index][0].extend(update)
        else:
            self._news[index] = update, read_at
        self._has_news.set()

    def has_more(self) -> bool:
        """Whether `next` will return another update."""
        return self.num_running > 0 or bool(self._news)

    def time_out(self) -> None:
        """Make `next` raise TimeoutError from now on."""
        self._is_late = True
        self._has_news.set()

    async def next(self) -> tuple[int, Update, float]:
        """One completion's index, its update, and when the update's oldest report was read (see `Progress`).

        The last update of each completion has a finish_reason.

        Raises:
            TimeoutError: see `time_out`.
        """
        while not (self._news or self._is_late):
            self._has_news.clear()
            await self._has_news.wait()
        if self._is_late:
            raise TimeoutError
        index = next(iter(self._news))
        return index, *self._news.pop(index)


def has_places(held: Counter[T], client: T, count: int, room: int) -> bool:
    """Whether a client may have `count` more places: there is room, or the client stays within an equal share.
    k clients together have at most (1 + 1/2 + ... + 1/k) times the room. held: by client."""
    if held.total() + count <= room:
        return True
    return held[client] + count <= room // len(held.keys() | {client})


class EngineClient:
    """Runs an engine's process, and restarts it when it fails."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._answers: dict[int, tuple[Answer, int]] = {}  # by key, with the index in the answer
        self._keys = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._keeper: asyncio.Task[None] | None = None
        self.ready: Ready | None = None
        """The message of an engine that is ready; None while no engine is."""
        self.stats = EngineStats()
        """The engine's latest stats; all zeros while no engine runs."""

    async def start(self) -> None:
        """Start the process, and wait until it is warm.

        Raises:
            MLAError: a bad setting, raised in the engine.
            RuntimeError: any other failure.
        """
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(started))
        await started

    async def stop(self) -> None:
        """End the process; running answers end with an error."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self.end_all("the server is shutting down")

    def submit(self, asked: Sequence[Asked], client: str | None = None) -> Answer:
        """Send all completions of a client's request to the engine, or none.

        Raises:
            NotReady, Busy: the request is not accepted.
        """
        if self.ready is None:
            raise NotReady
        if not self._has_places(len(asked), client):
            raise Busy
        answer = Answer(len(asked), client)
        for index, each in enumerate(asked):
            key = next(self._keys)
            self._answers[key] = answer, index
            self._outbox.put(Add(key, each, client))
        return answer

    def abort(self, answer: Answer) -> None:
        """Abort an answer's requests that have not ended."""
        for key in [key for key, (known, _) in self._answers.items() if known is answer]:
            del self._answers[key]
            self._outbox.put(Abort(key))

    def _has_places(self, count: int, client: str | None) -> bool:
        assert self.ready is not None
        room = self.ready.stats.max_rows + self._settings.max_waiting
        return has_places(Counter(answer.client for answer, _ in self._answers.values()), client, count, room)

    @property
    def num_running(self) -> int:
        """Running completions."""
        return len(self._answers)

    def end_all(self, why: str) -> None:
        """End the running answers with an error, and abort their requests."""
        answers, self._answers = self._answers, {}
        for key, (answer, index) in answers.items():
            self._outbox.put(Abort(key))
            answer.put(index, Update(finish_reason="error", error=why), time.monotonic())

    async def _keep(self, started: asyncio.Future[None]) -> None:
        wait = _FIRST_WAIT
        while True:
            began = time.monotonic()
            failed = await self._run(started)
            self.ready, self.stats = None, EngineStats()
            why = f"the engine failed: {failed.message}"
            self.end_all(why)
            if not started.done():
                started.set_exception(failed.mistake or RuntimeError(why))
                return
            wait = _FIRST_WAIT if time.monotonic() - began > _LONGEST_WAIT else min(2 * wait, _LONGEST_WAIT)
            log.error("%s; restarting in %g s", why, wait)
            await asyncio.sleep(wait)

    async def _run(self, started: asyncio.Future[None]) -> Failed:
        """Run one process from its start to its end; return why it ended."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[FromEngine | None]()
        try:
            process, connection = processes.start("mla_compile.serving.engine_process")
        except OSError as error:
            return Failed(f"cannot start its process: {error}")
        self._process = process
        self._outbox = queue.SimpleQueue()
        self._outbox.put(self._settings)
        threads = [
            threading.Thread(target=_read, args=(connection, loop, inbox.put_nowait), daemon=True),
            threading.Thread(target=_write, args=(connection, self._outbox), daemon=True),
        ]
        for thread in threads:
            thread.start()
        failed, num_silent = Failed(""), 0
        try:
            while num_silent < _MOST_SILENT:
                try:
                    async with asyncio.timeout(None if self.ready is None else _PATIENCE):
                        message = await inbox.get()
                except TimeoutError:
                    num_silent += 1
                    continue
                num_silent = 0
                if message is None:
                    break
                if isinstance(message, Progress):
                    self._take(message)
                elif isinstance(message, Ready):
                    self.ready, self.stats = message, message.stats
                    if not started.done():
                        started.set_result(None)
                else:
                    failed = message
            else:
                failed = Failed(f"it has hung for {_PATIENCE * _MOST_SILENT:g} s")
        finally:
            self._outbox.put(None)
            status = await asyncio.to_thread(_end, process, connection, threads)
        return failed if failed.message else Failed(f"its process exited with status {status}")

    def _take(self, progress: Progress) -> None:
        self.stats = progress.stats
        for key, fields in progress.updates:
            if key in self._answers:  # else it was aborted
                answer, index = self._answers[key]
                update = Update(*fields)
                answer.put(index, update, progress.read_at)
                if update.finish_reason is not None:
                    del self._answers[key]


def _end(
    process: "subprocess.Popen[bytes]", connection: Connection, threads: Sequence[threading.Thread]
) -> int:
    """End the process, which ends the threads, then close the connection, which they use; return the exit status."""
    status = processes.end(process)
    for thread in threads:
        thread.join(1)
    connection.close()
    return status


def _read(
    connection: Connection, loop: asyncio.AbstractEventLoop, put: Callable[[FromEngine | None], None]
) -> None:
    """A thread that passes on the engine's messages, then None when the connection ends."""
    with suppress(RuntimeError):  # the loop has ended
        try:
            while True:
                loop.call_soon_threadsafe(put, connection.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(put, None)


def _write(connection: Connection, outbox: "queue.SimpleQueue[ToEngine | None]") -> None:
    """A thread that sends messages to the engine, as sending blocks while the engine is busy."""
    with suppress(OSError):
        while (message := outbox.get()) is not None:
            connection.send(message)
