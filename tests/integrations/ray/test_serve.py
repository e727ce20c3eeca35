"""Replicas of the server on Ray Serve: requests that are sent again, and the errors of those that are not."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
openai = pytest.importorskip("openai")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from ray.exceptions import RayActorError  # noqa: E402
from ray.serve.exceptions import BackPressureError  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.types import Message  # noqa: E402

from mla_compile import MLAError, SamplingParams, generate  # noqa: E402
from mla_compile.engine import EngineConfig  # noqa: E402
from mla_compile.integrations.ray.serve import (  # noqa: E402
    APP_NAME,
    EngineLost,
    Forwarded,
    Gateway,
    Replica,
    _Merged,
    build_app,
)
from mla_compile.serving import streams  # noqa: E402
from mla_compile.serving.settings import ServerSettings  # noqa: E402
from tests.serving.test_app import app_of  # noqa: E402

ROOT = Path(__file__).parents[3]
PORT = 18_765
SETTINGS = ServerSettings(
    served_model_name="small",
    engine=EngineConfig(compile=False, num_speculative_tokens=3, max_rows=8),
    max_body_bytes=10_000,
    request_seconds=60.0,
)
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
)
"""Under the name that can be imported without vLLM and SGLang."""


def messages_of(*bodies: bytes, kind: str = "text/event-stream", status: int = 200) -> list[Message]:
    """An answer, as the app sends it."""
    headers = [(b"content-type", kind.encode())]
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    last = len(bodies) - 1
    return [
        start,
        *(
            {"type": "http.response.body", "body": body, "more_body": i < last}
            for i, body in enumerate(bodies)
        ),
    ]


class FakeAnswer:
    """Like Ray's generator of a replica's messages; an exception ends it."""

    def __init__(self, events: list[list[Message] | Exception]) -> None:
        self.events, self.was_cancelled = deque(events), False

    def __aiter__(self) -> AsyncIterator[list[Message]]:
        return self

    async def __anext__(self) -> list[Message]:
        if not self.events:
            raise StopAsyncIteration
        event = self.events.popleft()
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self) -> None:
        self.was_cancelled = True


class SlowAnswer(FakeAnswer):
    """Whose first messages come after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__([messages_of(b"slow")])
        self.seconds = seconds

    async def __anext__(self) -> list[Message]:
        await asyncio.sleep(self.seconds)
        return await super().__anext__()


class FakeReplicas:
    """As Ray's handle: each request goes to the next of these answers."""

    def __init__(self, *answers: FakeAnswer) -> None:
        self.answers, self.asked = answers, []

    def options(self, **_: Any) -> "FakeReplicas":
        return self

    def remote(self, *args: Any, **kwargs: Any) -> FakeAnswer:
        self.asked.append((args, kwargs))
        return self.answers[len(self.asked) - 1]


def ask(replicas: FakeReplicas, body: bytes = b"{}", parts: int = 1) -> tuple[int, bytes, Exception | None]:
    """Status and body of a gateway's answer, and the exception that ended it."""
    pieces = [body[i::parts] for i in range(parts)] if parts > 1 else [body]
    todo = [
        {"type": "http.request", "body": part, "more_body": i < len(pieces) - 1}
        for i, part in enumerate(pieces)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if not todo:
            await asyncio.sleep(3600)
        return todo.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        request = Request(scope_of("/v1/completions"), receive)
        response = await Gateway(replicas, SETTINGS)(request)
        await response(request.scope, receive, send)

    error: Exception | None = None
    try:
        asyncio.run(run())
    except Exception as raised:
        error = raised
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent), error


def scope_of(path: str, method: str = "POST") -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }


# --- the gateway


@pytest.mark.parametrize("num_ended", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("had_begun", [False, True])
@pytest.mark.parametrize("error", [RayActorError, EngineLost])
def test_a_request_that_was_not_answered_goes_to_another_replica(
    num_ended: int, had_begun: bool, error: type[Exception]
) -> None:
    start = messages_of(b"data: 1\n\n")[:1]
    ends = [FakeAnswer([start, error()] if had_begun else [error()]) for _ in range(num_ended)]
    replicas = FakeReplicas(*ends, FakeAnswer([messages_of(b"data: 1\n\n", b"data: 2\n\n")]))
    status, body, raised = ask(replicas)
    assert raised is None and len(replicas.asked) == min(num_ended + 1, 3)
    if num_ended < 3:
        assert (status, body) == (200, b"data: 1\n\ndata: 2\n\n")
    else:
        shown = json.loads(body)["error"]
        assert (status, shown["code"], shown["type"]) == (500, "replica_lost", "server_error")
        assert shown["message"].startswith("3 replicas")


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.data())
def test_a_stream_that_is_cut_says_so_behind_all_that_came(sizes: list[int], data: st.DataObject) -> None:
    events = [b"data: %d\n\n" % i for i in range(sum(sizes) + 1)]
    start, *bodies = messages_of(*events)
    groups = [[bodies.pop(0) for _ in range(size)] for size in sizes]
    groups[0].insert(0, start)
    cut = data.draw(st.integers(1, len(groups)))
    answer = FakeAnswer([*groups[:cut], RayActorError()])
    replicas = FakeReplicas(answer)
    status, body, error = ask(replicas)
    given_events = b"".join(events[: sum(sizes[:cut])])
    assert (status, error, len(replicas.asked)) == (200, None, 1)
    assert body.startswith(given_events)
    error = json.loads(body.removeprefix(given_events).removeprefix(b"data: "))["error"]
    assert error["code"] == "replica_lost" and "incomplete" in error["message"]
    assert answer.was_cancelled


def test_another_answer_that_is_cut_has_fewer_bytes_than_its_headers_say() -> None:
    answer = FakeAnswer([messages_of(b"{", b"}", kind="application/json")[:2], RayActorError()])
    status, body, error = ask(FakeReplicas(answer))
    assert (status, body) == (200, b"{") and isinstance(error, RayActorError)


def test_what_an_app_refuses_is_passed_on() -> None:
    answer = FakeAnswer([messages_of(b'{"error": {}}', kind="application/json", status=400)])
    assert ask(FakeReplicas(answer)) == (400, b'{"error": {}}', None)


def test_too_many_requests_get_429() -> None:
    status, body, _ = ask(
        FakeReplicas(FakeAnswer([BackPressureError(num_queued_requests=9, max_queued_requests=9)]))
    )
    assert status == 429 and json.loads(body)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("parts", [1, 7])
def test_a_long_body_is_refused_before_a_replica_is_asked(parts: int) -> None:
    replicas = FakeReplicas()
    status, body, _ = ask(replicas, b"x" * (SETTINGS.max_body_bytes + 1), parts)
    assert (status, json.loads(body)["error"]["code"], replicas.asked) == (413, "request_too_large", [])
    replicas = FakeReplicas(FakeAnswer([messages_of(b"ok")]))
    assert ask(replicas, b"x" * SETTINGS.max_body_bytes, parts)[:2] == (200, b"ok")


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def receive() -> Message:
        await asyncio.sleep(3600)
        raise AssertionError

    gateway = Gateway(FakeReplicas(), replace(SETTINGS, stall_seconds=0.05))
    response = asyncio.run(gateway(Request(scope_of("/v1/completions"), receive)))
    assert response.status_code == 408


def test_bodies_beyond_the_bound_of_all_get_503_and_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x", "more_body": True}

    monkeypatch.setattr(streams, "MAX_WHOLE_BODIES", 0)
    response = asyncio.run(Gateway(FakeReplicas(), SETTINGS)(Request(scope_of("/v1/completions"), receive)))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def test_a_gateway_that_drains_waits_for_its_requests_and_refuses_others_by_name() -> None:
    gateway = Gateway(FakeReplicas(SlowAnswer(0.5), FakeAnswer([messages_of(b"well")])), SETTINGS)

    async def of(path: str, method: str = "POST") -> Any:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        return await gateway(Request(scope_of(path, method), receive))

    async def run() -> None:
        begun = asyncio.create_task(of("/v1/completions"))
        await asyncio.sleep(0)
        await gateway.drain(0.1)
        assert not begun.done(), "the time is up"
        drain = asyncio.create_task(gateway.drain(60))
        await asyncio.sleep(0)
        refused, ready, well = (
            await of("/v1/completions"),
            await of("/ready", "GET"),
            await of("/health", "GET"),
        )
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert (ready.status_code, json.loads(ready.body)) == (503, {"status": "stopping"})
        assert well.status_code == 200 and not drain.done()
        await drain
        assert (await begun).status_code == 200

    asyncio.run(run())


def test_a_replica_has_time_to_tell_what_took_too_long() -> None:
    settings = replace(SETTINGS, request_seconds=0.1)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    gateway = Gateway(FakeReplicas(SlowAnswer(0.3)), settings)
    assert asyncio.run(gateway(Request(scope_of("/v1/completions"), receive))).status_code == 200


class Broadcast:
    """As Ray's answer to a call of all replicas: one of them has just exited."""

    async def results_async(self, return_exceptions: bool = False) -> list[Any]:
        if not return_exceptions:
            raise RayActorError
        return [RayActorError(), ("one", "# HELP mla_a A.\n# TYPE mla_a gauge\nmla_a 3\n")]


def test_metrics_leave_out_a_replica_that_exits() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    replicas = FakeReplicas()
    replicas.broadcast = lambda *_: Broadcast()  # type: ignore[attr-defined]
    response = asyncio.run(Gateway(replicas, SETTINGS)(Request(scope_of("/metrics", "GET"), receive)))
    assert response.status_code == 200 and b'mla_a{replica="one"} 3.0' in response.body


# --- a replica


class FakeReplica(Replica):
    """Without Ray, and with a fake engine."""

    def __init__(self) -> None:
        self._name, (self._app, self._server) = "a", app_of()

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_whose_engine_fails_leaves_what_it_has_not_answered_to_others(stream: bool) -> None:
    replica = FakeReplica()
    engine = replica._server._client

    async def answered(path: str, method: str, body: bytes = b"") -> bytes:
        forwarded = Forwarded.of(Request(scope_of(path, method)), body)
        groups = [messages async for messages in replica.answer(forwarded)]
        return b"".join(message.get("body", b"") for messages in groups for message in messages)

    async def run() -> None:
        body = json.dumps({"model": "shipped", "prompt": [5], "stream": stream}).encode()
        asked = asyncio.create_task(answered("/v1/completions", "POST", body))
        while not engine.num_running:
            await asyncio.sleep(0.01)
            assert not asked.done()
        ready, engine.ready = engine.ready, None
        engine.end_all("the engine failed: a mishap")
        with pytest.raises(EngineLost):
            await asked
        with pytest.raises(RuntimeError, match="the engine failed"):
            await replica.check_health()
        assert b"mla_ready 0.0" in await answered("/metrics", "GET"), "it needs no engine"
        probe = asyncio.create_task(answered("/ready", "GET"))
        await asyncio.sleep(0.2)
        assert not probe.done(), "it moves, or waits for the next engine"
        engine.ready = ready
        assert b'"ready"' in await probe
        await replica.drain(0)
        await replica.check_health()
        assert b"the server is not ready" in await answered("/v1/completions", "POST", body)

    asyncio.run(run())


# --- what requests are routed by


@given(
    st.binary()
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda x: json.dumps(x).encode())
)
def test_any_body_has_a_beginning(body: bytes) -> None:
    request = Request(scope_of("/v1/completions"))
    assert isinstance(Forwarded.of(request, body).prompt, str)


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}', b"", b"null"]
)
def test_hostile_bodies_have_one_too(body: bytes) -> None:
    request = Request(scope_of("/v1/completions"))
    assert isinstance(Forwarded.of(request, body).prompt, str)


prompts = st.text(min_size=1) | st.lists(st.integers(0, 10**5), min_size=1)


@given(prompts.flatmap(lambda begin: st.tuples(st.just(begin), st.just(type(begin)()) | type_like(begin))))
def test_equal_beginnings_of_prompts_are_equal_beginnings_of_what_is_routed_by(
    drawn: tuple[Any, Any],
) -> None:
    begin, rest = drawn
    short, long = (
        Forwarded.of(Request(scope_of("/")), json.dumps({"prompt": prompt}).encode()).prompt
        for prompt in (begin, begin + rest)
    )
    assert long.startswith(short[:-1])


def type_like(value: Any) -> st.SearchStrategy[Any]:
    return st.text() if isinstance(value, str) else st.lists(st.integers(0, 10**5))


def test_conversations_are_routed_by_their_first_messages_and_probes_by_nothing() -> None:
    request = Request(scope_of("/v1/chat/completions"))
    first = [{"role": "user", "content": "Who?"}]
    both = [*first, {"role": "assistant", "content": "I."}]
    short, long = (Forwarded.of(request, json.dumps({"messages": x}).encode()).prompt for x in (first, both))
    assert short and long.startswith(short[:-1])
    assert Forwarded.of(Request(scope_of("/health", "GET")), b'{"prompt": "a"}').prompt == ""


# --- settings


@pytest.mark.parametrize(
    ("settings", "changes", "name"),
    [
        ({}, {"replicas": 0}, "replicas"),
        ({}, {"replicas": True}, "replicas"),
        ({"device": "cuda:1"}, {}, "device"),
    ],
    ids=str,
)
def test_mistakes_are_named(settings: dict[str, Any], changes: dict[str, Any], name: str) -> None:
    with pytest.raises(MLAError) as caught:
        build_app(ServerSettings(**settings), **{"replicas": 2} | changes)
    assert caught.value.name == name


def test_metrics_of_replicas_are_separate() -> None:
    page = (
        '# HELP mla_tokens_total Tokens.\n# TYPE mla_tokens_total counter\nmla_tokens_total{{kind="a"}} {}\n'
    )
    pages = {"one": page.format(3), "two": page.format(4)}
    (family,) = _Merged(pages).collect()
    assert [(s.name, s.labels, s.value) for s in family.samples] == [
        ("mla_tokens_total", {"kind": "a", "replica": "one"}, 3),
        ("mla_tokens_total", {"kind": "a", "replica": "two"}, 4),
    ]


# --- on Ray itself


@pytest.fixture(scope="module")
def replicas() -> Iterator[str]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(
        num_cpus=2,
        num_gpus=0,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        runtime_env={"env_vars": environment},
        logging_level="ERROR",
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(build_app(SETTINGS, replicas=2, request_router=PREFIX_ROUTER), name=APP_NAME)
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()
    ray.shutdown()


Client = Any


def with_client(url: str, work: Callable[[Client], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await work(client)

    return asyncio.run(run())


async def replica_of(client: Client, prompt: str) -> str:
    raw = await client.completions.with_raw_response.create(model="small", prompt=prompt, max_tokens=1)
    return str(raw.headers["x-replica"])


def command_of(process: str) -> bytes:
    """Of a process by its id; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def engines() -> list[str]:
    """Ids of the processes whose parent is a replica."""
    status = [path / "status" for path in Path("/proc").glob("[0-9]*") if is_engine(path.name)]
    lines = {path.parent.name: path.read_text().splitlines() for path in status}
    parents = {
        name: line.split()[1] for name, each in lines.items() for line in each if line.startswith("PPid")
    }
    return [name for name, parent in parents.items() if command_of(parent).startswith(b"ray::ServeReplica")]


def is_engine(process: str) -> bool:
    return b"mla_compile.serving.engine_process" in command_of(process)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "it takes too long"
        await asyncio.sleep(0.2)


@pytest.mark.slow
def test_prompts_that_begin_alike_go_to_the_same_replica(replicas: str) -> None:
    async def work(client: Client) -> None:
        names = set()
        for name in ("Abel", "Cain", "Enoch", "Seth"):
            begin = f"{name} was a keeper of sheep, and he said unto his brother: " * 3
            found = [await replica_of(client, begin + end) for end in ("Go.", "Come.", "", "Stay here.")]
            assert len(set(found)) == 1
            names |= set(found)
        assert len(names) == 2

    with_client(replicas, work)


@pytest.mark.slow
def test_the_metrics_are_those_of_all_replicas(replicas: str) -> None:
    ready = samples_of(replicas, "mla_ready")
    assert len({sample.labels["replica"] for sample in ready}) == 2
    assert all(sample.value == 1 for sample in ready)


@pytest.mark.slow
def test_a_replica_that_is_killed_under_load_costs_no_unanswered_request(replicas: str) -> None:
    prompts = [f"{i} men went to the city, and the king said" for i in range(32)]
    sampling = [SamplingParams(temperature=1.0, seed=i) for i in range(32)]
    expected = [x.text for x in generate(prompts, sampling=sampling, max_new_tokens=60, compile=False)]
    before = engines()

    async def one(client: Client, i: int) -> tuple[str, str]:
        asked = {"model": "small", "prompt": prompts[i], "max_tokens": 60, "temperature": 1, "seed": i}
        if i % 2:
            return "whole", (await client.completions.create(**asked)).choices[0].text
        text = ""
        try:
            async for chunk in await client.completions.create(**asked, stream=True):
                text += chunk.choices[0].text
        except openai.APIError as error:
            return error.code, text
        return "whole", text

    async def work(client: Client) -> list[tuple[str, str]]:
        doomed = await replica_of(client, prompts[0])
        tasks = [asyncio.create_task(one(client, i)) for i in range(32)]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in tasks[16:]), "the load is too light to show anything"
        ray.kill(ray.get_actor(f"SERVE_REPLICA::{APP_NAME}#{Replica.__name__}#{doomed}", namespace="serve"))
        answers = await asyncio.gather(*tasks)

        async def is_whole_again() -> bool:
            ready = await asyncio.to_thread(samples_of, replicas, "mla_ready")
            return len({sample.labels["replica"] for sample in ready} - {doomed}) == 2

        await until(is_whole_again)
        return answers

    answers = with_client(replicas, work)
    for i, (how, text) in enumerate(answers):
        if how == "whole":
            assert text == expected[i]
        else:
            assert i % 2 == 0 and how == "replica_lost" and text and expected[i].startswith(text)
    assert {"whole", "replica_lost"} == {how for how, _ in answers}
    assert len(before) == 2 and sum(map(is_engine, before)) == 1, "an engine ends with its replica"


@pytest.mark.slow
def test_a_client_that_vanishes_ends_what_it_asked_for(replicas: str) -> None:
    async def work(client: Client) -> None:
        asked = {"model": "small", "prompt": "And", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(**asked, stream=True)
        await anext(aiter(stream))
        assert await rows() == 1
        await stream.close()
        begun = asyncio.create_task(client.completions.create(**asked))
        await asyncio.sleep(0.5)
        begun.cancel()

        async def is_idle() -> bool:
            return await rows() == 0

        await until(is_idle, seconds=5)

    async def rows() -> float:
        samples = await asyncio.to_thread(samples_of, replicas, "mla_rows_in_use")
        return sum(sample.value for sample in samples)

    with_client(replicas, work)


def samples_of(url: str, name: str) -> list[Any]:
    """Of one metric."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        page = answer.read().decode()
    (found,) = [each for each in text_string_to_metric_families(page) if each.name == name]
    return found.samples


SCRIPT = """
from mla_compile.engine import EngineConfig
from mla_compile.integrations.ray.serve import serve_replicas
from mla_compile.serving.settings import ServerSettings

engine = EngineConfig(compile=False, max_rows=2)
settings = ServerSettings(served_model_name="small", engine=engine, shutdown_seconds=8.0)
serve_replicas(settings, replicas=1, host="127.0.0.1", port=PORT)
"""


@pytest.mark.slow
def test_sigterm_lets_requests_end_and_sends_errors_to_those_that_it_cuts() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = SCRIPT.replace("PORT", str(PORT + 1))
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        assert any("ready: http" in line for line in process.stderr)

        async def work(client: Client) -> None:
            asked = {"model": "small", "prompt": "And", "extra_body": {"ignore_eos": True}, "stream": True}
            long = await client.completions.create(**asked, max_tokens=2000)
            short = await client.completions.create(**asked, max_tokens=16)
            await anext(aiter(long)), await anext(aiter(short))
            process.terminate()
            reasons = [chunk.choices[0].finish_reason async for chunk in short]
            assert reasons[-1] == "length"
            with pytest.raises(openai.APIError) as caught:
                async for _ in long:
                    pass
            assert caught.value.message == "the server is shutting down"

        with_client(f"http://127.0.0.1:{PORT + 1}", work)
        assert process.wait(60) == 0
    finally:
        process.kill()
