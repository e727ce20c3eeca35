"""Checks of `Host` and `Origin`: web pages in a user's browser can reach servers on localhost, too."""

import logging
import re
from dataclasses import replace
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mla_compile.serving.failures import Failure
from mla_compile.serving.settings import ServerSettings

log = logging.getLogger(__name__)

_PROBES = ("/health", "/ready")
"""Not checked: load balancers use addresses, and the responses reveal nothing to a page."""
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/@\[\]]+))(?::\d*)?", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Whether a name or address always means this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listening_at(host: str, settings: ServerSettings) -> ServerSettings:
    """Check `Host` if only this machine can connect: DNS rebinding lets a page's name resolve to it."""
    return (
        replace(settings, allowed_hosts=("localhost", *settings.allowed_hosts))
        if is_loopback(host)
        else settings
    )


def warn_if_open(host: str, settings: ServerSettings) -> None:
    """Log that a server takes requests of other machines without a key."""
    if not settings.api_keys and not is_loopback(host):
        log.warning(
            "no API key: whatever reaches %s may use the server; set MLA_COMPILE_API_KEY or --api-key-file",
            host,
        )


def checks(settings: ServerSettings) -> list[Middleware]:
    """Middleware that rejects other hosts and origins, and answers CORS requests of allowed origins."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # clients send various headers
        expose_headers=("Retry-After",),
        allow_private_network=True,
    )
    return [Middleware(_Check, settings=settings), *([cors] if settings.allowed_origins else [])]


class _Check:
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._hosts, self._origins = settings.allowed_hosts, settings.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None
        if scope["type"] == "http" and scope["path"] not in _PROBES:
            refusal = self._refusal(Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if self._hosts and not (len(hosts) == 1 and self._is_host(hosts[0])):
            given = ", ".join(map(repr, hosts))[:100] or "nothing"
            message = f"Host: expected a name in --allowed-hosts, got {given}"
            return Failure(message, status=421).response()
        for origin in origins:
            if not self._is_origin(origin, hosts):
                message = f"Origin: expected one of --allowed-origins, got {origin[:100]!r}"
                return Failure(message, status=403).response()
        return None

    def _is_host(self, given: str) -> bool:
        """`localhost` allows every name of this machine."""
        match = _HOST.fullmatch(given)
        name = (match[1] or match[2]).lower() if match else ""
        return "*" in self._hosts or name in self._hosts or ("localhost" in self._hosts and is_loopback(name))

    def _is_origin(self, origin: str, hosts: list[str]) -> bool:
        """Whether an origin is allowed: the server's own is, "null" is not."""
        is_own = origin.lower() in [
            f"{scheme}://{host}".lower() for scheme in ("http", "https") for host in hosts
        ]
        return is_own or origin in self._origins or ("*" in self._origins and origin != "null")
