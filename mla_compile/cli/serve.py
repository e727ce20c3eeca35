"""`mla-compile serve`: serve a checkpoint over HTTP."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mla_compile.cli.machine import pick_device
from mla_compile.engine.config import EngineConfig, check_max_model_len
from mla_compile.engine_settings import EngineSettings
from mla_compile.errors import MLAError
from mla_compile.models.checkpoint import read_config
from mla_compile.serving.settings import ServerSettings, check_api_key

API_KEY = "MLA_COMPILE_API_KEY"
"""The environment variable that may hold a key."""


def serve_checkpoint(
    *,
    host: str,
    port: int,
    model: Path,
    device: str | None,
    api_key_file: Path | None,
    replicas: int | None,
    engine: EngineSettings,
    **settings: Any,
) -> None:
    """engine: settings of `EngineConfig`. settings: of `ServerSettings`.

    Raises:
        MLAError: a bad setting.
    """
    if replicas is not None and settings["tensor_parallel_size"] > 1:
        expected = "1 with --replicas, as each has one GPU"
        raise MLAError("--tensor-parallel-size", expected, settings["tensor_parallel_size"])
    serve = _server(replicas)
    config = read_config(model).config
    check_max_model_len(engine["max_model_len"], config.max_position_embeddings)
    whole = EngineConfig(**engine)
    keys = _read_keys(api_key_file)
    place = str(pick_device(device))
    for name in ("allowed_hosts", "allowed_origins"):
        given = settings.pop(name)
        settings[name] = () if given is None else tuple(given.split(","))
    serve(
        ServerSettings(model=model, device=place, api_keys=keys, engine=whole, **settings),
        host=host,
        port=port,
    )


def _server(replicas: int | None) -> Callable[..., None]:
    """The function that serves, with one engine or with replicas on Ray."""
    extra = "serve" if replicas is None else "ray"
    try:
        if replicas is None:
            from mla_compile.serving.server import serve

            return serve
        from mla_compile.integrations.ray.serve import serve_replicas

        return partial(serve_replicas, replicas=replicas)
    except ModuleNotFoundError as error:
        if error.name not in ("httptools", "prometheus_client", "ray", "starlette", "uvicorn"):
            raise
        hint = f"pip install '.[{extra}]' in the clone"
        what = "over HTTP" if replicas is None else "replicas"
        raise MLAError(error.name, f"this package, to serve {what}", "none", hint) from error


def _read_keys(file: Path | None) -> tuple[str, ...]:
    """The API keys of a file, one per line, and of the environment."""
    keys = {API_KEY: os.environ[API_KEY].strip()} if API_KEY in os.environ else {}  # by the place that has it
    if not all(keys.values()):
        raise MLAError(API_KEY, "a key", "an empty value", "unset it to require no key")
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MLAError(f"--api-key-file {file}", "a text file with one key per line", error) from error
        if not any(line.strip() for line in lines):
            raise MLAError(f"--api-key-file {file}", "at least one key", "none")
        places = enumerate(map(str.strip, lines), start=1)
        keys |= {f"--api-key-file {file}, line {number}": line for number, line in places if line}
    for place, key in keys.items():
        check_api_key(place, key)
    return tuple(keys.values())
