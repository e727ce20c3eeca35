"""Which names the server answers to, and which web pages may use it: those in a user's browser reach localhost, too."""

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

_PROBES = ("/health", "/ready")
"""Load balancers ask by address, and a page learns nothing from the answer."""
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:/@\[\]]+))(?::\d*)?", re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Whether a name or an address can only be this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listening_at(host: str, settings: ServerSettings) -> ServerSettings:
    """With a check of `Host` where only this machine can connect: a web page may have another name point here."""
    return (
        replace(settings, allowed_hosts=("localhost", *settings.allowed_hosts))
        if is_loopback(host)
        else settings
    )


def checks(settings: ServerSettings) -> list[Middleware]:
    """Middleware that refuses other names and pages, and answers the browsers of the pages that are allowed."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # clients send headers of their own
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
            message = f"Host: expected a name that --allowed-hosts has, got {given}"
            return Failure(message, status=421).response()
        for origin in origins:
            if not self._is_origin(origin, hosts):
                message = f"Origin: expected one that --allowed-origins has, got {origin[:100]!r}"
                return Failure(message, status=403).response()
        return None

    def _is_host(self, given: str) -> bool:
        """`localhost` allows every name of this machine."""
        match = _HOST.fullmatch(given)
        name = (match[1] or match[2]).lower() if match else ""
        return "*" in self._hosts or name in self._hosts or ("localhost" in self._hosts and is_loopback(name))

    def _is_origin(self, origin: str, hosts: list[str]) -> bool:
        """The server's own page is, and a page without an origin is not."""
        is_own = origin.lower() in [
            f"{scheme}://{host}".lower() for scheme in ("http", "https") for host in hosts
        ]
        return is_own or origin in self._origins or ("*" in self._origins and origin != "null")
