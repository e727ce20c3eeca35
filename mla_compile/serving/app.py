"""The HTTP app: OpenAI's endpoints, probes, metrics and a page."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from mla_compile.errors import MLAError, is_request_error
from mla_compile.models import load_tokenizer
from mla_compile.serving.chat_templates import read_chat_template
from mla_compile.serving.engine_client import Answer, EngineClient
from mla_compile.serving.failures import BadField, BadRequest, Failure, NotReady
from mla_compile.serving.grammars import GrammarCheck
from mla_compile.serving.messages import ModelLimits, Update
from mla_compile.serving.metrics import Metrics
from mla_compile.serving.openai_requests import (
    CompletionsAsked,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from mla_compile.serving.openai_responses import Response as OpenAIResponse
from mla_compile.serving.openai_responses import model_object, models_object, tokenize_object
from mla_compile.serving.origins import checks
from mla_compile.serving.settings import ServerSettings
from mla_compile.serving.streams import Bodies, ClientGone, EventStream, while_connected
from mla_compile.serving.token_bytes import Vocabulary

log = logging.getLogger(__name__)

_PAGE = Path(__file__).parent / "page.html"
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_SHORT_BODY = 2**14
"""Bytes of a body that the event loop parses; a thread parses longer ones, as tokenizing them is slow."""

_SHUTTING_DOWN = "the server is shutting down"

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Made once: `json.dumps` with settings makes an encoder per call."""
_LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""JSON leaves them as they are, and Python's `splitlines` ends a line there, and with it an event of some clients."""
_Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")


def create_app(settings: ServerSettings) -> Starlette:
    """The app of one engine: it starts and stops the engine. `app.state.server` is its `Server`."""
    server = Server(settings)
    app = Starlette(
        routes=server.routes(),
        middleware=checks(settings),
        exception_handlers={HTTPException: _http_error, Exception: _own_error},
        lifespan=lambda _: server,
    )
    app.state.server = server
    return app


class Server:
    """One engine behind HTTP."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        path = settings.model if settings.tokenizer is None else settings.tokenizer
        tokenizer = load_tokenizer(path, "tokenizer")
        if tokenizer is None:
            raise MLAError("tokenizer", "a checkpoint with a tokenizer, to serve text", "none")
        if settings.chat_template is not None:
            tokenizer.chat_template = read_chat_template(settings.chat_template)
        self._vocabulary = Vocabulary(tokenizer)
        self._client = EngineClient(settings)
        self._grammars = GrammarCheck(settings)
        self._bodies = Bodies(settings)
        self._tokenizing = ThreadPoolExecutor(1)  # one thread, as tokenizing 4 MB of text takes 1 GB
        # That thread has one text of a client at a time, so those of others wait for one of it only.
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        self._metrics = Metrics(lambda: self._client.stats, lambda: self.is_ready)
        self._keys = [key.encode() for key in dict.fromkeys(settings.api_keys)]
        self.is_draining = False  # whether new requests are refused
        self._unanswered: dict[asyncio.Task[Any], bool] = {}  # requests, and whether the engine has them
        self._starting: asyncio.Task[None] | None = None
        self._created = int(time.time())

    async def __aenter__(self) -> None:
        self._starting = asyncio.create_task(self._client.start())

    async def started(self) -> None:
        """Wait until the engine is ready; raises like `EngineClient.start`."""
        assert self._starting is not None
        await self._starting

    async def __aexit__(self, *_: object) -> None:
        await self._client.stop()
        self._grammars.stop()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts requests."""
        return self._client.ready is not None and not self.is_draining

    @property
    def num_unanswered(self) -> int:
        """Requests whose response has not ended."""
        return len(self._unanswered)

    async def drain(self, seconds: float) -> None:
        """Accept no more requests; wait at most `seconds` for the accepted ones, then end them."""
        self.is_draining = True
        end = time.monotonic() + seconds
        while self._unanswered and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._client.end_all(_SHUTTING_DOWN)
        for request in [request for request, is_sent in self._unanswered.items() if not is_sent]:
            request.cancel()

    # --- routes

    def routes(self) -> list[Route]:
        """All endpoints."""
        return [
            self._keyed("/v1/completions", self._completions(parse_completion), "POST"),
            self._keyed("/v1/chat/completions", self._completions(parse_chat), "POST"),
            self._keyed("/tokenize", self._tokenize, "POST"),
            self._keyed("/v1/models", self._models, "GET"),
            self._keyed("/v1/models/{name:path}", self._models, "GET"),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics_page),
            Route("/", self._page),
        ]

    def _keyed(self, path: str, handle: _Handler, method: str) -> Route:
        """An endpoint that requires a key; exceptions of its handler become responses."""

        async def run(request: Request) -> Response:
            try:
                self._check_key(request)
                response = await handle(request)
            except ClientGone:
                response = Response(status_code=499)
            except asyncio.CancelledError:
                if not self.is_draining:
                    raise
                response = NotReady(_SHUTTING_DOWN).response()
            except BaseException as error:
                response = self._failure(error).response()
            self._metrics.requests.labels(path, response.status_code).inc()
            return response

        return Route(path, run, methods=[method])

    def _failure(self, error: BaseException) -> Failure:
        """The failure to send for an error; raises errors that concern more than one request."""
        if isinstance(error, Failure):
            return error
        if isinstance(error, TimeoutError):
            return Failure(f"the request took longer than {self.settings.request_seconds:g} s", status=504)
        if not is_request_error(error):
            raise error
        log.error("internal error in a request", exc_info=error)
        return Failure()

    def _check_key(self, request: Request) -> int:
        """The index of the request's key; 0 if no key is needed."""
        if not self._keys:
            return 0
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compares with all keys, each in constant time.
        found = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(found):
            raise BadRequest("the API key is missing or wrong", None, "invalid_api_key", 401)
        return found.index(True)

    def _client_of(self, request: Request) -> str:
        """The client whose share the request counts in: the key if there are several, else the client header, else the
        address."""
        if len(self._keys) > 1:
            return f"key {self._check_key(request)}"
        name = self.settings.client_header
        if name is not None and (entries := request.headers.getlist(name)):
            # Clients can send entries too: the nearest proxy adds the last one.
            return entries[-1].rpartition(",")[2].strip()[:100]
        return "" if request.client is None else request.client.host

    async def _parsed(self, request: Request, parse: Callable[..., T]) -> T:
        if self.is_draining:
            raise NotReady
        self._unanswered[_request()] = False
        _request().add_done_callback(lambda task: self._unanswered.pop(task, None))
        async with self._bodies.read(request) as body:
            call = partial(parse, body, tokenizer=self._vocabulary.tokenizer, limits=self._limits())
            if len(body) <= _SHORT_BODY:
                return call()
            turn = self._turns.setdefault(self._client_of(request), asyncio.Lock())

            async def work() -> T:
                async with turn:
                    return await asyncio.get_running_loop().run_in_executor(self._tokenizing, _raising, call)

            async with asyncio.timeout(self.settings.request_seconds):
                return await while_connected(request.receive, work())

    def _limits(self) -> ModelLimits:
        if self._client.ready is None:
            raise NotReady
        return self._client.ready.limits

    def _completions(self, parse: Callable[..., CompletionsAsked]) -> _Handler:
        async def handle(request: Request) -> Response:
            asked = await self._parsed(request, parse)
            if asked.grammar is not None:
                async with asyncio.timeout(self.settings.request_seconds):
                    check = self._grammars.why_not(asked.grammar, self._client_of(request))
                    why_not = await while_connected(request.receive, check)
                if why_not is not None:
                    raise BadField(asked.grammar_field, f"invalid grammar: {why_not}", "invalid_grammar")
            response = OpenAIResponse(asked, self._vocabulary)
            answer = self._client.submit(asked.choices(), self._client_of(request))
            self._unanswered[_request()] = True
            if asked.body.stream:
                return EventStream(self._events(answer, response), on_end=lambda: self._client.abort(answer))
            try:
                return JSONResponse(await while_connected(request.receive, self._whole(answer, response)))
            finally:
                self._client.abort(answer)

        return handle

    async def _whole(self, answer: Answer, response: OpenAIResponse) -> dict[str, Any]:
        async with aclosing(self._updates(answer)) as updates:
            async for index, update, _ in updates:
                response.add(index, update)
        return response.whole()

    async def _events(self, answer: Answer, response: OpenAIResponse) -> AsyncGenerator[bytes]:
        """Each event is on its socket before the next one is made."""
        try:
            for chunk in response.opening():
                yield _line(chunk)
            async with aclosing(self._updates(answer)) as updates:
                async for index, update, read_at in updates:
                    new = response.feed(index, update)
                    if new is not None:
                        yield _line(new)
                        self._metrics.delivery.observe(time.monotonic() - read_at)
            for chunk in response.closing():
                yield _line(chunk)
        except BaseException as error:
            yield _line(self._failure(error).body())
        yield b"data: [DONE]\n\n"

    async def _updates(self, answer: Answer) -> AsyncGenerator[tuple[int, Update, float]]:
        """An answer's updates; records metrics.

        Raises:
            BadRequest: the engine rejects the request. TimeoutError: it takes longer than `request_seconds`.
        """
        began, last = time.monotonic(), dict[int, float]()
        timer = asyncio.get_running_loop().call_later(self.settings.request_seconds, answer.time_out)
        try:
            while answer.has_more():
                index, update, read_at = await answer.next()
                now = time.monotonic()
                if update.token_ids:
                    self._metrics.count(update, now - last.get(index, began), is_first=index not in last)
                    last[index] = now
                if update.is_refused:
                    raise BadRequest(update.error or "")
                yield index, update, read_at
        finally:
            timer.cancel()

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse(tokenize_object(await self._parsed(request, parse_tokenize), self._limits()))

    async def _models(self, request: Request) -> Response:
        limits, name = self._limits(), request.path_params.get("name")
        if name is None:
            return JSONResponse(models_object(limits, self._created))
        if name != limits.model_name:
            raise BadRequest(f"the model {name[:100]!r} does not exist", "model", "model_not_found", 404)
        return JSONResponse(model_object(limits, self._created))

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def _ready(self, _: Request) -> Response:
        if self.is_ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "stopping" if self.is_draining else "starting"}, 503)

    async def _metrics_page(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _page(self, _: Request) -> Response:
        return FileResponse(_PAGE, headers=_PAGE_HEADERS)


def _request() -> asyncio.Task[Any]:
    """The task of the request that is being answered, which ends with its response."""
    task = asyncio.current_task()
    assert task is not None
    return task


def _raising(call: Callable[[], T]) -> T:
    """Run a call in a thread. asyncio futures do not accept StopIteration: they would stay pending."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError("StopIteration") from error


def _line(chunk: dict[str, Any]) -> bytes:
    line = _to_json(chunk)
    for end in _LINE_ENDS:
        line = line.replace(end, f"\\u{ord(end):04x}")
    return b"data: " + line.encode() + b"\n\n"


async def _http_error(_: Request, error: Exception) -> Response:
    """What no route takes."""
    assert isinstance(error, HTTPException)
    response = Failure(error.detail, status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


async def _own_error(_: Request, __: Exception) -> Response:
    """Where no key is asked for; uvicorn has it in the log."""
    return Failure().response()
