"""Many streams at once: checks for lost streams, swapped tokens and growing processes; measures delivery time.

    python -m tests.serving.load --seconds 300

starts `mla-compile serve` on the shipped model, asks each of some requests alone, and then has `--streams` clients ask
them again and again, streamed or whole, all at once. Beside them, clients hang up in mid-answer, and others stop
reading. It prints what it saw, and exits with 1 if anything of it is wrong.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.http_client import Connection, ask, connected, metrics, quantile, stream
from tests.serving.servers import ServerProcess, children, served

PROMPTS = Path("benchmarks/held_out_prompts.json")
MODEL = "shipped" + "-" * 12_000
"""Every chunk names it. So long that an answer fills what the kernel buffers for a client that stalls, 2 MB."""
FLAGS = ["--compile", "--served-model-name", MODEL]
ENGINE_THREADS = {"OMP_NUM_THREADS": "1"}
"""The server and the load need a core, too."""

Choices = list[tuple[str, list[int], str]]
"""Text, token ids and finish reason of each."""


@dataclass(frozen=True)
class Load:
    """seconds: that it lasts; in the first third memory may grow.

    streams: clients that read what they asked for. vanishing: clients that hang up again and again.
    stalling: clients that stop reading.
    """

    seconds: float
    streams: int = 200
    vanishing: int = 10
    stalling: int = 3
    seed: int = 0


@dataclass
class Seen:
    """What a load met.

    answers: equal to the ones that the same requests got alone. wrong, lost: what was not, in words.
    dropped: of the clients that stalled. memory: MiB of each process, over time, warm-up left out.
    delivery_ms: from a report read to its bytes written. step_ms: mean. is_idle: whether all was forgotten in the end.
    """

    answers: int = 0
    tokens: int = 0
    vanished: int = 0
    dropped: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    memory: dict[str, list[float]] = field(default_factory=dict)
    delivery_ms: dict[str, float] = field(default_factory=dict)
    step_ms: float = 0.0
    is_idle: bool = False

    def growth(self, process: str) -> tuple[float, float]:
        """MiB by which memory grows: from the first third of the samples to the last, and steadily, by their medians.

        What grows once is no leak, so steadily is twice the lesser of the steps to the middle third and from it.
        """
        samples = self.memory[process]
        third = max(1, len(samples) // 3)
        parts = samples[:third], samples[third:-third] or samples, samples[-third:]
        first, middle, last = (statistics.median(part) for part in parts)
        return last - first, 2 * min(middle - first, last - middle)

    def summary(self) -> dict[str, Any]:
        """What is worth printing."""
        grown = {
            name: {"MiB": round(s[-1]), "grown": round(self.growth(name)[0], 2)}
            for name, s in self.memory.items()
        }
        share = self.delivery_ms["p99"] / self.step_ms
        return asdict(self) | {"memory": grown, "p99_of_a_step": round(share, 3)}


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Greedy and seeded ones, of different lengths, some with stop strings or several choices."""
    rng = random.Random(seed)
    texts = [text for kind in json.loads(PROMPTS.read_text()).values() for text in kind]
    found = []
    for i in range(count):
        words = rng.choice(texts).split(" ")
        begin = rng.randrange(max(1, len(words) - 40))
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": " ".join(words[begin : begin + rng.randint(2, 40)]) or "And",
            "max_tokens": rng.randint(4, 24),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "seed": rng.randrange(2**31),
            "draft_positions": True,
        }
        if i % 5 == 0:
            body["stop"] = rng.choice([["e "], [", and", "(self"]])
        if i % 7 == 0:
            body |= {"n": 2, "max_drafts": rng.randint(0, 3)}
        found.append(body)
    return found


async def whole(url: str, body: dict[str, Any]) -> Choices:
    """The answer to a request that is not streamed."""
    answer = await ask(url, "POST", "/v1/completions", body)
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.body.decode()}")
    return [(each["text"], each["token_ids"], each["finish_reason"]) for each in answer.json()["choices"]]


async def streamed(url: str, body: dict[str, Any]) -> Choices:
    """The same, put together from a stream."""
    texts, ids, reasons = [[""] * body.get("n", 1) for _ in range(3)]
    tokens: list[list[int]] = [[] for _ in ids]
    last = b""
    async for last in stream(url, body):
        if last == b"[DONE]":
            break
        for choice in json.loads(last)["choices"]:
            index = choice["index"]
            texts[index] += choice["text"]
            tokens[index] += choice["token_ids"]
            reasons[index] = choice["finish_reason"]
    if last != b"[DONE]":
        raise RuntimeError(f"a stream without an end: {last.decode()}")
    return list(zip(texts, tokens, reasons, strict=True))


class _Clients:
    """Of one load."""

    def __init__(self, url: str, load: Load, known: list[tuple[dict[str, Any], Choices]], end: float) -> None:
        self.url, self.known, self.end = url, known, end
        self.seen = Seen()
        self._rng = random.Random(load.seed)

    async def reads(self) -> None:
        """Asks on, and compares."""
        while time.monotonic() < self.end:
            body, expected = self._rng.choice(self.known)
            get = streamed if self._rng.random() < 0.9 else whole
            try:
                found = await get(self.url, body)
            except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
                self.seen.lost.append(f"{body}: {error!r}")
                continue
            self.seen.answers += 1
            self.seen.tokens += sum(len(tokens) for _, tokens, _ in found)
            if found != expected:
                self.seen.wrong.append(f"{body}: expected {expected}, got {found}")

    async def vanishes(self) -> None:
        """Hangs up again and again: while it waits, or in mid-answer."""
        while time.monotonic() < self.end:
            body = self._rng.choice(self.known)[0] | {"max_tokens": 200, "stream": self._rng.random() < 0.7}
            async with connected(self.url) as connection:
                await connection.send("POST", "/v1/completions", json.dumps(body).encode())
                some = connection.reader.readexactly(self._rng.randint(1, 10_000))
                waits = self._rng.choice([self._rng.uniform(0, 1), self.end - time.monotonic()])
                with suppress(TimeoutError, EOFError):
                    await asyncio.wait_for(some, waits)
            self.seen.vanished += 1

    async def stalls(self) -> None:
        """Asks for more than its socket holds and does not read it; the server must not wait for it for ever."""
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        host, port = self.url.removeprefix("http://").split(":")
        narrow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(narrow, (host, int(port)))
        connection = Connection(*await asyncio.open_connection(sock=narrow, limit=1))
        body = {"model": MODEL, "prompt": "In the", "max_tokens": 450, "ignore_eos": True}
        body |= {"draft_positions": True, "stream": True}
        await connection.send("POST", "/v1/completions", json.dumps(body).encode())
        while time.monotonic() < self.end:
            await asyncio.sleep(0.5)
        text = b""
        try:
            while part := await connection.reader.read(2**16):
                text += part
        except ConnectionResetError:
            pass
        self.seen.dropped += b"[DONE]" not in text
        connection.writer.transport.abort()


def megabytes(pid: int) -> float:
    """Resident memory of a process that is not a file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) / 1024


async def run(server: ServerProcess, load: Load, say: Callable[[str], None] = print) -> Seen:
    """Put a load on a server that is ready."""
    url, pid = server.url(), server.process.pid
    pids = {"server": pid, "engine": children(pid)[0]}
    bodies = requests(40, load.seed)
    known = [(body, await whole(url, body)) for body in bodies]
    say(f"{len(known)} requests asked alone")
    begin, before = time.monotonic(), await metrics(url)
    clients = _Clients(url, load, known, begin + load.seconds)
    seen = clients.seen
    seen.memory = {name: [] for name in pids}
    # Those that stall come first, so that they have time to be found out.
    kinds = {clients.stalls: load.stalling, clients.reads: load.streams, clients.vanishes: load.vanishing}
    tasks = [asyncio.create_task(kind()) for kind, count in kinds.items() for _ in range(count)]
    while time.monotonic() < clients.end:
        await asyncio.sleep(0.5)
        if time.monotonic() > begin + load.seconds / 3:
            for name, each in pids.items():
                seen.memory[name].append(megabytes(each))
    after, seconds = await metrics(url), time.monotonic() - begin
    seen.step_ms = 1e3 * seconds / (after["mla_steps_total"] - before["mla_steps_total"])
    for name, part in (("p50", 0.5), ("p99", 0.99)):
        seen.delivery_ms[name] = 1e3 * quantile(before, after, "mla_delivery_seconds", part)
    await asyncio.gather(*tasks)
    patience = time.monotonic() + 10
    while not (idle := is_idle(await metrics(url))) and time.monotonic() < patience:
        await asyncio.sleep(0.1)
    seen.is_idle = idle
    return seen


def num_sockets(pid: int) -> int:
    """That a process has open."""
    count = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            count += str(each.readlink()).startswith("socket:")
    return count


def is_idle(now: Mapping[str, float]) -> bool:
    """Whether no request holds anything, by `/metrics`."""
    return not any(now[f"mla_{name}"] for name in ("rows_in_use", "waiting", "pages_in_use"))


def problems(seen: Seen, load: Load) -> list[str]:
    """The failures found, in words."""
    found = [f"lost: {each}" for each in seen.lost[:3]] + [f"mixed up: {each}" for each in seen.wrong[:3]]
    if seen.answers < load.streams:
        found.append(f"only {seen.answers} answers")
    if not seen.is_idle:
        found.append("the engine still holds rows or pages")
    for name, samples in seen.memory.items():
        in_all, steadily = seen.growth(name)
        if in_all > 32 or steadily > 8:
            found.append(f"the {name} has grown: {samples}")
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=200)
    args = parser.parse_args()
    load = Load(args.seconds, args.streams)
    with served(*FLAGS, **ENGINE_THREADS) as server:
        seen = asyncio.run(run(server, load))
    print(json.dumps(seen.summary(), indent=1))
    if found := problems(seen, load):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
