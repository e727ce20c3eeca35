"""`mla-compile serve`: one process for HTTP, one for the engine; SIGTERM lets running requests end."""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn

from mla_compile.errors import MLAError, first_line
from mla_compile.serving.app import Server, create_app
from mla_compile.serving.origins import listening_at, warn_if_open
from mla_compile.serving.protocol import BoundedHttp
from mla_compile.serving.settings import ServerSettings

log = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    """Logs its address and when it is ready, drops idle clients, and drains before it exits.

    failure: why the engine failed to start.
    """

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._announcing: asyncio.Task[None] | None = None
        self._stopping: list[asyncio.Task[None]] = []
        self._silent: dict[tuple[Any, Any], float] = {}  # when a connection became idle
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as end:
            if not isinstance(end.__context__, OSError):
                raise
            self.failure, self.should_exit = self._cannot_listen(end.__context__), True
        if not self.should_exit:
            self._limit_stalls()
            self._announcing = asyncio.create_task(self._announce())

    def _cannot_listen(self, error: OSError) -> MLAError:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            got = f"{self.config.port} ({os.strerror(error.errno)})"
            return MLAError("port", "a free port", got, "0 takes any free one")
        return MLAError("host", "an address of this machine", f"{self.config.host} ({first_line(error)})")

    def _limit_stalls(self) -> None:
        """Let the kernel, where it can, close connections whose clients do not read."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it from the listening socket
            milliseconds = int(1000 * self._server.settings.stall_seconds)
            for each in self.servers[0].sockets:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if counter % 10 == 0:
            self._drop_silent()
        return await super().on_tick(counter)

    def _drop_silent(self) -> None:
        """Close idle connections: uvicorn waits forever for a request head. `cycle` is the newest request of one."""
        now = time.monotonic()
        cycles = [(each, getattr(each, "cycle", None)) for each in self.server_state.connections]
        self._silent = {
            (connection, cycle): self._silent.get((connection, cycle), now)
            for connection, cycle in cycles
            if cycle is None or cycle.response_complete
        }
        for (connection, _), since in self._silent.items():
            if now - since > self._server.settings.stall_seconds:
                connection.transport.close()

    async def _announce(self) -> None:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("listening at %s, loading %s", url, self._server.settings.served_model_name)
        try:
            await self._server.started()
        except (MLAError, RuntimeError) as error:
            self.failure, self.should_exit = error, True
        else:
            gc.freeze()  # garbage collection skips the objects made so far
            log.info("ready: %s", url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_patient = sig == signal.SIGTERM and not self._stopping
        seconds = self._server.settings.shutdown_seconds if is_patient else 0.0
        self._stopping.append(asyncio.get_running_loop().create_task(self._stop(seconds)))

    async def _stop(self, seconds: float) -> None:
        if count := self._server.num_unanswered:
            log.info("shutting down: %d request%s may take %g s more", count, "s" * (count > 1), seconds)
        else:
            log.info("shutting down: nothing is running")
        await self._server.drain(seconds)
        self.should_exit = True


class _Printable(logging.Formatter):
    """Keeps a record on one line, whatever clients send, and indents a traceback's lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record).strip())

    def formatException(self, ei: Any) -> str:
        return "\n".join("  " + printable(line) for line in super().formatException(ei).splitlines())


def printable(text: str) -> str:
    """Escape control characters, which could move a terminal's cursor or start a line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def serve(settings: ServerSettings, *, host: str, port: int) -> None:
    """Serve until SIGTERM, which gives running requests `shutdown_seconds`, or until Ctrl-C.

    Raises:
        MLAError: a bad setting, such as a port that is taken. SystemExit: the engine failed to start.
    """
    app = create_app(listening_at(host, settings))
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("mla-compile: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("mla_compile.serving").setLevel(logging.INFO)
    log_of_uvicorn = logging.getLogger("uvicorn.error")
    log_of_uvicorn.setLevel(logging.ERROR)  # it warns of every invalid HTTP request
    log_of_uvicorn.addFilter(lambda record: not isinstance(record.msg, OSError))  # see `_cannot_listen`
    warn_if_open(host, settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=BoundedHttp,
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=5,
        server_header=False,
        proxy_headers=False,  # only --client-header may name the client
    )
    server = _Uvicorn(config, app.state.server)
    server.run()
    if isinstance(server.failure, MLAError):
        raise server.failure
    if server.failure is not None:
        log.error("%s", server.failure)
        sys.exit(1)
