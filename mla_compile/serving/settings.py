"""The settings of a server."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from mla_compile.defaults import SHIPPED_MODEL, setting
from mla_compile.engine_settings import CheckpointSettings
from mla_compile.errors import MLAError
from mla_compile.hub import find_checkpoint, model_name

if TYPE_CHECKING:
    from mla_compile.engine.config import EngineConfig


def _default_engine() -> "EngineConfig":
    from mla_compile.engine.config import EngineConfig

    return EngineConfig()


@dataclass(frozen=True, kw_only=True)
class ServerSettings(CheckpointSettings):
    """The settings of a server: of its checkpoint, on the CPU by default, these, and the flags below.

    Args:
        model: a directory in Hugging Face format, or ORG/NAME of a model in the local Hugging Face cache.
        engine: settings of the engine.
        allowed_hosts: accepted names in `Host`; `localhost` is any name of this machine, "*" any name. Empty: not
            checked. The command adds `localhost` if it listens on this machine only.
        allowed_origins: of web pages that may use the server, as browsers send them, or "*"; its own page always may.
        api_keys: `/v1` and `/tokenize` require one of them; empty: no key is needed.
        client_header: a header whose last entry identifies the client; a proxy in front must set it. With several
            keys the key identifies the client instead; with neither, the address does.
        max_waiting: requests that may wait beyond the `max_rows` running ones; further ones are rejected until there
            is room, except those of a client with less than an equal share.
        max_body_bytes: of a request.
        stall_seconds: the server drops a client that does not read, or does not finish its request, for this long.
        grammar_seconds, grammar_bytes: limits of compiling a grammar.

    Raises:
        MLAError: a bad argument.
    """

    model: Path = SHIPPED_MODEL
    engine: "EngineConfig" = field(default_factory=_default_engine)
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    stall_seconds: float = 30.0
    grammar_seconds: float = 5.0
    grammar_bytes: int = 2**31
    served_model_name: str = setting(
        "",
        "serve",
        "The model's name in requests.",
        metavar="NAME",
        show_default="ORG/NAME, or the directory's name",
    )
    chat_template: Path | None = setting(
        None,
        "serve",
        "A Jinja template that makes a prompt of a chat's messages.",
        metavar="FILE",
        show_default="the tokenizer's",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "serve",
        "Accepted names in Host; localhost: any of this machine, *: all.",
        kind=str | None,
        metavar="NAME,NAME,...",
        show_default="all; localhost if --host is of this machine",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "serve",
        "Origins of web pages that may use the server, such as https://example.com; *: all.",
        kind=str | None,
        metavar="URL,URL,...",
        show_default="the server's own page",
    )
    max_waiting: int = setting(
        256,
        "serve",
        "Requests that may wait. Beyond its equal share, a client gets status 429.",
        least=1,
        metavar="N",
    )
    client_header: str | None = setting(
        None,
        "serve",
        "The header that identifies the client, such as X-Forwarded-For; a proxy must set it.",
        metavar="NAME",
        show_default="the key, or the address",
    )
    request_seconds: float = setting(
        600.0,
        "serve",
        "Completions that take longer are ended.",
        names=["--request-timeout"],
        metavar="SECONDS",
    )
    shutdown_seconds: float = setting(
        30.0,
        "serve",
        "Time for running requests to finish after SIGTERM.",
        names=["--shutdown-timeout"],
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", self.device or "cpu")
        object.__setattr__(self, "model", find_checkpoint(self.model, "model"))
        object.__setattr__(self, "served_model_name", self.served_model_name or model_name(self.model))
        if not self.served_model_name.isprintable():  # it is logged
            raise MLAError("served_model_name", "printable characters", repr(self.served_model_name))
        if self.chat_template is not None:
            from mla_compile.serving.chat_templates import read_chat_template

            read_chat_template(self.chat_template)  # errors come before the model is loaded
        for host in self.allowed_hosts:
            if not re.fullmatch(r"[a-z0-9_.-]+|(?=.*:.*:)[a-f0-9:.]+|\*", host):
                expected = "names or addresses in lower case, without a port, like example.com, or *"
                raise MLAError("allowed_hosts", expected, repr(host))
        for origin in self.allowed_origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+|\*", origin):
                expected = "origins as browsers send them, like https://example.com without a path, or *"
                raise MLAError("allowed_origins", expected, repr(origin))
        if self.dtype not in (None, "float32", "bfloat16"):
            raise MLAError("dtype", "float32 or bfloat16", repr(self.dtype))
        for key in self.api_keys:
            check_api_key("api_keys", key)
        if self.client_header is not None and not re.fullmatch(
            r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", self.client_header
        ):
            raise MLAError("client_header", "a valid header name", repr(self.client_header))
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type in (int, float) and not (isinstance(value, int | float) and value > 0):
                raise MLAError(each.name, "a number > 0", repr(value))


def check_api_key(name: str, key: str) -> None:
    """Raises `MLAError`, without the key, if no header could have it."""
    if not re.fullmatch("[!-~]+", key):
        raise MLAError(name, "a key of printable ASCII characters without spaces", "other characters")
