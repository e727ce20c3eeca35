"""A small HTTP client over asyncio's streams, so cheap that load from it measures the server."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """headers: by name in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection to a server, for one request after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        """Send a request, without reading the answer."""
        lines = {"Host": "localhost", "Content-Length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer.

        Raises:
            asyncio.IncompleteReadError: the server hangs up.
        """
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split()[1]), headers

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The parts of a body in chunks."""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def body(self, headers: Mapping[str, str]) -> bytes:
        """The whole body of an answer."""
        if headers.get("transfer-encoding") == "chunked":
            return b"".join([chunk async for chunk in self.chunks()])
        return await self.reader.readexactly(int(headers.get("content-length", "0")))

    async def answer(self) -> Answer:
        """The next answer."""
        status, headers = await self.head()
        return Answer(status, headers, await self.body(headers))

    async def stream(self, body: Any) -> AsyncGenerator[bytes]:
        """Events of `/v1/completions`, with `stream` set in the body.

        Raises:
            RuntimeError: the server refuses. asyncio.IncompleteReadError: it hangs up before the end.
        """
        as_json = {"Content-Type": "application/json"}
        await self.send("POST", "/v1/completions", json.dumps(body | {"stream": True}).encode(), **as_json)
        status, headers = await self.head()
        if status != 200:
            raise RuntimeError(f"status {status}: {(await self.body(headers)).decode()}")
        async for event in self.events():
            yield event

    async def events(self) -> AsyncGenerator[bytes]:
        """Data of the server-sent events of an answer whose head has been read, up to `[DONE]`."""
        rest = b""
        async for chunk in self.chunks():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                yield event.removeprefix(b"data: ")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """A connection to a server's URL."""
    address = urlsplit(url)
    connection = Connection(*await asyncio.open_connection(address.hostname, address.port))
    try:
        yield connection
    finally:
        connection.writer.transport.abort()


async def ask(url: str, method: str, path: str, body: Any = None) -> Answer:
    """One request with a JSON body, on a connection of its own."""
    async with connected(url) as connection:
        await connection.send(method, path, b"" if body is None else json.dumps(body).encode())
        return await connection.answer()


async def stream(url: str, body: Any) -> AsyncGenerator[bytes]:
    """As `Connection.stream`, on a connection of its own."""
    async with connected(url) as connection:
        async for event in connection.stream(body):
            yield event


async def metrics(url: str) -> dict[str, float]:
    """Samples of `/metrics` by name and labels."""
    lines = (await ask(url, "GET", "/metrics")).body.decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def quantile(before: Mapping[str, float], after: Mapping[str, float], histogram: str, part: float) -> float:
    """A quantile of a histogram between two readings of `metrics`, interpolated within a bucket."""
    prefix = f'{histogram}_bucket{{le="'
    counts = [
        (float(name.removeprefix(prefix).removesuffix('"}')), value - before[name])
        for name, value in after.items()
        if name.startswith(prefix)
    ]
    wanted, low, below = part * counts[-1][1], 0.0, 0.0
    for high, count in counts:
        if count >= wanted and count > below:
            return low + (min(high, 10 * low or high) - low) * (wanted - below) / (count - below)
        low, below = high, count
    return float("nan")
