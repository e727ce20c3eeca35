"""Reads bodies and writes answers; a client that disconnects or stalls ends its request."""

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
"""Bound of all bodies together, in multiples of `max_body_bytes`."""
_DRAIN_SECONDS = 1.0
"""Seconds to wait for the next part of a body that is too long."""


class ClientGone(Exception):
    """The client has disconnected."""


async def gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`.

    Raises:
        ClientGone: the client disconnected first; the work was cancelled.
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
    """Request bodies that are not parsed yet.

    If they exceed their bound together, the largest are dropped, so clients with short bodies are not affected.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._sizes: dict[asyncio.Timeout, int] = {}  # by the timeout that ends the request
        self.num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body, which counts toward the bound until the context ends.

        Raises:
            BadRequest: it is too long, or does not arrive in time. ClientGone: the client disconnected.
            BodiesFull: it was dropped, possibly within the context.
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
                        # Reads and drops the rest as it arrives: many clients send all before they read a response.
                        body.clear()
                        limit.reschedule(min(end, now() + _DRAIN_SECONDS))
                    else:
                        body += part
                    self._count(timeout, len(body))
        except TimeoutError:
            if not is_too_long:
                raise BadRequest("the body did not arrive in time", None, "request_timeout", 408) from None
        except ClientDisconnect:
            raise ClientGone from None
        if is_too_long:
            raise BadRequest(f"the request body exceeds {most} bytes", None, "request_too_large", 413)
        return bytes(body)


class EventStream(StreamingResponse):
    """Server-sent events. on_end: called after the last event, or when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):  # there is no client to answer
                async with aclosing(self._events):
                    await while_connected(receive, self.stream_response(send))
        finally:
            self._on_end()
