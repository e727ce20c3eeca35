"""HTTP parsing by uvicorn and httptools within bounds, as it happens before any check of an API key."""

import json
from typing import ClassVar, NoReturn

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mla_compile.serving.failures import Failure

MAX_HEAD_BYTES = 2**16
"""Bound of a request's line and headers together, of the bytes between two parts of a body, and of trailers."""
MAX_HEADERS = 128
"""Headers of a request, trailers included."""
MAX_HELD_BYTES = 2**25
"""Bytes of the heads of all connections together."""
_PIECE = 2**12
"""Bytes parsed at a time, which is the precision of the bounds."""
_HEADER_COST, _REQUEST_COST = 2**8, 2**12
"""Bytes of Python objects for a header, and for a pipelined request."""
_LINGER_SECONDS = 1.0
"""How long data is read and dropped after a refusal: many clients send all before they read a response."""
_TOO_LONG = f"the request head exceeds {MAX_HEAD_BYTES} bytes"


class BoundedHttp(HttpToolsProtocol):
    """A connection with bounded memory for request heads; all connections together have a bound too.

    Pipelined requests of a connection count together, bodies included. If all connections exceed their bound, those
    that hold the most are closed, so clients with short heads that arrive at once are not affected.
    """

    all_held: ClassVar[int] = 0
    _held = 0
    """This connection's share of `all_held`."""
    _head_bytes = 0
    """Bytes of complete heads: of the newest request and the pipelined ones."""
    _new_bytes = 0
    """Bytes received since a head, a part of a body or a message was complete."""
    _excess = ""
    """The message of the bound that stopped the parser."""
    _is_refused = False
    _running: RequestResponseCycle | None = None
    """The request being answered; `cycle` is the newest."""

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _PIECE):
            if self._is_refused or self.transport.is_closing():
                return
            piece = data[begin : begin + _PIECE]
            self._new_bytes += len(piece)
            if self._new_bytes <= MAX_HEAD_BYTES:
                self._parse(piece)
            if max(self._new_bytes, self._head_bytes) > MAX_HEAD_BYTES:
                self._refuse(431, _TOO_LONG)
        self._hold(self._head_bytes + self._new_bytes + _HEADER_COST * len(self.headers or ()))
        while BoundedHttp.all_held > MAX_HELD_BYTES:
            ours = (each for each in self.connections if isinstance(each, BoundedHttp))
            largest = max(ours, key=lambda each: each._held)
            largest._refuse(431, f"the heads of all requests exceed {MAX_HELD_BYTES} bytes")

    def _parse(self, data: bytes) -> None:
        """Like uvicorn's `data_received`, but ignores `Upgrade`, with which the parser would end a request behind its
        head: the head is parsed again without it."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except HttpParserUpgrade as stop:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                self._refuse(501, "CONNECT: this server is no proxy")
                return
            lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            head = b"".join([b"%b %b HTTP/%b\r\n" % (method, self.url, version), *lines, b"\r\n"])
            self._head_bytes -= _REQUEST_COST  # which `on_message_begin` counts again
            self.parser = HttpRequestParser(self)  # after `Connection: close` the old one takes no more
            self._parse(head + data[stop.args[0] :])

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
        if self.parser.should_upgrade():
            return  # see `_parse`
        self._head_bytes += self._new_bytes
        self._new_bytes = 0
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # uvicorn pauses reading, which would hide a disconnect

    def on_body(self, body: bytes) -> None:
        self._new_bytes = 0
        if self.pipeline:
            self._head_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._new_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called when the parser stops. uvicorn's own would write into the response to the previous request."""
        self._refuse(431 if self._excess else 400, self._excess or msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _stop(self, excess: str) -> NoReturn:
        """Stop the parser from one of its callbacks."""
        self._excess = excess
        raise ValueError(excess)

    def _is_answering(self) -> bool:
        return not getattr(self.cycle, "response_complete", True)  # `cycle` is None before the first request

    def _hold(self, num_bytes: int) -> None:
        BoundedHttp.all_held += num_bytes - self._held
        self._held = num_bytes

    def _end(self) -> None:
        """End the running request, drop the pipelined ones, and free the data read."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        # The parser also holds a partial header.
        self.parser = self.scope = None  # type: ignore[assignment]
        self.headers, self.url = [], b""
        self._head_bytes = self._new_bytes = 0
        self._hold(0)

    def _refuse(self, status: int, message: str) -> None:
        # A refusal must not be written into a response, unless it answers that request's own body.
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
