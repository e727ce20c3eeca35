"""Ray Serve: replicas of the server, each with one engine, behind gateways that retry requests.

    client -> Ray's HTTP proxy -> Gateway -> Ray's router -> Replica: the app of `mla_compile.serving`, its engine

Ray's proxy alone would fail a request whose replica dies. A gateway holds a response back until its first bytes arrive:
until then it can resend the request to another replica. After that it sends the client an error by name.
"""

import asyncio
import importlib
import json
import logging
import signal
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import ray
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from mla_compile.errors import MLAError, check_integer
from mla_compile.serving.app import Server, create_app
from mla_compile.serving.failures import Busy, Failure, NotReady
from mla_compile.serving.origins import listening_at, warn_if_open
from mla_compile.serving.settings import ServerSettings
from mla_compile.serving.streams import Bodies, ClientGone

log = logging.getLogger(__name__)

APP_NAME = "mla-compile"
_ATTEMPTS = 3
"""Replicas that a request is sent to in turn: a request that crashes replicas must not crash all."""
_PREFIX_CHARS = 4096
"""Characters of a prompt that the router compares."""
_PROBE_SECONDS = 10.0
"""Timeout of requests without completions."""
_LAST_WORDS_SECONDS = 5.0
"""Gateways wait this much longer than replicas, to send their errors and those of interrupted answers."""
_WITHOUT_ENGINE = ("/", "/health", "/metrics")
_LOST = "replica_lost"
_PREFIX_ROUTER = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
_ROUTER_BOUNDS = {"imbalanced_threshold": 8, "do_eviction": True}
"""A replica this many requests ahead of others gets none for its prefixes; old prefixes are evicted."""


@dataclass(frozen=True)
class Forwarded:
    """A request to send to a replica. prompt: the beginning of its prompt, for Ray's router; may be empty."""

    scope: dict[str, Any]
    body: bytes
    prompt: str = ""

    @classmethod
    def of(cls, request: Request, body: bytes) -> "Forwarded":
        """The parts of a request that a replica needs."""
        names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")
        scope = {name: request.scope[name] for name in (*names, "headers", "client", "server")}
        return cls(scope, body, _beginning(body) if request.method == "POST" else "")


def _beginning(body: bytes) -> str:
    """The start of the prompt's JSON (text, token ids or messages): equal starts mean equal starts of prompts."""
    try:
        asked = json.loads(body)
        given = asked.get("prompt", asked.get("messages"))
        return "" if given is None else json.dumps(given)[:_PREFIX_CHARS]
    except (ValueError, AttributeError, RecursionError):
        return ""  # the replica reports the error


class EngineLost(Exception):
    """A replica's engine failed before it answered."""


class Replica:
    """The app and its engine."""

    async def __init__(self, settings: ServerSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the engine; Ray sends no requests before it is warm.

        Raises:
            MLAError, RuntimeError: the engine failed to start.
        """
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._app = create_app(settings)
        self._server: Server = self._app.state.server
        await self._server.__aenter__()
        await self._server.started()

    async def __del__(self) -> None:  # Ray awaits it too
        if hasattr(self, "_server"):
            await self._server.__aexit__()

    async def check_health(self) -> None:
        """Called by Ray regularly; Ray replaces the replica if it raises."""
        if self._has_failed():
            raise RuntimeError("the engine failed")

    def _has_failed(self) -> bool:
        return not (self._server.is_ready or self._server.is_draining)

    async def drain(self, seconds: float) -> None:
        """Answer no more requests; wait at most `seconds` for those that have come, then end them with an error."""
        await self._server.drain(seconds)

    async def answer(self, forwarded: Forwarded) -> AsyncGenerator[list[Message]]:
        """The ASGI messages of the app's response, in groups that are ready together.

        Raises:
            EngineLost: before any byte of the body.
        """
        needs_engine = forwarded.scope["path"] not in _WITHOUT_ENGINE
        # Ray prefers short queues: a failed replica's requests wait here until Ray notices and moves them.
        while needs_engine and self._has_failed():
            await asyncio.sleep(0.1)
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        task = asyncio.create_task(self._run(forwarded, sent))
        try:
            is_open = True
            while is_open:
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                is_open = messages[-1] is not None
                if needs_engine and self._has_failed():
                    raise EngineLost
                needs_engine = needs_engine and not any(
                    message and message.get("body") for message in messages
                )
                yield [message for message in messages if message is not None]
            await task
        finally:
            task.cancel()  # cancels the request if the response is not read
            await asyncio.wait([task])

    async def page(self, forwarded: Forwarded) -> tuple[str, str]:
        """The replica's name, and the text of its response."""
        async with aclosing(self.answer(forwarded)) as answer:
            parts = [message.get("body", b"") async for messages in answer for message in messages]
        return self._name, b"".join(parts).decode()

    async def _run(self, forwarded: Forwarded, sent: "asyncio.Queue[Message | None]") -> None:
        body: list[Message] = [{"type": "http.request", "body": forwarded.body, "more_body": False}]

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # cancelled when the client disconnects
            return body.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-replica", self._name.encode())]
            await sent.put(message)

        try:
            await self._app(forwarded.scope, receive, send)
        finally:
            sent.put_nowait(None)


class Gateway:
    """Forwards requests to replicas. replicas: Ray's handle of their deployment."""

    def __init__(self, replicas: Any, settings: ServerSettings) -> None:
        self._replicas, self._settings = replicas, settings
        self._bodies = Bodies(settings)
        self._num_waiting = 0  # requests whose response has not begun
        self._is_draining = False
        self._answers = replicas.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        """The response of a replica, or an error."""
        self._num_waiting += 1
        try:
            response = await self._response(request)
        finally:
            self._num_waiting -= 1
        origin, allowed = request.headers.get("origin"), self._settings.allowed_origins
        if "*" in allowed or origin in allowed:  # a replica's response has it; the gateway's errors do not
            response.headers.setdefault("Access-Control-Allow-Origin", "*" if "*" in allowed else str(origin))
        return response

    async def drain(self, seconds: float) -> None:
        """Accept no more requests; wait at most `seconds` for responses to begin."""
        self._is_draining = True
        end = time.monotonic() + seconds
        while self._num_waiting and time.monotonic() < end:
            await asyncio.sleep(0.05)

    async def _response(self, request: Request) -> Response:
        if self._is_draining and request.url.path == "/ready":
            return JSONResponse({"status": "stopping"}, 503)
        seconds = _PROBE_SECONDS
        if request.method == "POST":  # the replica tells what took too long
            seconds = self._settings.request_seconds + _LAST_WORDS_SECONDS
        try:
            if self._is_draining and request.method == "POST":
                raise NotReady
            async with self._bodies.read(request) as body, asyncio.timeout(seconds):
                forwarded = Forwarded.of(request, body)
                if request.url.path == "/metrics":
                    return await self._metrics(forwarded)
                return await self._answered(forwarded)
        except Failure as error:
            return error.response()
        except ClientGone:
            return Response(status_code=499)
        except BackPressureError:
            return Busy().response()
        except (DeploymentUnavailableError, TimeoutError):
            why = f"no replica answered within {seconds:g} s"
            return Failure(why, status=503, retry_after=5).response()

    async def _answered(self, forwarded: Forwarded) -> Response:
        for _ in range(_ATTEMPTS):
            # Ray's prefix router reads the first positional argument, and raises if it has no prompt.
            if forwarded.prompt:
                messages = self._answers.remote(forwarded)
            else:
                messages = self._answers.remote(forwarded=forwarded)
            try:
                return await _begun(messages)
            except (RayActorError, EngineLost) as error:
                log.warning("a replica failed before it answered; resending the request: %s", error)
        why = f"{_ATTEMPTS} replicas in turn failed before they answered"
        return Failure(why, code=_LOST).response()

    async def _metrics(self, forwarded: Forwarded) -> Response:
        """The metrics of all replicas on one page, without those that exit meanwhile."""
        found = await self._replicas.broadcast("page", forwarded).results_async(return_exceptions=True)
        text = generate_latest(_Merged(dict(page for page in found if not isinstance(page, BaseException))))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class _Merged(Collector):
    """Merges the metrics of several replicas, with the replica as a label."""

    def __init__(self, pages: dict[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                known = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
                ]
        return merged.values()


async def _begun(messages: Any) -> Response:
    """The response, once its first bytes have arrived. messages: Ray's generator of the replica's ASGI messages.

    Raises:
        RayActorError: the replica exited first.
    """
    parts: list[Message] = []
    try:
        while not any(part.get("body") or not part.get("more_body", True) for part in parts):
            parts += await anext(messages)
    except BaseException:
        messages.cancel()
        raise
    start, *bodies = parts
    response = StreamingResponse(_rest(bodies, messages, start), start["status"])
    response.raw_headers = list(start["headers"])
    return response


async def _rest(bodies: list[Message], messages: Any, start: Message) -> AsyncGenerator[bytes]:
    """The body; if the replica exits, an event stream ends with an error."""
    try:
        while True:
            for body in bodies:
                yield body.get("body", b"")
                if not body.get("more_body", False):
                    return
            bodies = await anext(messages)
    except RayActorError:
        if not Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream"):
            raise  # the client gets fewer bytes than Content-Length
        why = "the replica exited: the answer is incomplete"
        yield f"data: {json.dumps(Failure(why, code=_LOST).body())}\n\n".encode()
    finally:
        messages.cancel()


def build_app(
    settings: ServerSettings,
    *,
    replicas: int,
    request_router: str | None = None,
) -> Any:
    """An application for `serve.run`, at the route prefix "/".

    Args:
        settings: of each replica; `device` has no number, as Ray chooses the GPUs: `tensor_parallel_size` of one
            machine.
        replicas: the number of replicas, with one engine each.
        request_router: the import path of a router class that chooses the replica of a request. By default Ray's
            `PrefixCacheAffinityRouter`, which prefers replicas that have seen the prompt's beginning, if it can be
            imported (Ray 2.60 needs vLLM or SGLang for that), else Ray's default, the shorter of two queues.

    Raises:
        MLAError: a bad argument, named.
    """
    check_integer("replicas", replicas, 1)
    if settings.device not in ("cpu", "cuda"):
        raise MLAError("device", "cpu or cuda, as Ray chooses the GPU", repr(settings.device))
    num_gpus = settings.tensor_parallel_size if settings.device == "cuda" else 0
    # The app itself rejects excess requests; 64 more leaves room for probes.
    ongoing = settings.engine.max_rows + settings.max_waiting + 64
    options: dict[str, Any] = {}
    router = request_router or _prefix_router()
    if router is not None:
        bounds = _ROUTER_BOUNDS if router == _PREFIX_ROUTER else {}
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=router, request_router_kwargs=bounds
        )
    engines = serve.deployment(
        Replica,
        num_replicas=replicas,
        max_ongoing_requests=ongoing,
        max_queued_requests=settings.max_waiting,
        graceful_shutdown_timeout_s=settings.shutdown_seconds,
        max_constructor_retry_count=2,
        health_check_period_s=2,
        health_check_timeout_s=30,
        ray_actor_options={"num_cpus": 0, "num_gpus": num_gpus},
        **options,
    )
    gateways = serve.deployment(
        Gateway,
        num_replicas=replicas,
        max_ongoing_requests=2 * replicas * ongoing,
        graceful_shutdown_timeout_s=settings.shutdown_seconds + _LAST_WORDS_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    return gateways.bind(engines.bind(settings), settings)


def _prefix_router() -> str | None:
    try:
        importlib.import_module(_PREFIX_ROUTER.rpartition(".")[0])
    except ImportError:
        return None
    return _PREFIX_ROUTER


def serve_replicas(settings: ServerSettings, *, replicas: int, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C; running requests then have `shutdown_seconds`, unless a second signal comes.

    Joins the Ray cluster of RAY_ADDRESS or `ray start`; without one, starts a cluster on this machine and stops it at
    the end. All machines of a cluster need the checkpoint at the same path.

    Raises:
        MLAError: a bad argument. RuntimeError: the engines failed to start.
    """
    settings = listening_at(host, settings)
    app = build_app(settings, replicas=replicas)
    create_app(settings)  # checks the settings here, not in each replica
    ray.init(include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    _log_to_stderr()
    warn_if_open(host, settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own would abort
    try:
        serve.start(http_options={"host": host, "port": port})
        _run(app)
        log.info("ready: http://%s:%d, %d replicas", host, port, replicas)
        threading.Event().wait()
    except KeyboardInterrupt:
        log.info("shutting down: running requests may take up to %g s", settings.shutdown_seconds)
        _drain(settings.shutdown_seconds)
        serve.delete(APP_NAME)
    finally:
        ray.shutdown()


def _drain(seconds: float) -> None:
    """Accept no more requests, and let the accepted ones end; a second signal ends them at once, with an error."""

    def ask(kind: type, seconds: float) -> None:
        handle, most = serve.get_deployment_handle(kind.__name__, APP_NAME), seconds + _LAST_WORDS_SECONDS
        with suppress(DeploymentUnavailableError, RayError, TimeoutError):  # it has ended by itself
            handle.broadcast("drain", seconds).results(timeout_s=most, return_exceptions=True)

    end = time.monotonic() + seconds
    with suppress(KeyboardInterrupt):
        ask(Gateway, seconds)
        ask(Replica, end - time.monotonic())
    ask(Replica, 0.0)


def _run(app: Any) -> None:
    try:
        serve.run(app, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:  # lacks the reason
        why = serve.status().applications[APP_NAME].deployments[Replica.__name__].message
        raise RuntimeError(why) from error


def _log_to_stderr() -> None:
    """Log like `mla-compile serve` without replicas; Ray itself logs JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("mla-compile: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
