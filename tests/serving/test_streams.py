"""Streams of events: clients that do not read are dropped, slow ones are not."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from mla_compile.serving.app import Server, create_app
from mla_compile.serving.failures import BadRequest, BodiesFull
from mla_compile.serving.server import _Uvicorn
from mla_compile.serving.settings import ServerSettings
from mla_compile.serving.streams import MAX_WHOLE_BODIES, Bodies, ClientGone, EventStream
from tests.serving import servers
from tests.serving.load import num_sockets


class Client:
    """A client that takes each message in its own time. got: what it has taken."""

    def __init__(self, takes: Callable[[int], Awaitable[object]], stays: float = 60.0) -> None:
        self.takes, self.stays = takes, stays
        self.got: list[bytes] = []
        self.num_ended = 0
        self.num_begun = self.num_left = 0

    async def send(self, message: Message) -> None:
        await self.takes(len(self.got))
        self.got.append(message.get("body", b""))

    async def receive(self) -> Message:
        await asyncio.sleep(self.stays)
        return {"type": "http.disconnect"}

    def reads(self, count: int, gap: float = 0.0) -> float:
        """Stream `count` events; return the seconds taken."""

        async def events() -> AsyncGenerator[bytes]:
            self.num_begun += 1
            try:
                for i in range(count):
                    await asyncio.sleep(gap)
                    yield b"%d" % i
            finally:
                self.num_left += 1

        def end() -> None:
            self.num_ended += 1

        async def run() -> float:
            begin = asyncio.get_running_loop().time()
            stream = EventStream(events(), on_end=end)
            await stream({"type": "http"}, self.receive, self.send)
            return asyncio.get_running_loop().time() - begin

        seconds = asyncio.run(asyncio.wait_for(run(), 30))
        assert self.num_ended == 1 and self.num_left == self.num_begun, "the stream ends without a client"
        return seconds


async def at_once(_: int) -> None:
    pass


def test_a_client_that_is_slow_gets_all() -> None:
    client = Client(lambda _: asyncio.sleep(0.1))
    client.reads(5)
    assert client.got == [b"", *(b"%d" % i for i in range(5)), b""]


def test_a_client_that_hangs_up_ends_its_stream() -> None:
    client = Client(at_once, stays=0.1)
    assert client.reads(100, gap=0.05) < 2
    assert client.got == [b"%d" % i if i >= 0 else b"" for i in range(-1, len(client.got) - 1)]


SILENCE = 0.5
REQUEST, SLOW = [f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode() for path in ("/", "/slow")]


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(4 * SILENCE if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def test_silent_clients_are_dropped_and_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def client(port: int, *parts: bytes, gap: float = 0.0) -> int:
        """Sends these, each when the one before is answered; how many were, when the server hangs up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        num_answers = 0
        for part in parts:
            await asyncio.sleep(gap)
            writer.write(part)
            if part.endswith(b"\r\n\r\n"):
                await reader.readuntil(b"\r\n\r\n")
                num_answers += 1
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        return num_answers

    async def run() -> list[int]:
        config = uvicorn.Config(answers, port=0, lifespan="off", log_config=None, timeout_keep_alive=60)
        server = _Uvicorn(config, create_app(ServerSettings(stall_seconds=SILENCE)).state.server)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            return await asyncio.gather(
                client(port),
                client(port, SLOW[:-2]),
                client(port, REQUEST, SLOW[:-2]),
                client(port, SLOW),
                client(port, *[REQUEST] * 9, gap=0.6 * SILENCE),
            )
        finally:
            server.should_exit = True
            await serving

    monkeypatch.setattr(Server, "started", lambda _: asyncio.sleep(0))  # no engine is needed
    assert asyncio.run(run()) == [0, 0, 1, 1, 9]


@pytest.mark.parametrize("ends", [True, False])
def test_a_body_that_is_too_long_is_refused_when_it_ends_or_comes_no_more(ends: bool) -> None:
    """Many clients send all before they read a response, so a closed connection would hide the error."""
    parts = [{"type": "http.request", "body": b"x" * 80, "more_body": True}] * 20
    coming = iter([*parts, {"type": "http.request", "body": b"", "more_body": False}] if ends else parts)

    async def receive() -> Message:
        for message in coming:
            return message
        return await asyncio.Future()  # the client waits for its answer

    async def read() -> None:
        bodies = Bodies(ServerSettings(max_body_bytes=100))
        async with asyncio.timeout(10), bodies.read(Request({"type": "http"}, receive)):
            raise AssertionError

    with pytest.raises(BadRequest) as caught:
        asyncio.run(read())
    assert caught.value.status == 413
    assert next(coming, None) is None, "all of it is read first"


class Sender:
    """A client that sends parts of a body, each in a message. goes: hangs up."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self.request = Request({"type": "http"}, self._messages.get)

    async def sends(self, size: int, *, more: bool = True) -> None:
        self._messages.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})
        await settled()

    async def goes(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_bodies_of_all_requests_have_a_bound_and_the_largest_go_first() -> None:
    async def run() -> None:
        bodies, go = Bodies(ServerSettings(max_body_bytes=100, stall_seconds=5.0)), asyncio.Event()

        async def reads(sender: Sender) -> int:
            async with bodies.read(sender.request) as body:
                await go.wait()  # it is parsed
                return len(body)

        def reading(count: int) -> tuple[list[Sender], list[asyncio.Task[int]]]:
            senders = [Sender() for _ in range(count)]
            return senders, [asyncio.create_task(reads(each)) for each in senders]

        large, tasks = reading(MAX_WHOLE_BODIES + 8)
        for size in (90, 9):
            for each in large:
                await each.sends(size)
                assert bodies.num_bytes <= 100 * MAX_WHOLE_BODIES
        lost = [task.done() and isinstance(task.exception(), BodiesFull) for task in tasks]
        assert sum(lost) == 8 and bodies.num_bytes == 99 * MAX_WHOLE_BODIES

        small, others = reading(30)
        for each in small:
            await each.sends(6, more=False)
        assert not any(task.done() for task in others), "short bodies are never the largest"
        kept = [i for i, is_lost in enumerate(lost) if not is_lost and not tasks[i].done()]
        assert bodies.num_bytes == 99 * len(kept) + 6 * 30 and len(kept) == MAX_WHOLE_BODIES - 2

        await large[kept[0]].sends(0, more=False)  # waits to be parsed
        await large[kept[1]].goes()
        assert isinstance(tasks[kept[1]].exception(), ClientGone)
        await large[kept[2]].sends(2)  # too long: nothing of it is kept
        tasks[kept[3]].cancel()
        await settled()
        assert bodies.num_bytes == 99 * (len(kept) - 3) + 6 * 30
        go.set()
        await settled()
        assert tasks[kept[0]].result() == 99 and [task.result() for task in others] == [6] * 30
        assert bodies.num_bytes == 99 * (len(kept) - 4)
        for i in kept[4:]:
            await large[i].goes()
        assert bodies.num_bytes == 0
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_request_that_waits_to_be_parsed_is_given_up_too_and_other_timeouts_stay() -> None:
    async def run() -> None:
        bodies = Bodies(ServerSettings(max_body_bytes=100))

        async def reads(sender: Sender, seconds: float) -> None:
            async with bodies.read(sender.request), asyncio.timeout(seconds):
                await asyncio.sleep(60)

        senders = [Sender() for _ in range(MAX_WHOLE_BODIES + 1)]
        tasks = [asyncio.create_task(reads(each, 0.1 if each is senders[-1] else 60)) for each in senders]
        for each in senders:
            await each.sends(100 if each is not senders[-1] else 1, more=False)
        assert [type(task.exception()) for task in tasks if task.done()] == [BodiesFull]
        with pytest.raises(TimeoutError):
            await tasks[-1]
        for task in tasks:
            task.cancel()
        await settled()
        assert bodies.num_bytes == 0

    asyncio.run(run())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel knows no such limit")
def test_a_client_that_stops_reading_a_stream_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        ended = asyncio.Event()

        async def endless() -> AsyncGenerator[bytes]:
            while True:
                await asyncio.sleep(0)
                yield b"x" * 2**16

        app = create_app(ServerSettings(stall_seconds=0.5))
        server = _Uvicorn(
            uvicorn.Config(EventStream(endless(), on_end=ended.set), port=0, lifespan="off", log_config=None),
            app.state.server,
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(
            *server.servers[0].sockets[0].getsockname()[:2], limit=64
        )
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n")
        begin = time.monotonic()
        async with asyncio.timeout(30):
            await ended.wait()
        assert time.monotonic() - begin > 0.4
        writer.close()
        server.should_exit = True
        await serving

    monkeypatch.setattr(Server, "started", lambda _: asyncio.sleep(0))  # no engine is needed
    asyncio.run(run())


IMPATIENT = """
from mla_compile.engine.config import EngineConfig
from mla_compile.serving.server import serve
from mla_compile.serving.settings import ServerSettings
serve(ServerSettings(engine=EngineConfig(compile=False), stall_seconds=1.0), host="127.0.0.1", port=0)
"""


@pytest.mark.load
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel knows no such limit")
def test_a_client_that_does_not_read_a_whole_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "COMMAND", [sys.executable, "-c", IMPATIENT])
    with servers.served() as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        host, port = server.url().removeprefix("http://").split(":")
        before = num_sockets(server.process.pid)
        client.connect((host, int(port)))
        client.settimeout(30)
        # 6 MB of ids: no kernel keeps them.
        body = json.dumps({"prompt": "🙂 " * 300_000}, ensure_ascii=False).encode()
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert num_sockets(server.process.pid) > before
        begin = time.monotonic()
        while num_sockets(server.process.pid) > before:  # nothing is read meanwhile
            assert time.monotonic() < begin + 30, "the server still holds its answer"
            time.sleep(0.1)
