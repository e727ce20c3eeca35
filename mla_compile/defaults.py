"""Numbers, names and places that the library and the command share. Importing them takes no torch."""

from dataclasses import field
from pathlib import Path
from typing import Any, Literal

SHIPPED_MODEL = Path(__file__).parent / "models" / "shipped"
DEFAULT_DRAFTS = 3
"""Tokens drafted per step by default, if the checkpoint has an MTP layer or a drafter was given."""
MAX_DRAFTS = 32
"""Far more than is useful: each one is a pass of the MTP layer in the graph."""
DEFAULT_MAX_TOKENS = 128
"""New tokens per request."""
DEFAULT_MAX_ROWS = 8
"""Requests that run at once."""
DEFAULT_MAX_MODEL_LEN = 2048
"""Tokens of a request. The caches' size follows from it and is compiled in, so users of it share compiled steps."""
DEFAULT_PAGE_SIZE = 16
"""Tokens of a cache page."""

DrafterName = Literal["mtp", "ngram"]
"""The names in `speculate.drafter.DRAFTERS`."""


def setting(
    default: Any,
    commands: str,
    help: str,
    *,
    least: int | None = None,
    most: int = 2**31 - 1,
    kind: Any = None,
    **flag: Any,
) -> Any:
    """A field of a dataclass whose fields are settings.

    commands: the commands that have a flag for it. help: its help text. kind: the flag's type, if it differs from
    the field's type. flag: further arguments of `typer.Option`. least, most: bounds of an integer.
    """
    metadata = {"commands": commands.split(), "help": help, "least": least, "most": most, "kind": kind}
    return field(default=default, metadata=metadata | {"flag": flag})
