"""`mla-compile serve`: one process for HTTP, one for the engine; SIGTERM lets running requests end."""

import asyncio
import logging
import signal
from types import FrameType

import uvicorn

from mla_compile.serving.app import Server, create_app
from mla_compile.serving.settings import ServerSettings

log = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    """Drains before it exits; a second signal does not wait."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is None and sig == signal.SIGTERM:
            self._draining = asyncio.get_event_loop().create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._server.drain()
        self.should_exit = True


def serve(settings: ServerSettings, *, host: str, port: int) -> None:
    """Serve until SIGTERM, after which running requests have `shutdown_seconds`, or until Ctrl-C.

    Raises:
        MLAError: a mistake in the settings. SystemExit: the port is taken.
    """
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    _Uvicorn(config, app.state.server).run()
