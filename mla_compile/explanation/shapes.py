"""Shapes and names in readable form."""

import re
from typing import Any

from torch import fx

from mla_compile.passes.nodes import tensor_of


class Shapes:
    """Formats sizes, and numbers symbols in order of first use: `s77` becomes `s0`."""

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

    def first_size(self, node: fx.Node) -> str:
        """The size of dimension 0."""
        return self.size(tensor_of(node).shape[0])

    def shape(self, node: fx.Node) -> str:
        """`[4*s0, 16, 512]`."""
        return "[" + ", ".join(map(self.size, tensor_of(node).shape)) + "]"
