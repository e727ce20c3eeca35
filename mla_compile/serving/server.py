"""`mla-compile serve`: one process for HTTP, one for the engine; SIGTERM lets running requests end."""

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn

from mla_compile.serving.app import Server, create_app
from mla_compile.serving.settings import ServerSettings

log = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    """Tells where it listens and when it is ready; drains before it exits, unless a second signal comes."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._limit_stalls()
            self._tasks.append(asyncio.create_task(self._tell()))

    def _limit_stalls(self) -> None:
        """Where the kernel can, it hangs up on clients that take nothing, whatever is on its way to them."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections have it from the socket that listens
            milliseconds = int(1000 * self._server.settings.stall_seconds)
            for each in self.servers[0].sockets:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    async def _tell(self) -> None:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        model = self._server.settings.served_model_name
        log.info("listening at http://%s:%d, loading %s", host, port, model)
        await self._server.started()
        if self._server.failure is not None:
            self.should_exit = True
        else:
            log.info("ready: http://%s:%d", host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGTERM and len(self._tasks) < 2:
            self._tasks.append(asyncio.get_event_loop().create_task(self._drain()))
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        log.info("stopping: running requests have %g s", self._server.settings.shutdown_seconds)
        await self._server.drain()
        self.should_exit = True


def serve(settings: ServerSettings, *, host: str, port: int) -> None:
    """Serve until SIGTERM, after which running requests have `shutdown_seconds`, or until Ctrl-C.

    Raises:
        MLAError: a mistake in the settings. SystemExit: the port is taken.
    """
    app = create_app(settings)
    server: Server = app.state.server
    logging.basicConfig(level=logging.WARNING, format="mla-compile: %(message)s")
    logging.getLogger("mla_compile.serving").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each request that is no HTTP
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    _Uvicorn(config, server).run()
    if server.failure is not None:
        raise server.failure
