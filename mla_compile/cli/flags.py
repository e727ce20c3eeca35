"""Flags made from the dataclass fields that declare settings."""

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, TypeVar

from typer import Option

C = TypeVar("C", bound=Callable[..., Any])


def flags_of(*kinds: type, **defaults: Any) -> Callable[[C], C]:
    """Replace a command's `**settings` by flags: one for each field of these dataclasses that names the command.

    defaults: replace the fields' defaults.
    """

    def with_flags(command: C) -> C:
        signature = inspect.signature(command)
        *own, _ = signature.parameters.values()
        flags = [
            _flag(each, defaults.get(each.name, each.default))
            for kind in kinds
            for each in fields(kind)
            if command.__name__ in each.metadata.get("commands", ())
        ]
        vars(command)["__signature__"] = signature.replace(parameters=[*own, *flags])
        del command.__annotations__["settings"]
        command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
        return command

    return with_flags


def taken(settings: dict[str, Any], kind: type) -> Any:
    """The settings that are fields of a dataclass; the others stay in `settings`."""
    return {each.name: settings.pop(each.name) for each in fields(kind) if each.name in settings}


def _flag(setting: "Field[Any]", default: Any) -> inspect.Parameter:
    """One keyword of the command. Its help shows `show_default` where the flag has no default."""
    metadata = setting.metadata
    flag = dict(metadata["flag"])
    if metadata["least"] is not None:
        flag |= {"min": metadata["least"], "max": metadata["most"] if metadata["most"] < 2**31 - 1 else None}
    if default not in (None, (), ""):
        flag.pop("show_default", None)
    # typer would name these --NAME/--no-NAME, and -n.
    names = [f"--{setting.name.replace('_', '-')}"] if default is False or len(setting.name) == 1 else []
    names = flag.pop("names", names)
    option = Option(*names, help=metadata["help"], **flag)
    of_value: Any = metadata["kind"] or setting.type
    kind: Any = Annotated.__class_getitem__((of_value | None if default is None else of_value, option))  # type: ignore[attr-defined]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
