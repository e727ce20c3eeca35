"""Input before any check of a key: heads of any size, in any pieces, on many connections.

Only private counters show what a connection holds.
"""

import asyncio
import json
import random
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from mla_compile.serving import protocol
from mla_compile.serving.protocol import MAX_HEAD_BYTES, MAX_HEADERS, BoundedHttp
from tests.serving.servers import served

SLACK = 4096
"""Within this many bytes of a bound either answer is right."""


class Transport(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = self.has_ended = self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        assert not self.has_ended
        self.written += b"" if self.is_closed else data

    def write_eof(self) -> None:
        self.has_ended = True

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", self.written)]


async def whole(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that reads a request to its end, and answers 200."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


class Connections:
    """Connections to an app, without sockets."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]] = whole) -> None:
        self._config = uvicorn.Config(app, log_config=None, ws="none", lifespan="off", timeout_keep_alive=60)
        self._config.load()
        self._state = ServerState()
        self.open: list[BoundedHttp] = []

    def connect(self) -> tuple[BoundedHttp, Transport]:
        connection, transport = BoundedHttp(self._config, self._state, {}), Transport()
        connection.connection_made(transport)
        self.open.append(connection)
        return connection, transport

    def close(self) -> None:
        for each in self.open:
            each.connection_lost(None)
        assert BoundedHttp.all_held == 0


def run(test: Callable[[Connections], Awaitable[None]], app: Any = whole) -> None:
    async def body() -> None:
        connections = Connections(app)
        try:
            await test(connections)
        finally:
            connections.close()

    asyncio.run(body())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# ---- one connection


GOOD = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\n\r\nabc"


@dataclass(frozen=True)
class Drawn:
    """data: of good requests, and of one more. is_refused: whether that one is; None where either is right."""

    data: bytes
    num_good: int
    is_refused: bool | None


def drawn(rng: random.Random) -> Drawn:
    large = rng.choice(["url", "header", "headers", "extension", "trailer", "trailers", "lines", "body"])
    size = int(MAX_HEAD_BYTES * rng.choice([0.01, 0.3, 0.8, 0.95, 1.1, 1.5, 5]) * rng.uniform(0.97, 1))
    many = int(MAX_HEADERS * rng.choice([0.1, 0.8, 0.98, 1, 1.02, 1.1, 5]))
    count = rng.randint(0, 9)
    if large in ("headers", "trailers"):
        count = many
    lines = [b"x-%d: %b" % (i, b"y" * rng.randint(0, 20)) for i in range(count)]
    if large in ("header", "trailer"):
        lines.insert(rng.randint(0, count), rng.choice([b"z: %b", b"%b: z"]) % (b"z" * size))
    block = b"".join(line + b"\r\n" for line in lines)
    is_chunked = large in ("extension", "trailer", "trailers")
    head = b"\r\n" * (size // 2) if large == "lines" else b""
    head += b"POST /%b HTTP/1.1\r\nhost: h\r\n" % (b"u" * size if large == "url" else b"")
    body = b"b" * (10 * size if large == "body" else 5)
    if is_chunked:
        head += b"transfer-encoding: chunked\r\n\r\n"
        between = b"5;%b\r\n" % (b"e" * size) if large == "extension" else b"5\r\n"
        tail = b"\r\n0\r\n%b\r\n" % block
        runs, data = [head, between, tail], head + between + body + tail
    else:
        head += b"content-length: %d\r\n%b\r\n" % (len(body), block)
        runs, data = [head], head + body
    longest, num_headers = max(map(len, runs)), 2 + len(lines)
    is_refused = longest > MAX_HEAD_BYTES or num_headers > MAX_HEADERS
    num_good = rng.choice([0, 0, 1, 3])
    is_close = num_headers <= MAX_HEADERS and (
        -SLACK * (1 + 2 * num_good) <= longest - MAX_HEAD_BYTES <= SLACK  # those that wait count together
        or (num_good > 0 and len(body) > MAX_HEAD_BYTES / 2)  # and so do their bodies
    )
    return Drawn(GOOD * num_good + data, num_good, None if is_close else is_refused)


def pieces(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """As they may come: all at once, byte by byte for a while, or cut anywhere."""
    longest, begin = rng.choice([50, 5000, 2**18]), 0
    if len(data) > 10**5:
        longest = max(longest, 5000)
    while begin < len(data):
        end = begin + rng.randint(1, longest)
        yield data[begin:end]
        begin = end


def test_heads_of_all_shapes_are_answered_or_refused_with_431_however_they_come() -> None:
    num_refused = 0

    async def test(connections: Connections) -> None:
        nonlocal num_refused
        for seed in range(200):
            rng = random.Random(seed)
            case = drawn(rng)
            connection, transport = connections.connect()
            for piece in pieces(rng, case.data):
                connection.data_received(piece)
                held = connection._head_bytes + connection._new_bytes
                assert held <= 2 * MAX_HEAD_BYTES and connection._held <= 3 * MAX_HEAD_BYTES, seed
                if rng.random() < 0.2:
                    await settled()
            await settled()
            *before, last = transport.statuses or [0]
            if case.is_refused is None:
                continue
            # A refusal does not stand amid the answer to a request before: the connection is closed then.
            is_refused = last == 431 or (transport.is_closed and len(transport.statuses) <= case.num_good)
            assert is_refused == case.is_refused, (seed, transport.statuses)
            num_refused += is_refused
            assert set(before) <= {200}, seed
            if not is_refused:
                assert transport.statuses == [200] * (case.num_good + 1), seed
            elif last == 431:
                assert transport.has_ended and len(before) <= case.num_good
                error = json.loads(transport.written.rpartition(b"\r\n\r\n")[2])["error"]
                assert re.search("65536 bytes|128 headers", error["message"])
                connection.data_received(b"x" * 10**6)  # is dropped
                assert connection._held == 0

    run(test)
    assert 50 < num_refused < 150


def test_requests_that_wait_for_the_one_before_are_bounded_together() -> None:
    go = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await whole(scope, receive, send)

    async def test(connections: Connections) -> None:
        for seed in range(30):
            rng = random.Random(seed)
            go.clear()
            connection, transport = connections.connect()
            request = GOOD.replace(b"/ ", b"/%b " % (b"u" * rng.choice([0, 500, 5000])))
            each = len(request) + 4096  # with what Python makes of it
            fits = rng.choice([True, False])
            num_sent = int(MAX_HEAD_BYTES / each * (rng.uniform(0.1, 0.8) if fits else rng.uniform(1.3, 99)))
            for piece in pieces(rng, request * num_sent):
                connection.data_received(piece)
            await settled()
            assert len(connection.pipeline) <= MAX_HEAD_BYTES // each + 1
            assert transport.is_closed != fits
            go.set()
            await settled()
            if not transport.is_closed:
                assert transport.statuses == [200] * num_sent
                connection.data_received(request)
                await settled()
                assert transport.statuses == [200] * (num_sent + 1), "an idle connection begins from nothing"

    run(test, waits)


def test_bodies_of_requests_that_wait_count_too() -> None:
    async def test(connections: Connections) -> None:
        for size, is_closed in ((MAX_HEAD_BYTES // 2, False), (2 * MAX_HEAD_BYTES, True)):
            connection, transport = connections.connect()
            body = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size + b"b" * size
            connection.data_received(body)
            await settled()
            assert transport.statuses == [200], "a body that need not wait may have any length"
            connection.data_received(GOOD + body)
            assert transport.is_closed == is_closed
            await settled()
            assert transport.statuses == [200] if is_closed else [200] * 3

    run(test)


BEHIND = {
    "nothing": b"",
    "a request": GOOD,
    "a part of one": GOOD[:-1],
    "too many": GOOD.replace(b"/ ", b"/%b " % (b"u" * 20_000)) * 4,
    "no HTTP": b"\0",
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("comes_later", [False, True])
def test_a_client_that_hangs_up_ends_its_request_whatever_it_has_sent_behind_it(
    behind: str, comes_later: bool
) -> None:
    begun = ended = 0

    async def works(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun, ended
        begun += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        ended += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def test(connections: Connections) -> None:
        connection, transport = connections.connect()
        for data in (GOOD, BEHIND[behind]) if comes_later else (GOOD + BEHIND[behind],):
            connection.data_received(data)
            await settled()
        assert not transport.is_paused, "the end of a connection is read, too"
        assert transport.is_closed == (behind in ("too many", "no HTTP"))
        connection.connection_lost(None)
        await settled()
        assert (begun, ended, transport.written) == (1, 1, b"")

    run(test, works)


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"0\r\n%b\r\n" % (b"t: x\r\n" * 300), 431),
        (b"1;%b\r\n" % (b"e" * 2 * MAX_HEAD_BYTES), 431),
        (b"zz\r\n", 400),
    ],
)
def test_what_is_wrong_with_a_body_is_the_answer_unless_that_has_begun(
    rest: bytes, status: int, is_answered: bool
) -> None:
    async def works(scope: Scope, receive: Receive, send: Send) -> None:
        if is_answered:
            await send({"type": "http.response.start", "status": 202, "headers": []})
        await whole(scope, receive, send)

    async def test(connections: Connections) -> None:
        connection, transport = connections.connect()
        connection.data_received(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
        await settled()
        connection.data_received(rest)
        await settled()
        assert transport.statuses == [202 if is_answered else status]
        assert transport.is_closed == is_answered and transport.has_ended != is_answered

    run(test, works)


def test_one_request_after_the_other_may_bring_any_number_of_bytes() -> None:
    async def test(connections: Connections) -> None:
        connection, transport = connections.connect()
        rng = random.Random(0)
        for _ in range(50):
            data = GOOD.replace(b"/ ", b"/%b " % (b"u" * rng.randint(0, 50_000)))
            for piece in pieces(rng, data):
                connection.data_received(piece)
            await settled()
        assert transport.statuses == [200] * 50

    run(test)


def test_small_chunks_of_a_long_body_are_no_head() -> None:
    async def test(connections: Connections) -> None:
        connection, transport = connections.connect()
        connection.data_received(b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(100):
            connection.data_received(b"1\r\nx\r\n" * 1000)
            await settled()
        connection.data_received(b"0\r\n\r\n")
        await settled()
        assert transport.statuses == [200]

    run(test)


UPGRADE = b"connection: Upgrade, HTTP2-Settings%b\r\nupgrade: h2c\r\nhttp2-settings: AAM\r\n"
BODIES = {
    b"": b"",
    b"content-length: 51\r\n": b"GET /smuggled HTTP/1.1\r\nhost: h\r\nx: %b\r\n\r\n" % (b"x" * 11),
    b"transfer-encoding: chunked\r\n": b"3\r\nabc\r\n0\r\nt: x\r\n\r\n",
}


@pytest.mark.parametrize("framing", BODIES)
def test_an_offered_upgrade_is_ignored_and_its_request_keeps_its_body(framing: bytes) -> None:
    """Java's client and `curl --http2` offer one with each request."""
    heard: list[tuple[str, bytes, list[bytes]]] = []

    async def hears(scope: Scope, receive: Receive, send: Send) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message["body"], message["more_body"]
        heard.append((scope["path"], body, [name for name, _ in scope["headers"]]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def test(connections: Connections) -> None:
        for seed in range(60):
            rng = random.Random(seed)
            heard.clear()
            connection, transport = connections.connect()
            count, closes = rng.randint(1, 14), rng.random() < 0.2
            data = b""
            for i in range(count):
                offer = UPGRADE % (b", close" if closes and i == count - 1 else b"")
                data += b"POST /%d HTTP/1.1\r\n" % i + rng.choice([offer, offer, b""]) + b"host: h\r\n"
                data += framing + b"\r\n" + BODIES[framing]
            for piece in pieces(rng, data):
                connection.data_received(piece)
                if rng.random() < 0.2:
                    await settled()
            await settled()
            body = b"abc" if b"chunked" in framing else BODIES[framing]
            assert [each[:2] for each in heard] == [(f"/{i}", body) for i in range(count)], seed
            assert not any(b"upgrade" in names for *_, names in heard)
            assert transport.statuses == [200] * count

    assert len(BODIES[b"content-length: 51\r\n"]) == 51
    run(test, hears)


def test_no_tunnel_is_opened() -> None:
    async def test(connections: Connections) -> None:
        connection, transport = connections.connect()
        connection.data_received(b"CONNECT h:1 HTTP/1.1\r\nhost: h\r\n\r\n" + GOOD)
        await settled()
        assert transport.statuses == [501] and transport.has_ended

    run(test)


# ---- many connections


def test_heads_of_all_connections_are_bounded_and_the_largest_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound = 2**20
    monkeypatch.setattr(protocol, "MAX_HELD_BYTES", bound)

    async def test(connections: Connections) -> None:
        rng = random.Random(0)
        num_refused = num_answered = 0
        endless = [connections.connect() for _ in range(100)]
        for connection, _ in endless:
            connection.data_received(b"GET / HTTP/1.1\r\n")
        for _ in range(2000):
            connection, transport = rng.choice(endless)
            connection.data_received(b"x-%d: " % rng.randrange(9) + b"y" * rng.randint(1, 9000) + b"\r\n")
            assert BoundedHttp.all_held == sum(each._held for each in connections.open) <= bound
            if rng.random() < 0.1:  # others come with short ones
                connection, transport = connections.connect()
                connection.data_received(GOOD)
                await settled()
                assert transport.statuses == [200]
                num_answered += 1
                connection.connection_lost(None)
                connections.open.remove(connection)
        num_refused = sum(transport.statuses == [431] for _, transport in endless)
        assert num_refused > 50 and num_answered > 100

    run(test)


def _memory(pid: int) -> float:
    """MiB that a process has."""
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(line) / 1024


@pytest.mark.load
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks the kernel for a process's memory")
def test_half_a_gigabyte_of_headers_leaves_memory_as_it_was() -> None:
    """On connections that never end their head: a few are refused, and many together hold what the bound allows."""
    line = b"x: " + b"y" * 60_000 + b"\r\n"
    with served() as server:
        pid, (host, port) = server.process.pid, server.url().removeprefix("http://").split(":")
        before, num_sent, most = _memory(pid), 0, 0.0
        clients: list[socket.socket] = []
        while num_sent < 5 * 10**8:
            client = socket.create_connection((host, int(port)), timeout=10)
            clients.append(client)
            times = 1 if len(clients) < 5_000 else 10  # one is held, ten are refused
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + times * line)
            num_sent += times * len(line)
            if len(clients) % 100 == 0:
                most = max(most, _memory(pid))
        for client in clients:
            client.close()
        print(
            f"{num_sent / 1e9:.2f} GB on {len(clients)} connections: {before:.0f} MiB, then {most:.0f} at most"
        )
    assert most < before + 200
