"""The HTTP side: OpenAI's endpoints, probes, metrics and a page."""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException

from mla_compile.models import load_tokenizer
from mla_compile.serving.engine_client import Answer, Busy, EngineClient, NotReady
from mla_compile.serving.grammars import GrammarCheck
from mla_compile.serving.messages import Asked, Progress
from mla_compile.serving.metrics import Metrics
from mla_compile.serving.openai_requests import (
    BadRequest,
    CompletionsAsked,
    ModelLimits,
    parse_chat,
    parse_completion,
    parse_tokenize,
)
from mla_compile.serving.settings import ServerSettings
from mla_compile.serving.streams import EventStream, while_connected

log = logging.getLogger(__name__)


def create_app(settings: ServerSettings) -> FastAPI:
    """The app of one engine, which starts and ends with it. `app.state.server` is its `Server`."""
    server = Server(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with server:
            yield

    app = FastAPI(title="mla-compile", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = server
    server.add_routes(app)
    return app


class Server:
    """One engine behind HTTP.

    failure: why the engine could not be started; None while that is not known.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        tokenizer = load_tokenizer(settings.tokenizer or settings.model)
        if tokenizer is None:
            raise MLAError("tokenizer", "a checkpoint with a tokenizer, to serve text", "none")
        self._tokenizer = tokenizer
        self._client = EngineClient(settings, lambda _: None)
        self._grammars = GrammarCheck(settings)
        self._metrics = Metrics(lambda: self._client.stats, lambda: self.is_ready)
        self._keys = [key.encode() for key in settings.api_keys]
        self._is_draining = False
        self._starting: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None

    async def __aenter__(self) -> None:
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self._client.start()
        except (MLAError, RuntimeError) as error:
            self.failure = error

    async def __aexit__(self, *_: object) -> None:
        await self._client.stop()
        self._grammars.stop()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken on."""
        return self._client.ready is not None and not self._is_draining

    async def drain(self) -> None:
        """Take on no more requests; wait for those that run, `shutdown_seconds` at most, and then end them."""
        self._is_draining = True
        end = time.monotonic() + self.settings.shutdown_seconds
        while self._client.num_running and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._client.end_all("the server shuts down")
