"""Whether a fused MLA attention reads one contiguous static cache under a causal prefix mask, as `mla_decode` does."""

from dataclasses import dataclass, replace

from torch import fx

from mla_compile.passes.absorption.causal_prefix import Prefix, causal_prefix
from mla_compile.passes.absorption.checks import first_write
from mla_compile.passes.absorption.form import Reader, reader
from mla_compile.passes.absorption.index_map import Index, Sizes, same
from mla_compile.passes.absorption.match import RANK, Match
from mla_compile.passes.absorption.products import SUMMED
from mla_compile.passes.absorption.trace import View, trace
from mla_compile.passes.nodes import argument, is_tensor, tensor_of


@dataclass(frozen=True)
class StaticCache:
    """A graph input `[cache rows, keys, rank + rope]` (dimensions of size 1 may be between), read whole.

    shape: the cache's, in those three dimensions; first_row: where the batch starts; terms: signed readers of what
    the prefix's bound is a sum of, each `[rows or 1]`.
    """

    node: fx.Node
    shape: tuple[int, int, int]
    first_row: int
    prefix: Prefix
    terms: tuple[tuple[int, Reader], ...]


def static_cache(match: Match) -> StaticCache | None:
    keys, values = match.keys, match.values
    mask = argument(match.values.node, 3, "attn_mask")
    sizes = {**keys.sizes, RANK: values.expansion.rank}
    if len(keys.parts) != 2 or len(keys.shared) != 1 or len(keys.out_term) != 4 or not is_tensor(mask):
        return None
    if argument(values.node, 5, "is_causal", False) or not all(isinstance(sizes[i], int) for i in "abcd"):
        return None
    (k_pe,) = keys.shared
    views = [trace(keys.expansions[0].latent, sizes), trace(values.expansion.latent, values.sizes), k_pe]
    regions = [_region(views[0], sizes, "d", RANK), _region(views[1], values.sizes, SUMMED, RANK)]
    latents, pe = regions[0], _region(k_pe, sizes, "d", SUMMED)
    if latents is None or pe is None or latents != regions[1]:
        return None
    width = sizes[RANK] + next(part.size for part in keys.parts if part.source is k_pe)
    if (latents.feature, pe.feature) != (0, sizes[RANK]) or replace(pe, feature=0) != latents:
        return None
    if latents.width != width or (sizes["a"] > 1) != latents.by_row:
        return None
    prefix = causal_prefix(mask, sizes)
    if prefix is None:
        return None
    bounds = [view for _, view in prefix.bound.views]
    if first_write(match, [*views, *bounds]) or first_write(match, list(prefix.counted), made=True):
        return None
    terms: list[tuple[int, Reader]] = []
    for sign, view in prefix.bound.views:
        term = reader(view, sizes, "a")
        if term is None:
            return None
        terms.append((sign, term))
    shape = (latents.rows, sizes["d"], width)
    return StaticCache(views[0].node, shape, latents.first_row, prefix, tuple(terms))


@dataclass(frozen=True)
class _Region:
    """Part of a cache: rows from `first_row` on, all keys, `width` wide features from `feature` on."""

    node: fx.Node
    rows: int
    first_row: int
    by_row: bool
    feature: int
    width: int


def _region(view: View, sizes: Sizes, key: str, feature: str) -> _Region | None:
    value = tensor_of(view.node)
    if view.node.op not in ("placeholder", "get_attr") or not all(
        isinstance(size, int) for size in value.shape
    ):
        return None
    dims = [(index, size) for index, size in zip(view.indices, value.shape) if not same(size, 1)]
    dims = [(Index(), 1)] * (3 - len(dims)) + dims
    (row, rows), (position, length), (element, width) = dims if len(dims) == 3 else [(Index(), 0)] * 3
    whole = position == Index(0, ((key, 1),)) and length == sizes[key]
    if not value.is_contiguous() or not whole or element.terms != ((feature, 1),):
        return None
    if row.terms not in ((), (("a", 1),)):
        return None
    return _Region(view.node, rows, row.offset, bool(row.terms), element.offset, width)
