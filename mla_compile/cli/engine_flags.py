"""The flags of engine settings, made of the fields that declare them."""

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, TypeVar

from typer import Option

from mla_compile.engine_settings import EngineFields

C = TypeVar("C", bound=Callable[..., Any])


def engine_flags(**defaults: Any) -> Callable[[C], C]:
    """A command's `**settings` become flags: those of the engine settings that name the command.

    defaults: of flags that are not the setting's.
    """

    def with_flags(command: C) -> C:
        signature = inspect.signature(command)
        *own, _ = signature.parameters.values()
        flags = [
            _flag(each, defaults.get(each.name, each.default))
            for each in fields(EngineFields)
            if command.__name__ in each.metadata["commands"]
        ]
        vars(command)["__signature__"] = signature.replace(parameters=[*own, *flags])
        del command.__annotations__["settings"]
        command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
        return command

    return with_flags


def _flag(setting: "Field[Any]", default: Any) -> inspect.Parameter:
    """One keyword of the command. Without a default it shows what stands for it."""
    metadata = setting.metadata
    flag = dict(metadata["flag"])
    if metadata["least"] is not None:
        flag |= {"min": metadata["least"], "max": metadata["most"] if metadata["most"] < 2**31 - 1 else None}
    if default is not None:
        flag.pop("show_default", None)
    names = [f"--{setting.name.replace('_', '-')}"] if default is False else []
    option = Option(*names, help=metadata["help"], **flag)
    kind: Any = Annotated.__class_getitem__((metadata["kind"] or setting.type, option))  # type: ignore[attr-defined]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
