"""Each call that the HTTP process makes for one request fails in each way: that request ends by name, others go on."""

import asyncio
import functools
import json
import logging
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse

from benchmarks.http_client import ask as http_ask
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine.detokenizer import Detokenizer, TextStream
from mla_compile.engine.reports import Logprob
from mla_compile.models import load_tokenizer
from mla_compile.serving import app as app_module
from mla_compile.serving import openai_requests
from mla_compile.serving.app import Server
from mla_compile.serving.engine_client import Answer
from mla_compile.serving.messages import Asked, Update
from mla_compile.serving.openai_responses import _made
from mla_compile.serving.token_bytes import Vocabulary
from tests.serving.servers import served
from tests.serving.test_app import Engine, app_of, ask

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Panic(BaseException):
    """Like pyo3's PanicException, a subclass of BaseException."""


class Odd(Exception):
    def __str__(self) -> str:
        return "odd \ud800 \x1b[31m\n text"


FAULTS: list[Callable[[], BaseException]] = [
    lambda: Exception("Invalid prefix encountered"),
    lambda: Panic("index out of bounds"),
    lambda: KeyError(7),
    lambda: TimeoutError("not the server's own"),
    lambda: StopIteration(),
    lambda: RecursionError("too deep"),
    lambda: MemoryError(),
    lambda: Odd(),
]
NONSENSE: list[Any] = [None, 7, b"bytes", "a \ud800 half", object(), [[]], {"a": 1}, 1.5]


def tokens_of(asked: Asked) -> list[int]:
    """What the pretended engine completes a prompt with."""
    rng = random.Random(f"{asked.prompt} {asked.params.seed}")
    return [rng.randrange(300, 3000) for _ in range(asked.params.max_tokens or 1)]


class Playing(Engine):
    """Plays each answer step by step, in pieces of random sizes, beside the others'."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings, lambda _: None)
        self.tasks: list[asyncio.Task[None]] = []

    def submit(self, asked: Sequence[Asked], client: str | None = None) -> Answer:
        answer = super().submit(asked, client)
        keys = [key for key, (known, _) in self._answers.items() if known is answer]
        for index, (key, each) in enumerate(zip(keys, asked, strict=True)):
            self.tasks.append(asyncio.create_task(self._play(answer, index, key, each)))
        return answer

    async def _play(self, answer: Answer, index: int, key: int, asked: Asked) -> None:
        tokens, rng, at = tokens_of(asked), random.Random(key), 0
        while at < len(tokens) and key in self._answers:
            new = tokens[at : at + rng.randint(1, 4)]
            at += len(new)
            logprobs = None
            if asked.params.logprobs is not None:
                logprobs = [{token: Logprob(-1.0, 1), 301: Logprob(-2.0, 2)} for token in new]
            is_last = at == len(tokens)
            update = Update([*new], [0] * len(new), logprobs, "length" if is_last else None)
            answer.put(index, update, 0.0)
            if is_last:
                self._answers.pop(key, None)
            await asyncio.sleep(0)


@dataclass
class Fault:
    """The `at`th call of all raises this error, or without one gives what it should not."""

    at: int = -1
    error: BaseException | None = None
    value: object = None
    num_calls: int = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **settings: Any) -> Any:
            self.num_calls += 1
            if self.num_calls - 1 != self.at:
                return call(*args, **settings)
            if self.error is not None:
                raise self.error
            return self.value

        return wrapped


class Tokenizer:
    """The server's tokenizer with faults in encoding; decoding uses other classes."""

    def __init__(self, tokenizer: Any, fault: Fault, name: str) -> None:
        self._tokenizer = tokenizer
        self.chat_template = CHAT_TEMPLATE
        self.apply_chat_template = self._chat
        self._encode: Callable[..., Any] = lambda *args, **settings: tokenizer(*args, **settings)["input_ids"]
        if name == "encode":
            self._encode = fault.around(self._encode)
        elif name == "chat template":
            self.apply_chat_template = fault.around(self._chat)  # type: ignore[method-assign]

    def _chat(self, *args: Any, **settings: Any) -> Any:
        return self._tokenizer.apply_chat_template(*args, chat_template=CHAT_TEMPLATE, **settings)

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return {"input_ids": self._encode(*args, **settings)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


CALLS: dict[str, tuple[Any, str]] = {
    "new text": (TextStream, "feed"),
    "text of a token": (Detokenizer, "feed"),
    "name of a token": (Vocabulary, "text_of"),
    "bytes of a token": (Vocabulary, "bytes_of"),
    "parse": (openai_requests, "from_json"),
    "JSON of a chunk": (app_module, "_to_json"),
    "JSON of an answer": (JSONResponse, "render"),
}
NAMES = ["encode", "chat template", *CALLS]
LOUD = ["parse", "JSON of a chunk", "JSON of an answer"]
"""A failure here is an internal error: the log has its traceback."""


def requests() -> list[tuple[str, dict[str, Any]]]:
    whole = {"model": "shipped", "max_tokens": 20, "seed": 3}
    chat = whole | {"messages": [{"role": "user", "content": "Hello there"}]}
    return [
        ("/v1/completions", whole | {"prompt": "In the beginning", "n": 2, "stream": True}),
        ("/v1/completions", whole | {"prompt": "And it came", "logprobs": 1, "draft_positions": True}),
        ("/v1/completions", whole | {"prompt": ["one", "two"], "logprobs": 1, "stream": True}),
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 1, "stream": True}),
        ("/v1/chat/completions", chat | {"logprobs": True, "n": 2}),
        ("/tokenize", {"prompt": "long " * 5000}),  # beside the loop
        ("/v1/models", {}),
    ]


def read(body: bytes) -> Any:
    """What a client reads: an object, or of a stream what each choice has in the end, and the error if there is one."""
    if not body.startswith(b"data: "):
        found = json.loads(body)
        return {name: value for name, value in found.items() if name not in ("id", "created", "data")}
    *events, done = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")[:-1]]
    assert done == b"[DONE]"
    choices: dict[int, list[Any]] = {}
    *chunks, last = map(json.loads, events)
    chunks += [] if "error" in last else [last]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        known = choices.setdefault(choice["index"], ["", [], None])
        known[0] += choice.get("text") or choice.get("delta", {}).get("content", "")
        known[1] += (choice["logprobs"] or {}).get("content", []) or (choice["logprobs"] or {}).get(
            "tokens", []
        )
        known[2] = choice["finish_reason"]
    return {"choices": choices} | ({"error": last["error"]} if "error" in last else {})


async def asked_together(server: Server, app: Any) -> list[tuple[int, Any]]:
    answers = await asyncio.gather(*[
        ask(app, "POST" if fields else "GET", path, json.dumps(fields).encode()) for path, fields in requests()
    ])  # fmt: skip
    playing = server._client
    assert isinstance(playing, Playing)
    await asyncio.gather(*playing.tasks)
    assert playing.num_running == 0, "each row was ended or aborted"
    return [(status, read(body)) for status, _, body in answers]


_load_once = functools.cache(load_tokenizer)


def injected(name: str, fault: Fault, again: bool = False) -> list[list[tuple[int, Any]]]:
    """Answers to all requests, asked together; and without the fault after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "load_tokenizer", _load_once)
        app, server = app_of()
    # The app makes its own engine and tokenizer; faults replace them.
    server._client = Playing(server.settings)
    tokenizer = server._vocabulary.tokenizer

    async def run() -> list[list[tuple[int, Any]]]:
        server._vocabulary.tokenizer = Tokenizer(tokenizer, fault, name)  # type: ignore[assignment]
        with pytest.MonkeyPatch.context() as patch:
            if name in CALLS:
                owner, attribute = CALLS[name]
                patch.setattr(owner, attribute, fault.around(getattr(owner, attribute)))
            found = [await asked_together(server, app)]
        if again:
            found.append(await asked_together(server, app))
        return found

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _log_that_xdist_can_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback may have half a surrogate pair, which pytest-xdist cannot encode."""
    plain = logging.Formatter.formatException
    monkeypatch.setattr(logging.Formatter, "formatException", lambda *args: ascii(plain(*args)))


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, Any]]:
    """Without a fault: as the answers do not depend on their neighbours, one by one or together is the same."""
    (found,) = injected("", Fault())
    assert [status for status, _ in found] == [200] * len(found)
    return found


def check_error(status: int, answer: Any, name: str) -> None:
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    if name in ("encode", "chat template"):
        assert status == 400 and "rejected by the model" in error["message"]
        assert error["param"] in ("prompt", "messages") and error["type"] == "invalid_request_error"
    else:
        assert status in (200, 500) and error["type"] == "server_error"
        expected = "internal server error" if name in LOUD else "detokenizing the completion failed: "
        assert error["message"].startswith(expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_fails_ends_its_own_request_by_name(
    name: str, alone: list[tuple[int, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    counted = Fault()
    injected(name, counted)
    assert counted.num_calls >= 2
    for seed, error in enumerate(FAULTS):
        if name in LOUD and isinstance(error(), TimeoutError):
            continue  # is the server's own there
        rng = random.Random(f"{name} {seed}")
        fault = Fault(rng.randrange(counted.num_calls), error())
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found, after = injected(name, fault, again=True)
        failed = [i for i, (mine, theirs) in enumerate(zip(found, alone, strict=True)) if mine != theirs]
        assert len(failed) == 1, (seed, fault)
        check_error(*found[failed[0]], name)
        assert after == alone, "the next requests are right"
        (record,) = caplog.records
        assert (record.exc_info is not None) == (name in LOUD)
        if name not in LOUD:
            assert type(fault.error).__name__ in record.getMessage()
            assert record.getMessage().isprintable() and "odd" not in record.getMessage()


@pytest.mark.parametrize("name", [name for name in NAMES if "JSON" not in name])
def test_a_call_that_gives_nonsense_harms_no_other_request(name: str, alone: list[tuple[int, Any]]) -> None:
    counted = Fault()
    injected(name, counted)
    for seed, value in enumerate(NONSENSE):
        rng = random.Random(f"{name} {seed}")
        found, after = injected(name, Fault(rng.randrange(counted.num_calls), value=value), again=True)
        failed = [i for i, (mine, theirs) in enumerate(zip(found, alone, strict=True)) if mine != theirs]
        assert len(failed) <= 1, (seed, value)
        if failed and name in ("encode", "chat template", "new text", "parse"):
            assert "error" in found[failed[0]][1], (seed, value)
        assert after == alone


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError])
def test_what_ends_more_than_a_request_is_let_through(error: type[BaseException]) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    with pytest.raises(error):
        _made(fails)
    with pytest.raises(error):
        openai_requests._encode(fails, "a", "prompt")  # type: ignore[arg-type]
    with pytest.raises(error):
        app_of()[1]._failure(error())


def test_a_regex_that_gives_up_ends_its_own_request_on_a_real_server(tmp_path: Path) -> None:
    """The tokenizer's own error is no `Exception` then: `pyo3_runtime.PanicException`."""
    model = shutil.copytree(SHIPPED_MODEL, tmp_path / "shipped")
    file = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(?:a+a+)+[yz]"}, "behavior": "Isolated", "invert": False}
    file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, file["pre_tokenizer"]]}
    (model / "tokenizer.json").write_text(json.dumps(file))
    good = {"model": "shipped", "prompt": "In the beginning", "max_tokens": 60, "seed": 1, "ignore_eos": True}
    bad = good | {"prompt": "a" * 60 + "w"}

    async def all_of(url: str) -> tuple[Any, list[Any], list[Any]]:
        async def once(body: dict[str, Any], path: str = "/v1/completions") -> Any:
            answer = await http_ask(url, "POST", path, body)
            return answer.status, answer.json()

        alone = await once(good)
        found = await asyncio.gather(
            *[once(good) for _ in range(4)],
            *[once(bad | {"stream": i == 0}) for i in range(3)],
            once({"prompt": bad["prompt"]}, "/tokenize"),
        )
        return alone, found[:4], found[4:]

    with served("--model", str(model)) as server:
        alone, beside, failed = asyncio.run(all_of(server.url()))
        log = [line for line in server.log if line.startswith("mla-compile: ")]
    assert alone[0] == 200
    assert [answer["choices"] for _, answer in beside] == [alone[1]["choices"]] * 4
    for status, answer in failed:
        assert status == 400 and "tokenizer: Onig: " in answer["error"]["message"]
    assert log.count("mla-compile: the model's tokenizer rejected a request: PanicException\n") == 4
    assert "Traceback" not in "".join(server.log)
