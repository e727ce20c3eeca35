"""Answers that do not outlive their readers: a client that vanishes or stalls ends what it asked for."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mla_compile.serving.failures import BadRequest, BodiesFull
from mla_compile.serving.settings import ServerSettings

T = TypeVar("T")

MAX_WHOLE_BODIES = 16
"""What the bodies of all requests take together, in bodies of the size that one may have."""
_LET_BY = 1.0
"""Seconds that the next part of a body that is too long is waited for."""


class ClientGone(Exception):
    """Nobody reads an answer, or will send the rest of a request."""


async def gone(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives.

    Raises:
        ClientGone: the client has hung up before; the work was cancelled.
    """
    task, watcher = asyncio.ensure_future(work), asyncio.create_task(gone(receive))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.wait([task, watcher])


class Bodies:
    """Bodies of requests, until they are parsed.

    Where all exceed their bound, the largest are given up: a client whose body is short loses nothing to others.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._sizes: dict[asyncio.Timeout, int] = {}  # by what ends the request
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body, which counts until the context ends.

        Raises:
            BadRequest: it has too many bytes, or does not come in time. ClientGone: the client has hung up.
            BodiesFull: it was given up, also where that happens within the context.
        """
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                yield await self._whole(request, timeout)
        except TimeoutError:
            if timeout.expired():
                raise BodiesFull from None
            raise
        finally:
            self._count(timeout, 0)

    def _count(self, timeout: asyncio.Timeout, size: int) -> None:
        self.num_bytes += size - self._sizes.pop(timeout, 0)
        if size:
            self._sizes[timeout] = size
        while self.num_bytes > MAX_WHOLE_BODIES * self._settings.max_body_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.num_bytes -= self._sizes.pop(largest)
            largest.reschedule(0)

    async def _whole(self, request: Request, timeout: asyncio.Timeout) -> bytes:
        body, most, is_too_long = bytearray(), self._settings.max_body_bytes, False
        now = asyncio.get_running_loop().time
        end = now() + self._settings.stall_seconds
        try:
            async with asyncio.timeout_at(end) as limit:
                async for part in request.stream():
                    is_too_long = is_too_long or len(body) + len(part) > most
                    if is_too_long:
                        # What follows is let by while it comes: many a client reads no answer before it has sent all.
                        body.clear()
                        limit.reschedule(min(end, now() + _LET_BY))
                    else:
                        body += part
                    self._count(timeout, len(body))
        except TimeoutError:
            if not is_too_long:
                raise BadRequest("the body did not come in time", None, "request_timeout", 408) from None
        except ClientDisconnect:
            raise ClientGone from None
        if is_too_long:
            raise BadRequest(f"the body has more than {most} bytes", None, "request_too_large", 413)
        return bytes(body)


class EventStream(StreamingResponse):
    """Server-sent events. on_end: called when no more come, or the client has hung up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):  # nobody is there to be told
                async with aclosing(self._events):
                    await while_connected(receive, self.stream_response(send))
        finally:
            self._on_end()
