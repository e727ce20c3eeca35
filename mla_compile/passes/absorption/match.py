"""What `pattern` finds: the products of an attention, with keys and values as they come from latents."""

from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_compile.passes.absorption.trace import View

RANK = "r"
"""The label of the latents' dimension."""


@dataclass(frozen=True)
class Expansion:
    """`sum over r of latent * weight`, computed by `node`. Labels are those of the product that reads it, and r."""

    node: fx.Node
    latent: View
    weight: View
    rank: Any


@dataclass(frozen=True)
class Part:
    """Positions `[start, start + size)` of a head's key: expanded from latents, or shared by all heads."""

    start: int
    size: int
    source: Expansion | View


@dataclass(frozen=True)
class Keys:
    """The keys that a product with queries reads. `query_term` and `out_term` are those of an einsum."""

    node: fx.Node
    query: View
    query_term: str
    out_term: str
    parts: tuple[Part, ...]
    sizes: dict[str, Any]

    @property
    def expansions(self) -> list[Expansion]:
        return [part.source for part in self.parts if isinstance(part.source, Expansion)]

    @property
    def shared(self) -> list[View]:
        return [part.source for part in self.parts if isinstance(part.source, View)]


@dataclass(frozen=True)
class Values:
    """The values that a product with attention weights reads."""

    node: fx.Node
    weights: View
    weights_term: str
    out_term: str
    expansion: Expansion
    sizes: dict[str, Any]


@dataclass(frozen=True)
class Match:
    """MLA attention: the nodes of its two products, which are one node for a fused attention."""

    keys: Keys
    values: Values

    @property
    def node(self) -> fx.Node:
        return self.values.node

    @property
    def fused(self) -> bool:
        return self.keys.node is self.values.node


@dataclass(frozen=True)
class NearMiss:
    """Attention over joined keys that is not rewritten, and why, in words for its author."""

    node: fx.Node
    reason: str
