"""At every await: a client hangs up, or the task of a request, of an iteration or of the engine's client is cancelled.

A request is given a number of turns of the event loop first, for each number until it has ended by itself. After it
nothing of it is left, and its neighbours and the next requests have their own answers.
"""

import asyncio
import json
from collections.abc import Callable
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from mla_compile.engine.stats import EngineStats
from mla_compile.serving import engine_client, processes
from mla_compile.serving.engine_client import EngineClient
from mla_compile.serving.grammars import GrammarCheck
from mla_compile.serving.messages import ModelLimits, Ready
from mla_compile.serving.settings import ServerSettings
from tests.engine.engines import engine, finish, pool_of
from tests.serving.test_app import app_of
from tests.serving.test_isolation import CHAT_TEMPLATE, Playing, read

WHOLE = {"model": "shipped", "max_tokens": 40, "seed": 3}
CHAT = WHOLE | {"messages": [{"role": "user", "content": "Hello there"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", WHOLE | {"prompt": ["one", "two"], "logprobs": 1}),
    "streamed": ("/v1/completions", WHOLE | {"prompt": "In the beginning", "n": 2, "stream": True}),
    "chat": ("/v1/chat/completions", CHAT | {"stream": True}),
    "grammar": ("/v1/completions", WHOLE | {"prompt": "one", "structured_outputs": {"regex": "[a-z]+"}}),
    "tokenized in a thread": ("/tokenize", {"prompt": "long " * 4000}),
}


class Client:
    """A client of the app. left: whether it hangs up. address: its own."""

    def __init__(self, app: Any, path: str, fields: dict[str, Any], address: str = "10.0.0.1") -> None:
        self.address = address
        self.app, self.path, self.body, self.left = app, path, json.dumps(fields).encode(), asyncio.Event()
        self.sent: list[Message] = []

    async def _receive(self) -> Message:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.sent.append(message)

    async def run(self) -> tuple[int, Any]:
        scope = {"type": "http", "method": "POST", "path": self.path, "query_string": b"", "headers": []}
        await self.app(scope | {"client": (self.address, 1)}, self._receive, self._send)
        start, *parts = self.sent
        return start["status"], read(b"".join(part.get("body", b"") for part in parts))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def hang_up(client: Client, _: asyncio.Task[Any]) -> None:
    client.left.set()


def cancel(_: Client, task: asyncio.Task[Any]) -> None:
    task.cancel()


@pytest.mark.parametrize("end", [hang_up, cancel])
@pytest.mark.parametrize("kind", REQUESTS)
def test_of_a_request(
    kind: str, end: Callable[[Client, asyncio.Task[Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarCheck, "_ask", lambda *_: None)  # in no process
    app, server = app_of()
    playing = server._client = Playing(server.settings)
    server._vocabulary.tokenizer.chat_template = CHAT_TEMPLATE
    path, fields = REQUESTS[kind]

    async def run() -> int:
        expected = await Client(app, path, fields).run()
        assert expected[0] == 200
        beside = await Client(app, *REQUESTS["streamed"]).run()
        count = 0
        while True:
            client, neighbour = Client(app, path, fields), Client(app, *REQUESTS["streamed"], "10.0.0.2")
            task = asyncio.create_task(client.run())
            other = asyncio.create_task(neighbour.run())
            await turns(count)
            has_ended = task.done()
            end(client, task)
            async with asyncio.timeout(10):
                await asyncio.gather(task, return_exceptions=True)
                clients = {answer.client for answer, _ in playing._answers.values()}
                assert client.address not in clients, "its completions were aborted"
                await asyncio.gather(other, return_exceptions=True)
                await asyncio.gather(*playing.tasks)
            assert other.result() == beside, count
            assert playing.num_running == server._bodies.num_bytes == 0, count
            if has_ended:
                assert task.result() == expected
                return count
            if not count % 8:
                assert await Client(app, path, fields).run() == expected, count
            await turns(2)
            assert len(asyncio.all_tasks()) == 1, "a task is left"
            count += 1 + count // 64  # a thread takes many

    assert asyncio.run(run()) > 5


@pytest.mark.parametrize("lag", [0, 1])
def test_of_an_iteration_over_a_request(lag: int) -> None:
    prompts = [[1, 2, 3], [4] * 9, [5, 6]]
    expected = [each.token_ids for each in engine(1).generate(prompts, max_new_tokens=24)]

    async def run() -> int:
        mine = engine(1, max_rows=2)
        mine.report_lag = lag
        for count in range(1000):
            requests = [mine.add(prompt, max_new_tokens=24) for prompt in prompts]

            async def client(request: Any) -> list[int]:
                return [token async for token in request]

            first, *others = [asyncio.create_task(client(request)) for request in requests]
            await turns(count)
            is_complete, has_ended = requests[0].has_ended, first.done()
            first.cancel()
            async with asyncio.timeout(10):
                assert await asyncio.gather(*others) == expected[1:], count
                await asyncio.wait([first])
            if count:  # else the iteration, which aborts it, has not begun
                assert requests[0].completion.finish_reason == ("length" if is_complete else "abort"), count
            finish(mine)
            assert pool_of(mine).num_free == pool_of(mine).num_pages - 1
            if has_ended:
                assert first.result() == expected[0]
                return count
        raise AssertionError

    assert asyncio.run(run()) > 5


@pytest.mark.parametrize("call", ["start", "stop"])
def test_of_the_start_and_the_end_of_the_engines_process(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is a pipe that is ready at once, and it is ended."""
    pipes: list[Any] = []
    connections: list[Any] = []

    def start(_: str) -> Any:
        ours, theirs = Pipe()
        theirs.send(Ready(ModelLimits("shipped", 99, 64), EngineStats(max_rows=2)))
        pipes.append(theirs)
        connections.append(ours)
        return SimpleNamespace(pid=0), ours

    def end(_: Any) -> int:
        pipes.pop().close()
        return 0

    monkeypatch.setattr(processes, "start", start)
    monkeypatch.setattr(processes, "end", end)
    monkeypatch.setattr(engine_client, "_FIRST_WAIT", 0.001)

    async def run(count: int) -> bool:
        client = EngineClient(ServerSettings())
        if call == "stop":
            await client.start()
            answer = client.submit([])
            assert not answer.has_more()
        task = asyncio.create_task(getattr(client, call)())
        await turns(count)
        has_ended = task.done()
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(10):
            await client.stop()
            while not all(each.closed for each in connections):  # by a thread, once the process has ended
                await asyncio.sleep(0.001)
        assert client.num_running == 0 and not pipes
        return has_ended

    ended = [asyncio.run(run(count)) for count in [*range(12), 20_000]]
    assert ended[-1] and not ended[0]
