"""What a server is set to."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine.config import EngineConfig
from mla_compile.engine_settings import CheckpointSettings
from mla_compile.errors import MLAError


@dataclass(frozen=True, kw_only=True)
class ServerSettings(CheckpointSettings):
    """The settings of a server.

    Args:
        model: a directory in Hugging Face format. tokenizer: another one to take the tokenizer from.
        served_model_name: what clients call the model; the directory's name by default.
        dtype: "float32" or "bfloat16", of weights and caches. device: "cpu", "cuda", "cuda:1", ....
        quantize: "fp8" to quantise weights as they are loaded. dequantize: not to keep those that are FP8.
        tensor_parallel_size, expert_parallel: see `Checkpoint.load`.
        engine: of the one engine.
        allowed_hosts: names in `Host` that requests may come by; `localhost` is any of this machine, "*" any at all.
            None for no check. The command adds `localhost` where it listens on this machine only.
        allowed_origins: of web pages that may use the server, as browsers send them, or "*"; its own page always may.
        api_keys: any of them opens `/v1` and `/tokenize`; none for everybody.
        client_header: of a request, whose last entry names the client; a proxy in front must set it. Several keys name
            clients before it; without either it is the address.
        max_waiting: requests beyond the `max_rows` that run; further ones are refused until there is room, but for
            those of a client that has less than an equal share.
        max_body_bytes: of a request.
        request_seconds: a completion takes at most so long.
        stall_seconds: a client that reads nothing, or does not finish its request, for so long is dropped.
        shutdown_seconds: after SIGTERM running requests have so long to end.
        grammar_seconds, grammar_bytes: compiling a grammar takes at most so much.

    Raises:
        MLAError: a bad argument, named.
    """

    model: Path = SHIPPED_MODEL
    served_model_name: str = ""
    device: str = "cpu"
    engine: EngineConfig = field(default_factory=EngineConfig)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    client_header: str | None = None
    max_waiting: int = 256
    max_body_bytes: int = 4 * 2**20
    request_seconds: float = 600.0
    stall_seconds: float = 30.0
    shutdown_seconds: float = 30.0
    grammar_seconds: float = 5.0
    grammar_bytes: int = 2**31

    def __post_init__(self) -> None:
        if not self.served_model_name:
            object.__setattr__(self, "served_model_name", self.model.resolve().name)
        if not self.served_model_name.isprintable():  # it stands in the log
            raise MLAError("served_model_name", "printable characters", repr(self.served_model_name))
        for host in self.allowed_hosts:
            if not re.fullmatch(r"[a-z0-9_.-]+|(?=.*:.*:)[a-f0-9:.]+|\*", host):
                expected = "names or addresses in lower case, without a port, like example.com, or *"
                raise MLAError("allowed_hosts", expected, repr(host))
        for origin in self.allowed_origins:
            if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+|\*", origin):
                expected = "origins as browsers send them, like https://example.com without a path, or *"
                raise MLAError("allowed_origins", expected, repr(origin))
        if self.dtype not in ("float32", "bfloat16"):
            raise MLAError("dtype", "float32 or bfloat16", repr(self.dtype))
        if not all(re.fullmatch("[!-~]+", key) for key in self.api_keys):  # what a header can hold
            raise MLAError("api_keys", "keys of printable ASCII characters without spaces", "others")
        if self.client_header is not None and not re.fullmatch(
            r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", self.client_header
        ):
            raise MLAError("client_header", "the name of a header", repr(self.client_header))
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type in (int, float) and not (isinstance(value, int | float) and value > 0):
                raise MLAError(each.name, "a number > 0", repr(value))
