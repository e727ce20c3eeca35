"""HTTP as uvicorn and httptools read it, within bounds: all of this comes before anybody is asked for a key."""

import json
from typing import ClassVar, NoReturn

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mla_compile.serving.failures import Failure

MAX_HEAD_BYTES = 2**16
"""Of a request's line and headers together, of what stands between two parts of a body, and of trailers."""
MAX_HEADERS = 128
"""Of a request, trailers included."""
MAX_HELD_BYTES = 2**25
"""What the heads of all connections take together."""
_PIECE = 2**12
"""Bytes that are parsed at a time: the bounds are as exact as that."""
_HEADER_COST, _REQUEST_COST = 2**8, 2**12
"""Bytes of Python objects: of a header, and of a request that waits for the answer to the one before it."""
_LINGER_SECONDS = 1.0
"""How long more is read and dropped after a refusal: many a client reads no answer before it has sent all."""
_TOO_LONG = f"the request's head has more than {MAX_HEAD_BYTES} bytes"


class BoundedHttp(HttpToolsProtocol):
    """A connection whose heads take bounded memory, as do those of all connections together.

    Requests sent before the one before them is answered count together, bodies included. Where all connections exceed
    their bound, those that hold the most are closed: a client whose head is short and comes at once loses nothing to
    others.
    """

    all_held: ClassVar[int] = 0
    _held = 0
    """This connection's part of it."""
    _head_bytes = 0
    """Of complete heads: of the newest request, and of those that wait with it."""
    _new_bytes = 0
    """Of what has come since a head, a part of a body or a message was complete."""
    _excess = ""
    """Which bound has stopped the parser."""
    _is_refused = False
    _running: RequestResponseCycle | None = None
    """The request that is answered; `cycle` is the newest."""

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _PIECE):
            if self._is_refused or self.transport.is_closing():
                return
            piece = data[begin : begin + _PIECE]
            self._new_bytes += len(piece)
            if self._new_bytes <= MAX_HEAD_BYTES:
                super().data_received(piece)
            if max(self._new_bytes, self._head_bytes) > MAX_HEAD_BYTES:
                self._refuse(431, _TOO_LONG)
        self._hold(self._head_bytes + self._new_bytes + _HEADER_COST * len(self.headers or ()))
        while BoundedHttp.all_held > MAX_HELD_BYTES:
            ours = (each for each in self.connections if isinstance(each, BoundedHttp))
            largest = max(ours, key=lambda each: each._held)
            largest._refuse(431, f"the heads of all requests have more than {MAX_HELD_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end()

    def on_message_begin(self) -> None:
        self._head_bytes = self._head_bytes + _REQUEST_COST if self._is_answering() else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self._stop(_TOO_LONG)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) == MAX_HEADERS:
            self._stop(f"the request has more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes += self._new_bytes
        self._new_bytes = 0
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn reads no more, and so would not see the client hang up

    def on_body(self, body: bytes) -> None:
        self._new_bytes = 0
        if self.pipeline:
            self._head_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._new_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser has stopped. uvicorn's own would stand amid the answer to the request before."""
        self._refuse(431 if self._excess else 400, self._excess or msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _stop(self, excess: str) -> NoReturn:
        """Stop the parser, which calls this."""
        self._excess = excess
        raise ValueError(excess)

    def _is_answering(self) -> bool:
        return not getattr(self.cycle, "response_complete", True)  # before the first request there is none

    def _hold(self, num_bytes: int) -> None:
        BoundedHttp.all_held += num_bytes - self._held
        self._held = num_bytes

    def _end(self) -> None:
        """End the request that runs, drop those that wait, and free what was read."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        # The parser has the beginning of a header, too.
        self.parser = self.scope = None  # type: ignore[assignment]
        self.headers, self.url = [], b""
        self._head_bytes = self._new_bytes = 0
        self._hold(0)

    def _refuse(self, status: int, message: str) -> None:
        # While a request is answered a refusal would stand amid that, unless it is of the request itself: of its body.
        can_answer = not self._is_answering() or (
            self.cycle is self._running and self.cycle.more_body and not self.cycle.response_started
        )
        self._is_refused = True
        self._end()
        if not can_answer or self.transport.is_closing():
            self.transport.close()
            return
        body = json.dumps(Failure(message, status=status).body()).encode()
        length = str(len(body)).encode()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", length),
            (b"connection", b"close"),
        ]
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)
