"""The app with a fake engine: everything between a request and its answer.

The app makes its own engine, tokenizer and grammar check, so tests replace private members.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from mla_compile.cli.serve import _read_keys
from mla_compile.engine.stats import EngineStats
from mla_compile.errors import MLAError
from mla_compile.serving import app as app_module
from mla_compile.serving import streams
from mla_compile.serving.app import Server, create_app
from mla_compile.serving.engine_client import Answer, EngineClient
from mla_compile.serving.messages import Asked, ModelLimits, Ready, Update
from mla_compile.serving.settings import ServerSettings

BODY = {"model": "shipped", "prompt": [5, 6, 7]}


class Engine(EngineClient):
    """plays: called with each answer before it is read."""

    def __init__(self, settings: ServerSettings, plays: Callable[[Answer], None]) -> None:
        super().__init__(settings)
        choices = 2 + settings.max_waiting
        limits = ModelLimits("shipped", vocab_size=3072, max_model_len=64, max_choices=min(128, choices))
        self.ready = Ready(limits, EngineStats(max_rows=2))
        self.plays = plays

    def submit(self, asked: Sequence[Asked], client: str | None = None) -> Answer:
        answer = super().submit(asked, client)
        self.plays(answer)
        return answer


def nothing(_: Answer) -> None:
    pass


def app_of(plays: Callable[[Answer], None] = nothing, **settings: Any) -> tuple[Starlette, Server]:
    app = create_app(ServerSettings(**settings))
    server: Server = app.state.server
    server._client = Engine(server.settings, plays)
    return app, server


async def ask(
    app: Starlette,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Sequence[tuple[bytes, bytes]] = (),
    stays: bool = True,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer. stays: whether the client waits for it."""
    sent: list[Message] = []
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not given and stays:
            await asyncio.Event().wait()
        return given.pop() if given else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    with suppress(ArithmeticError):  # a test's; uvicorn writes what comes to the log
        await app(scope, receive, send)
    start, *parts = sent
    reply_headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], reply_headers, b"".join(part.get("body", b"") for part in parts)


def post(app: Starlette, fields: dict[str, Any], **how: Any) -> tuple[int, dict[str, str], bytes]:
    body = json.dumps(BODY | fields).encode()
    return asyncio.run(ask(app, "POST", "/v1/completions", body, **how))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_an_error_before_the_first_read_is_sent(n: int, stream: bool) -> None:
    def fails(answer: Answer) -> None:
        for index in range(n):
            answer.put(index, Update(finish_reason="error", error="the engine failed: a mishap"), 0.0)

    app, server = app_of(fails)
    status, _, body = post(app, {"n": n, "stream": stream})
    assert status == (200 if stream else 500)
    error = json.loads(body.removeprefix(b"data: ").partition(b"\n")[0])["error"]
    assert error["message"] == "the engine failed: a mishap" and error["type"] == "server_error"
    assert b"mla_time_to_first_token_seconds_count 0.0" in server._metrics.text(), "there was none"


def test_an_event_is_one_line_to_every_client() -> None:
    text = "".join(map(chr, range(0x3000))) + "\U0001f600"
    line = app_module._line({"text": text})
    assert line.decode().splitlines() == [line.decode().removesuffix("\n\n"), ""]
    assert json.loads(line.removeprefix(b"data: ")) == {"text": text}


def test_an_internal_error_has_openais_shape() -> None:
    def fails(_: Answer) -> None:
        raise ArithmeticError("of ours")

    status, _, body = post(app_of(fails)[0], {})
    assert status == 500
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}


def test_long_texts_are_tokenized_one_at_a_time_and_not_after_a_disconnect() -> None:
    """Each takes 200 times its bytes while it is tokenized, and the interpreter."""
    app, server = app_of()
    tokenizer, texts, at_once = server._vocabulary.tokenizer, list[str](), list[int]()

    def tokenize(text: str, **settings: Any) -> Any:
        texts.append(text)
        at_once.append(1)
        time.sleep(0.02)
        assert sum(at_once) == 1
        at_once.pop()
        return tokenizer(text, **settings)

    server._vocabulary.tokenizer = tokenize  # type: ignore[assignment]

    async def run() -> list[int]:
        asked = []
        for i in range(9):
            path = "/tokenize" if i % 2 else "/v1/completions"
            body = json.dumps({"model": "shipped", "prompt": f"{i}" * 20_000}).encode()
            asked.append(ask(app, "POST", path, body, stays=i not in (4, 5)))
        return [status for status, *_ in await asyncio.gather(*asked)]

    assert asyncio.run(run()) == [400, 200, 400, 200, 499, 499, 400, 200, 400]
    assert {text[0] for text in texts} == set("0123678")


def test_clients_take_turns_with_the_tokenizer() -> None:
    app, server = app_of(client_header="x-client")
    tokenizer, texts, go = server._vocabulary.tokenizer, list[str](), threading.Event()

    def tokenize(text: str, **settings: Any) -> Any:
        texts.append(text[0])
        go.wait(60)
        return tokenizer(text, **settings)

    server._vocabulary.tokenizer = tokenize  # type: ignore[assignment]

    async def run() -> None:
        asked = [
            ask(
                app,
                "POST",
                "/tokenize",
                json.dumps({"prompt": name * 20_000}).encode(),
                [(b"x-client", name.encode())],
            )
            for name in "aaaaab"
        ]
        answers = asyncio.gather(*asked)
        await asyncio.sleep(0.1)
        go.set()
        assert [status for status, *_ in await answers] == [200] * 6

    asyncio.run(run())
    assert texts == [*"abaaaa"]


def test_bodies_beyond_the_bound_of_all_get_503_and_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_WHOLE_BODIES", 2)
    app, server = app_of(max_body_bytes=40_000)
    release = threading.Event()
    server._tokenizing.submit(release.wait)  # all wait for the one thread

    async def run() -> list[tuple[int, dict[str, str], bytes]]:
        body = json.dumps({"prompt": "a " * 19_000}).encode()
        asked = [asyncio.create_task(ask(app, "POST", "/tokenize", body)) for _ in range(3)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        status, _, _ = await ask(app, "POST", "/tokenize", b'{"prompt": "a"}')
        assert status == 200, "a short one passes"
        release.set()
        return await asyncio.gather(*asked)

    found = asyncio.run(run())
    assert sorted(status for status, *_ in found) == [200, 200, 503]
    ((_, headers, body),) = [each for each in found if each[0] == 503]
    assert headers["retry-after"] == "1" and b"bodies of all requests" in body
    assert server._bodies.num_bytes == 0


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_probe_may_ask_for_the_status_alone(method: str) -> None:
    for path in ("/health", "/ready"):
        assert asyncio.run(ask(app_of()[0], method, path))[0] == 200


def test_a_wrong_method_gets_the_right_ones() -> None:
    status, headers, _ = asyncio.run(ask(app_of()[0], "GET", "/v1/completions"))
    assert status == 405 and headers["allow"] == "POST"


def test_more_choices_than_the_server_ever_has_places_for_are_a_mistake() -> None:
    app, _ = app_of(max_waiting=3)
    status, _, body = post(app, {"n": 6})
    assert status == 400 and json.loads(body)["error"]["param"] == "n", "not 429, which asks to come again"


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_a_grammar_that_is_refused_names_its_field(field: str) -> None:
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}},
        "structured_outputs": {"regex": "("},
    }
    app, server = app_of()

    async def refuses(*_: Any) -> str:
        return "it is wrong"

    server._grammars.why_not = refuses  # type: ignore[method-assign]
    status, _, body = post(app, {field: fields[field]})
    error = json.loads(body)["error"]
    assert status == 400 and error["param"] == field and error["code"] == "invalid_grammar"
    assert "it is wrong" in error["message"]


@pytest.mark.parametrize("stays", [True, False])
def test_no_request_waits_for_a_grammar_forever(stays: bool) -> None:
    app, server = app_of(request_seconds=0.1 if stays else 600.0)

    async def waits(*_: Any) -> str | None:
        await asyncio.sleep(60)
        return None

    server._grammars.why_not = waits  # type: ignore[method-assign]

    async def run() -> int:
        body = json.dumps(BODY | {"structured_outputs": {"regex": "a"}}).encode()
        async with asyncio.timeout(30):
            return (await ask(app, "POST", "/v1/completions", body, stays=stays))[0]

    assert asyncio.run(run()) == (504 if stays else 499)


@pytest.mark.parametrize("has_time", [True, False])
def test_requests_that_the_engine_does_not_have_yet_are_drained_too(has_time: bool) -> None:
    """One each whose body is read, that waits for the tokenizer, and for a grammar."""
    app, server = app_of(lambda answer: answer.put(0, Update([5], [0], finish_reason="length"), 0.0))
    go, release = asyncio.Event(), threading.Event()
    server._tokenizing.submit(release.wait)

    async def waits(*_: Any) -> None:
        await go.wait()

    server._grammars.why_not = waits  # type: ignore[method-assign]
    sent, bodies = list[Message](), [json.dumps(BODY).encode()]

    async def receive() -> Message:
        await (go if bodies else asyncio.Event()).wait()
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> list[tuple[int, dict[str, str], bytes]]:
        def asks(fields: dict[str, Any]) -> Any:
            return asyncio.create_task(
                ask(app, "POST", "/v1/completions", json.dumps(BODY | fields).encode())
            )

        asked = [asks({"user": "x" * 2**15}), asks({"structured_outputs": {"regex": "a"}})]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
        }
        read = asyncio.create_task(app(scope | {"client": ("127.0.0.1", 1)}, receive, send))
        await asyncio.sleep(0.1)
        drain = asyncio.create_task(server.drain(60.0 if has_time else 0.1))
        await asyncio.sleep(0.05)
        assert not drain.done()
        if has_time:
            go.set()
            release.set()
        answers = await asyncio.gather(*asked)
        await asyncio.gather(read, drain)
        release.set()
        return answers

    for status, headers, body in asyncio.run(run()):
        assert status == (200 if has_time else 503)
        assert has_time or (headers["retry-after"] and b"the server is shutting down" in body)
    assert sent[0]["status"] == (200 if has_time else 503)


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("Bearer plain", 200),
        ("bearer plain", 200),
        ("Bearer other-key", 200),
        ("Bearer schlüssel", 401),
        ("Bearer  plain", 200),
        ("Bearer plain ", 200),
        ("plain", 401),
        ("Basic plain", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer plainer", 401),
        ("Bearer pla in", 401),
        ("", 401),
    ],
)
def test_a_key_is_a_bearers(given: str, status: int) -> None:
    app, _ = app_of(api_keys=("other-key", "plain"))
    headers = [(b"authorization", given.encode())]
    assert asyncio.run(ask(app, "GET", "/v1/models", headers=headers))[0] == status


FORWARDED = [(b"x-forwarded-for", b"6.6.6.6"), (b"x-forwarded-for", b"7.7.7.7, 10.0.0.9")]


@pytest.mark.parametrize(
    ("settings", "headers", "client"),
    [
        ({}, FORWARDED, "127.0.0.1"),
        ({"client_header": "X-Forwarded-For"}, FORWARDED, "10.0.0.9"),
        ({"client_header": "X-Forwarded-For"}, [], "127.0.0.1"),
        ({"client_header": "x-real-ip"}, FORWARDED, "127.0.0.1"),
        ({"api_keys": ("a",)}, [(b"authorization", b"Bearer a")], "127.0.0.1"),
        ({"api_keys": ("a", "a")}, [(b"authorization", b"Bearer a")], "127.0.0.1"),
        ({"api_keys": ("a", "b")}, [(b"authorization", b"Bearer b")], "key 1"),
        (
            {"api_keys": ("a", "b"), "client_header": "X-Forwarded-For"},
            [(b"authorization", b"Bearer a"), *FORWARDED],
            "key 0",
        ),
    ],
)
def test_a_client_is_identified_by_key_header_or_address(
    settings: dict[str, Any], headers: list[tuple[bytes, bytes]], client: str
) -> None:
    def sends_client(answer: Answer) -> None:
        answer.put(0, Update(finish_reason="error", error=answer.client), 0.0)

    _, _, body = post(app_of(sends_client, **settings)[0], {}, headers=headers)
    assert json.loads(body)["error"]["message"] == client


@pytest.mark.parametrize("name", ["", "two words", "a:b", "schlüssel"])
def test_a_header_that_no_client_can_send_is_a_mistake_of_the_server(name: str) -> None:
    with pytest.raises(MLAError, match=r"^client_header: expected .*header name"):
        ServerSettings(client_header=name)


@pytest.mark.parametrize("key", ["", " ", "two words", "schlüssel", "a\n", "a\0", "\x7f"])
def test_a_key_that_no_client_can_send_is_a_mistake_of_the_server(key: str) -> None:
    with pytest.raises(MLAError, match="api_keys: expected") as error:
        ServerSettings(api_keys=("good", key))
    assert not key.strip() or key not in str(error.value), "it may be a secret"


def test_an_empty_key_in_the_environment_does_not_open_the_server(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLA_COMPILE_API_KEY", " ")
    with pytest.raises(MLAError, match="MLA_COMPILE_API_KEY: expected a key, got an empty value; unset it"):
        _read_keys(None)
    monkeypatch.setenv("MLA_COMPILE_API_KEY", "one ")
    (file := tmp_path / "keys").write_text("two\n\nthree\n")
    assert _read_keys(file) == ("one", "two", "three")
    file.write_text("two\n\n# a comment\n")
    with pytest.raises(
        MLAError, match=r"^--api-key-file .*keys, line 3: expected a key of .*got other characters"
    ):
        _read_keys(file)
    monkeypatch.delenv("MLA_COMPILE_API_KEY")
    assert _read_keys(None) == ()
