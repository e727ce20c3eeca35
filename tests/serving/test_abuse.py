"""Any input gets an answer or a closed connection, never an internal error, and the engine keeps running."""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from benchmarks.http_client import Answer, Connection, ask, connected, metrics
from tests.serving.load import is_idle, num_sockets
from tests.serving.servers import ServerProcess, children, served

KEY = "a-key"
AUTHORIZED = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
ALLOWED = {200, 307, 400, 401, 403, 404, 405, 408, 413, 421, 429, 431, 503}
"""Allowed statuses. 503: the engine is not ready, which here means that something has killed it."""
NUM_REQUESTS = int(os.environ.get("ABUSE_REQUESTS", "2000"))
"""Of `make load`."""
CLIENTS = 16
DELAY = 0.2
"""Seconds between the parts of a request that comes slowly."""

FLAGS = ["--max-model-len", "16", "--max-waiting", "32"]
# So long that few new tokens fit, whatever max_tokens becomes: a mutant that is a good request is soon answered.
IDS = [5, 6, 7, 8]
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "shipped", "prompt": IDS, "max_tokens": 3, "temperature": 0.5, "seed": 1}),
    (
        "/v1/completions",
        {
            "model": "shipped",
            "prompt": IDS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 2,
            "stop": ["a", "b"],
            "draft_positions": True,
            "max_drafts": 1,
            "logprobs": 2,
        },
    ),
    (
        "/v1/completions",
        {
            "model": "shipped",
            "prompt": [IDS, IDS],
            "max_tokens": 2,
            "structured_outputs": {"regex": "[ab]+"},
            "response_format": None,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.1,
            "stop_token_ids": [3],
        },
    ),
    (
        "/v1/chat/completions",
        {
            "model": "shipped",
            "messages": MESSAGES,
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "reasoning_effort": "none",
            "chat_template_kwargs": {},
        },
    ),
    ("/tokenize", {"model": "shipped", "prompt": "some text", "add_special_tokens": True}),
]
ODD = [
    *(["null", "true", "-1", "0", "1.5", "2147483648", "9223372036854775808", "1e308", "1e400", "NaN"]),
    *(['""', '"5"', '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]", "[null]"]),
    '{"": {}}',
    "9" * 400,
    json.dumps("long " * 20_000),
    json.dumps([0] * 5000),
    "[" * 400 + "]" * 400,
    json.dumps({str(i): i for i in range(500)}),
]
"""As JSON: each use makes a value of its own."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all that is in a JSON value."""
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    )
    for key, each in inside:
        yield (*path, key)
        yield from _places(each, (*path, key))


def _odd(rng: random.Random) -> Any:
    return json.loads(rng.choice(ODD))


def mutated(body: dict[str, Any], rng: random.Random) -> bytes:
    """A body with mistakes in its JSON, its bytes, or both."""
    value = json.loads(json.dumps(body))
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        *path, last = rng.choice(list(_places(value)) or [("model",)])
        at = value
        for key in path:
            at = at[key]
        how = rng.randrange(4)
        if how == 0:
            del at[last]
        elif how == 1 and isinstance(at, dict):
            at[rng.choice(["tools", "echo", "x" * 1000, "ünknown", ""])] = _odd(rng)
        else:
            at[last] = _odd(rng)
    found = bytearray(json.dumps(value).encode())
    for _ in range(rng.choice([0, 0, 1, 3])):
        if not found:
            break
        at, size = rng.randrange(len(found)), rng.randrange(1, 9)
        how = rng.randrange(4)
        if how == 0:
            found[at : at + size] = rng.randbytes(size)
        elif how == 1:
            del found[at : at + size]
        elif how == 2:
            found[at:at] = rng.choice(
                [b"\xff", b"\xed\xa0\x80", b"\0", b"[" * 10_000, b'"', b"1e999", b"\\u"]
            )
        else:
            del found[max(1, at) :]
    return bytes(found)


class _Ended(Exception):
    """A connection is not for another request."""


class Abuser:
    """One client of bad manners. seen: how often each status came; 0: it hung up, or was hung up on."""

    def __init__(self, url: str, seed: int, seen: Counter[int], wrong: list[str]) -> None:
        self.url, self.rng, self.seen, self.wrong = url, random.Random(seed), seen, wrong
        self.kinds: dict[Callable[[Connection], Awaitable[None]], int] = {
            self.bad_body: 60,
            self.bad_key: 8,
            self.bad_route: 10,
            self.bad_header: 8,
            self.bad_chunks: 5,
            self.garbage: 3,
            self.pipelined: 3,
            self.truncated: 3,
            self.oversized: 1,
            self.slow: 1,
        }

    async def abuse(self, count: int) -> None:
        """`count` requests, a few on each connection."""
        kinds, weights = list(self.kinds), list(self.kinds.values())
        while count > 0:
            async with connected(self.url) as connection:
                for _ in range(self.rng.randint(1, 20)):
                    kind = self.rng.choices(kinds, weights)[0]
                    count -= 1
                    try:
                        async with asyncio.timeout(60):
                            await kind(connection)
                    except _Ended:
                        break
                    # Closed by the server: the request was not HTTP, or made the parser close.
                    except (OSError, EOFError):
                        self.seen[0] += 1
                        break
                    except TimeoutError:
                        self.wrong.append(f"{kind.__name__}: no answer")
                        break

    async def expect_answer(self, connection: Connection, what: bytes) -> None:
        """Read one answer and check that it is one to a bad or a good request."""
        answer = await connection.answer()
        if answer.status == 100:  # go on
            answer = await connection.answer()
        self.seen[answer.status] += 1
        if answer.status not in ALLOWED or b"server_error" in answer.body or not _is_shaped(answer):
            self.wrong.append(f"{what[:300]!r}: {answer.status} {answer.body[:300]!r}")
        if answer.headers.get("connection") == "close":
            raise _Ended

    async def post(self, connection: Connection, path: str, body: bytes, **headers: str) -> None:
        await connection.send("POST", path, body, **{**AUTHORIZED, **headers})
        await self.expect_answer(connection, body)

    async def raw(self, connection: Connection, data: bytes, *, ends: bool = False) -> None:
        """ends: whether the client half-closes the connection."""
        connection.writer.write(data)
        await connection.writer.drain()
        if ends:
            connection.writer.write_eof()
        await self.expect_answer(connection, data)
        if ends:
            raise _Ended

    def head(self, line: str = "POST /v1/completions HTTP/1.1", **headers: str) -> bytes:
        given = {"Host": "localhost", **AUTHORIZED, **headers}
        lines = [line, *(f"{name}: {value}" for name, value in given.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1")

    # --- kinds

    async def bad_body(self, connection: Connection) -> None:
        path, body = self.rng.choice(BODIES)
        await self.post(connection, path, mutated(body, self.rng))

    async def bad_key(self, connection: Connection) -> None:
        wrong = [
            "",
            "Bearer",
            "Bearer ",
            "Bearer b",
            f"Bearer {KEY}x",
            "Basic YQ==",
            "Bearer \xff\xfe",
            "x" * 5000,
        ]
        path, _ = self.rng.choice(BODIES)
        head = self.head(
            f"POST {path} HTTP/1.1", Authorization=self.rng.choice(wrong), **{"Content-Length": "2"}
        )
        await self.raw(connection, head + b"{}")

    async def bad_route(self, connection: Connection) -> None:
        paths = [
            "/",
            "/v1",
            "/v1/models/..%2f..",
            "/v1/models/" + "é%00" * 99,
            "//",
            "/%ff%fe",
            "/metrics/x",
            "/v1/completions",
        ]
        paths += [
            "/v1/completions/?x=%",
            "*",
            "http://other/v1/models",
            "/../../etc/passwd",
            "/ready?" + "a=b&" * 900,
            "/docs",
        ]
        method = self.rng.choice(["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "POST", "FROB"])
        line = f"{method} {self.rng.choice(paths)} HTTP/1.1".encode().decode("latin-1")
        await self.raw(connection, self.head(line, **{"Content-Length": "0"}))

    async def bad_header(self, connection: Connection) -> None:
        odd: dict[str, str] = self.rng.choice(
            [
                {"Content-Length": "-1"},
                {"Content-Length": "2, 3"},
                {"Content-Length": "9" * 400},
                {"Content-Length": "zwei"},
                {"Content-Length": "2", "Transfer-Encoding": "chunked"},
                {"Transfer-Encoding": "gzip"},
                {"Content-Length": "2", "X": "y" * 70_000},
                {"Content-Length": "2", **{f"X-{i}": "y" for i in range(500)}},
                {"Content-Length": "2", "X": "a\0b"},
                {"Content-Length": "2", "Host": "evil.example"},
                {"Content-Length": "2", "Host": "[::1"},
                {"Content-Length": "2", "Origin": "null"},
                {"Content-Length": "2", "Origin": "http://localhost\x1b"},
                {"Content-Length": "2", "Bad Name": "x"},
                {"Content-Length": "2", "Expect": "100-continue"},
                {"Content-Length": "2", "Expect": "the-unexpected"},
                {"Content-Length": "2", "Content-Encoding": "gzip"},
                {"Content-Length": "2", "Content-Type": "multipart/form-data"},
                {
                    "Content-Length": "2",
                    "Connection": "Upgrade",
                    "Upgrade": "websocket",
                    "Sec-WebSocket-Version": "13",
                },
                {"Content-Length": "2", "Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"},
            ]
        )
        line = self.rng.choice(
            ["POST /tokenize HTTP/1.1", "POST /tokenize HTTP/1.0", "POST /v1/completions HTTP/9.9"]
        )
        await self.raw(connection, self.head(line, **odd) + b"{}", ends=True)

    async def bad_chunks(self, connection: Connection) -> None:
        body = json.dumps(self.rng.choice(BODIES)[1]).encode()
        odd = [
            b"zz\r\nab\r\n0\r\n\r\n",
            b"-5\r\nab\r\n0\r\n\r\n",
            b"2\r\nabcdef\r\n0\r\n\r\n",
            b"0\r\n\r\n",
            b"ffffffffffffffff\r\n{}",
        ]
        odd += [
            b"5;" + b"x" * 5000 + b"\r\nabcde\r\n0\r\n\r\n",
            b"%x\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (len(body), body),
            b"2\r\n{}\r\n",
        ]
        await self.raw(
            connection, self.head(**{"Transfer-Encoding": "chunked"}) + self.rng.choice(odd), ends=True
        )

    async def garbage(self, connection: Connection) -> None:
        odd = [
            self.rng.randbytes(300),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"\r\n" * 200 + b"x",
            b"GET\r\n\r\n",
        ]
        odd += [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"A" * 100_000, b"GET / HTTP/1.1\r\n\r\n", b"{}"]
        await self.raw(connection, self.rng.choice(odd), ends=True)

    async def pipelined(self, connection: Connection) -> None:
        """Several requests at once are answered one by one."""
        count, data = self.rng.randint(2, 5), b""
        for _ in range(count):
            path, body = self.rng.choice(BODIES)
            text = mutated(body, self.rng)
            data += self.head(f"POST {path} HTTP/1.1", **{"Content-Length": str(len(text))}) + text
        connection.writer.write(data)
        for _ in range(count):
            await self.expect_answer(connection, data)

    async def truncated(self, connection: Connection) -> None:
        """Hangs up before all of it is there."""
        path, body = self.rng.choice(BODIES)
        data = (
            self.head(f"POST {path} HTTP/1.1", **{"Content-Length": str(10**6)}) + json.dumps(body).encode()
        )
        connection.writer.write(data[: self.rng.randrange(len(data))])
        self.seen[0] += 1
        raise _Ended

    async def oversized(self, connection: Connection) -> None:
        """A body beyond the limit: refused when that much has come; the rest meets a closed socket."""
        connection.writer.write(self.head(**{"Content-Length": str(2**33)}))
        for _ in range(80):
            connection.writer.write(b" " * 2**16)
            await connection.writer.drain()
        await self.expect_answer(connection, b"oversized")
        raise _Ended  # what it still waits for will not come

    async def slow(self, connection: Connection) -> None:
        path, body = self.rng.choice(BODIES)
        text = mutated(body, self.rng)
        data = self.head(f"POST {path} HTTP/1.1", **{"Content-Length": str(len(text))}) + text
        step = len(data) // 5 + 1
        for begin in range(0, len(data), step):
            connection.writer.write(data[begin : begin + step])
            await asyncio.sleep(DELAY)
        await self.expect_answer(connection, data)


def _is_shaped(answer: Answer) -> bool:
    """Whether an error has OpenAI's form, or is the HTTP parser's plain text."""
    if answer.status < 400 or not answer.headers.get("content-type", "").startswith("application/json"):
        return answer.status in (200, 307, 400)
    return {"message", "type", "param", "code"} == answer.json()["error"].keys()


GOOD = {"model": "shipped", "prompt": "In the", "max_tokens": 8, "temperature": 0, "draft_positions": True}


async def _good(url: str) -> Any:
    async with connected(url) as connection:
        await connection.send("POST", "/v1/completions", json.dumps(GOOD).encode(), **AUTHORIZED)
        answer = await connection.answer()
        assert answer.status == 200, answer
        return answer.json()["choices"]


async def abuse(server: ServerProcess, count: int, seed: int) -> tuple[Counter[int], list[str]]:
    url, pid = server.url(), server.process.pid
    before, engine, sockets = await _good(url), children(pid)[0], num_sockets(pid)
    seen, wrong = Counter[int](), list[str]()
    async with asyncio.TaskGroup() as group:
        for i in range(CLIENTS):
            group.create_task(Abuser(url, seed * CLIENTS + i, seen, wrong).abuse(count // CLIENTS))
    assert await _good(url) == before, "the engine answers as before"
    assert children(pid)[0] == engine, "and it is the same process"
    async with asyncio.timeout(30):
        while not is_idle(now := await metrics(url)):
            await asyncio.sleep(0.1)
        while num_sockets(pid) > sockets + 1:
            await asyncio.sleep(0.1)
    assert (await ask(url, "GET", "/health")).status == 200 and now["mla_ready"] == 1
    return seen, wrong


@pytest.mark.parametrize("count", [400, pytest.param(NUM_REQUESTS, marks=pytest.mark.load)])
def test_requests_of_all_bad_kinds_do_no_harm(count: int) -> None:
    with served(*FLAGS, MLA_COMPILE_API_KEY=KEY) as server:
        seen, wrong = asyncio.run(abuse(server, count, seed=count))
        log = "".join(server.log)
    print(f"{seen.total()} answers: {sorted(seen.items())}")
    assert not wrong, "\n".join(wrong[:5])
    assert seen.total() >= 0.9 * count and seen[400] > 0.3 * count, seen
    assert "Traceback" not in log, log[-5000:]
