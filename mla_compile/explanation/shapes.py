"""Shapes and names for people."""

import re
from typing import Any

from torch import Tensor, fx


class Shapes:
    """Writes sizes, with symbols numbered in the order in which they are first seen: `s77` becomes `s0`."""

    def __init__(self) -> None:
        self.symbols: dict[str, str] = {}
        self.hints: dict[str, int] = {}

    def size(self, size: Any) -> str:
        written = str(size)
        if isinstance(size, int):
            return written
        text = re.sub(r"\b([a-z])\d+\b", self._rename, written)
        hint = getattr(size.node, "hint", None)
        if isinstance(hint, int):
            self.hints.setdefault(text, hint)
        return text

    def _rename(self, symbol: re.Match[str]) -> str:
        kind = symbol.group(1)
        number = sum(name.startswith(kind) for name in self.symbols.values())
        return self.symbols.setdefault(symbol.group(), f"{kind}{number}")

    def rows(self, node: fx.Node) -> str:
        """The size of dimension 0."""
        return self.size(tensor_of(node).shape[0])

    def shape(self, node: fx.Node) -> str:
        """`[4*s0, 16, 512]`."""
        return "[" + ", ".join(map(self.size, tensor_of(node).shape)) + "]"


def tensor_of(node: fx.Node) -> Tensor:
    """The node's example tensor, the first one of a tuple."""
    value = node.meta["example_value"]
    while isinstance(value, (tuple, list)):
        value = value[0]
    assert isinstance(value, Tensor), f"{node.name} is no tensor"
    return value


def rows_of(node: fx.Node) -> Any:
    """The size of dimension 0 of a tensor node, else None."""
    value = node.meta.get("example_value")
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else None


def op_name(node: fx.Node) -> str:
    """`mla_decode`, `linear`, `view`."""
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", str(node.target))
    return str(name).removesuffix(".default")
