"""How what an absorbed attention reads is brought into the shape that it needs."""

from dataclasses import dataclass
from typing import Any

from mla_compile.passes.absorption.checks import first_write
from mla_compile.passes.absorption.form import Reader, Step, reader_of
from mla_compile.passes.absorption.index_map import Sizes, same
from mla_compile.passes.absorption.joins import joined_parts
from mla_compile.passes.absorption.match import RANK, Expansion, Match, Part
from mla_compile.passes.absorption.products import SUMMED
from mla_compile.passes.absorption.trace import View, trace
from mla_compile.passes.nodes import tensor_of


@dataclass(frozen=True)
class Summand:
    """A part of the scores: queries, the weight that takes them to the latents or None, latents or shared keys.

    of_values: whether the keys are, element by element, the latents that the values are made of.
    """

    query: Reader
    w_uk: Reader | None
    keys: Reader
    of_values: bool


@dataclass(frozen=True)
class Operands:
    """The summands of the scores, and what the weights meet afterwards."""

    scores: tuple[Summand, ...]
    kv_c: Reader
    w_uv: Reader


def operands_of(match: Match) -> Operands | None:
    """None where slicing and `unflatten` cannot bring a tensor into shape.

    For a fused attention the dimensions are those of `form.fused_attention`; for products spelled out, the
    labels of the product in alphabetical order.
    """
    keys, values = match.keys, match.values
    rows, heads = ("_", "a") if len(keys.out_term) == 3 else ("a", "b")

    def read(view: View, sizes: Sizes, term: str) -> Reader | None:
        wanted = term if match.fused else None
        return reader_of(view, sizes, wanted) or reader_of(trace(view, sizes), sizes, wanted)

    expansion = values.expansion
    of_values = {**values.sizes, RANK: expansion.rank}
    kv_c = read(expansion.latent, of_values, rows + SUMMED + RANK)
    w_uv = read(expansion.weight, of_values, heads + RANK + "d")
    if kv_c is None or w_uv is None:
        return None
    scores: list[Summand] = []
    for part in keys.parts:
        sizes = {**keys.sizes, SUMMED: part.size}
        w_uk: Reader | None = None
        if isinstance(part.source, Expansion):
            sizes[RANK] = part.source.rank
            w_uk = read(part.source.weight, sizes, heads + SUMMED + RANK)
            met = read(part.source.latent, sizes, rows + "d" + RANK)
        else:
            met = read(part.source, sizes, rows + "d" + SUMMED)
        if met is None or (w_uk is None and isinstance(part.source, Expansion)):
            return None
        both = match.fused and w_uk is not None and _same_elements(met, sizes, kv_c, of_values)
        scores.append(Summand(_query(match, part), w_uk, met, both))
    return Operands(tuple(scores), kv_c, w_uv)


def _same_elements(reader: Reader, sizes: Sizes, other: Reader, other_sizes: Sizes) -> bool:
    """Whether two readers give tensors that are equal where both are read at the same time."""

    def elements(reader: Reader) -> list[tuple[int, list[tuple[int, int]]]]:
        return [
            (index.offset, sorted((reader.term.index(label), step) for label, step in index.terms))
            for index in reader.indices
        ]

    extents = [(sizes.get(a, 1), other_sizes.get(b, 1)) for a, b in zip(reader.term, other.term)]
    return (
        reader.node is other.node
        and elements(reader) == elements(other)
        and all(same(mine, theirs) for mine, theirs in extents)
    )


def _query(match: Match, part: Part) -> Reader:
    """The queries that meet one part of the keys: an operand of the `cat` that joined them, or a slice."""
    keys = match.keys
    node, dim = keys.query.node, keys.query_term.index(SUMMED)
    cut = part.size < keys.sizes[SUMMED]
    joined = joined_parts(node)
    low = 0
    for operand, filled_by in joined[1] if joined is not None and joined[0] == dim else ():
        width: Any = tensor_of(operand).shape[dim]
        kept = View(operand, (), ((node, operand),))
        if (low, width) == (part.start, part.size) and not filled_by and not first_write(match, [kept]):
            node, cut = operand, False
        low += width
    steps: list[Step] = [lambda x: x.narrow(dim, part.start, part.size)] if cut else []
    if match.fused and len(keys.query_term) == 3:
        steps.append(lambda x: x.unsqueeze(0))
    return Reader(node, keys.query_term, tuple(steps))
