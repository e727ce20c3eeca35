"""Matrix products of a graph as sums over labelled dimensions (an einsum)."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_compile.passes.absorption.index_map import Index, same
from mla_compile.passes.absorption.trace import View, read
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name

SUMMED, RANK, KEY = "z", "r", "d"
"""The label of the dimension that a product sums over, that of the latents' dimension where it is another one, and that
of the keys in the scores. Attention is `[a, b, c, d]`: rows, heads, query tokens, and keys or features."""


@dataclass(frozen=True)
class Product:
    """`node = sum over z of left * right`; `terms` and `out` are those of an einsum."""

    node: fx.Node
    operands: Sequence[fx.Node]
    terms: tuple[str, str]
    out: str
    biased: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {}
        for operand, term in zip(self.operands, self.terms):
            for label, size in zip(term, tensor_of(operand).shape):
                if same(sizes.get(label, 1), 1):
                    sizes[label] = size
        return sizes

    @property
    def right(self) -> View:
        return read(self.operands[1], self.terms[1])

    def behind(self, view: View) -> list[View]:
        """What the operands are read at for a view of the product; the summed label is `RANK`."""
        indices = dict(zip(self.out, view.indices)) | {SUMMED: Index(0, ((RANK, 1),))}
        views = []
        for operand, term in zip(self.operands, self.terms):
            sized = zip(term, tensor_of(operand).shape)
            views.append(
                view.onto(operand, [Index() if same(size, 1) else indices[label] for label, size in sized])
            )
        return views


def as_product(node: fx.Node) -> Product | None:
    """`linear`, `matmul` and `@`; None for anything else."""
    name = torch_name(node)
    if name not in ("linear", "matmul") or not is_tensor(node) or not all(map(is_tensor, node.args[:2])):
        return None
    left, right = node.args[:2] if len(node.args) > 1 else (None, None)
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    out = string.ascii_lowercase[: tensor_of(node).dim()]
    ranks = tensor_of(left).dim(), tensor_of(right).dim()
    if any(tensor_of(x).dtype != tensor_of(node).dtype for x in (left, right)) or min(ranks) < 2:
        return None
    if name == "linear":
        biased = argument(node, 2, "bias") is not None
        return Product(node, (left, right), (out[:-1] + SUMMED, out[-1] + SUMMED), out, biased)
    terms = out[:-1][-ranks[0] + 1 :] + SUMMED, (out[:-2] + SUMMED + out[-1])[-ranks[1] :]
    return Product(node, (left, right), terms, out)
