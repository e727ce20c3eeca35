"""The arguments of a call in a Dynamo graph, by name."""

from collections.abc import Sequence
from typing import Any

from torch import fx

_NUMPYS = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""The names that torch takes from numpy for its own; Dynamo leaves them in the graph."""


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """The argument of that position or name."""
    if len(node.args) > position:
        return node.args[position]
    return _named(node).get(name, default)


def arguments(node: fx.Node, names: Sequence[str]) -> dict[str, Any] | None:
    """The arguments given, by the names of their positions; None where there is one that is not among `names`."""
    named = _named(node)
    if len(node.args) > len(names) or not set(names) >= set(named):
        return None
    return dict(zip(names, node.args)) | named


def _named(node: fx.Node) -> dict[str, Any]:
    return {_NUMPYS.get(name, name): value for name, value in node.kwargs.items()}
