"""Index arithmetic: which element of a tensor one reads through a reshape, a slice or a broadcast of it.

An index along a dimension is an affine function of labelled positions, as the letters of an einsum: reading
`x.view(b, t, heads, 16)` at `[b, t, h, d]` reads `x` at `[b, t, 16 * h + d]`; an expanded dimension is read at 0, so
what all heads share does not depend on `h`. However a module is written, what it reads is the same.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mla_compile.torch_internals import statically_known_true

Sizes = Mapping[str, Any]
"""How far each label runs; Python ints where static."""


@dataclass(frozen=True)
class Index:
    """Index along one dimension: `offset + sum(step * position[label] for label, step in terms)`."""

    offset: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    @property
    def labels(self) -> set[str]:
        return {label for label, _ in self.terms}

    def shifted(self, start: int, step: int = 1) -> "Index":
        return Index(start + step * self.offset, tuple((label, step * by) for label, by in self.terms))


def index_of(label: str, size: Any) -> Index:
    return Index() if same(size, 1) else Index(0, ((label, 1),))


def same(size: Any, other: Any) -> bool:
    return statically_known_true(size == other)


def expanded(indices: Sequence[Index], shape: Sequence[Any], source: Sequence[Any]) -> list[Index] | None:
    """Broadcasting aligns dimensions at the end; where the source has size 1 it is read at 0."""
    if len(shape) < len(source):
        return None
    aligned = list(zip(source, shape[len(shape) - len(source) :], indices[len(shape) - len(source) :]))
    if not all(same(size, 1) or same(size, wide) for size, wide, _ in aligned):
        return None
    return [Index() if same(size, 1) else index for size, _, index in aligned]


def reshaped(
    indices: Sequence[Index], shape: Sequence[Any], source: Sequence[Any], sizes: Sizes
) -> list[Index] | None:
    """Equal sizes pass; a run of static sizes is flattened and taken apart again."""
    found = [Index()] * len(source)
    ours = [dim for dim, size in enumerate(source) if not same(size, 1)]
    theirs = [dim for dim, size in enumerate(shape) if not same(size, 1)]
    while ours and theirs:
        if same(source[ours[0]], shape[theirs[0]]):
            found[ours.pop(0)] = indices[theirs.pop(0)]
            continue
        mine, other = [ours.pop(0)], [theirs.pop(0)]
        while (have := _static_product(source, mine)) != (want := _static_product(shape, other)):
            if have is None or want is None or not (ours if have < want else theirs):
                return None
            mine, other = ([*mine, ours.pop(0)], other) if have < want else (mine, [*other, theirs.pop(0)])
        if have is None:
            return None
        split = _unflatten(_flatten([(indices[dim], shape[dim]) for dim in other]), source, mine, sizes)
        if split is None:
            return None
        for dim, index in zip(mine, split):
            found[dim] = index
    return None if ours or theirs else found


def _static_product(shape: Sequence[Any], dims: Sequence[int]) -> int | None:
    picked = [shape[dim] for dim in dims]
    return math.prod(picked) if all(isinstance(size, int) for size in picked) else None


def _flatten(dims: Sequence[tuple[Index, int]]) -> Index:
    """Row-major index over dimensions of the given sizes."""
    flat, stride = Index(), 1
    for index, size in reversed(dims):
        moved = index.shifted(flat.offset, stride)
        flat, stride = Index(moved.offset, flat.terms + moved.terms), stride * size
    return flat


def _unflatten(index: Index, shape: Sequence[Any], dims: Sequence[int], sizes: Sizes) -> list[Index] | None:
    """The indices along `dims` that make up a row-major one; None where a label runs across dimensions."""
    found = []
    strides = list(accumulate([1, *(shape[dim] for dim in reversed(dims[1:]))], operator.mul))[::-1]
    for stride in strides:
        own = tuple((label, step // stride) for label, step in index.terms if step >= stride)
        rest = tuple((label, step) for label, step in index.terms if step < stride)
        divisible = all(step % stride == 0 for _, step in index.terms if step >= stride)
        start, offset = divmod(index.offset, stride)
        found.append(Index(start, own))
        index = Index(offset, rest)
        highest = furthest(index, sizes)
        if not divisible or highest is None or highest >= stride:
            return None  # it carries into this dimension
    return found


def furthest(index: Index, sizes: Sizes) -> int | None:
    """The highest value that an index takes; None where it depends on a symbolic size."""
    spans = [(step, sizes[label]) for label, step in index.terms]
    if not all(isinstance(size, int) and step >= 0 for step, size in spans):
        return None
    return int(index.offset + sum(step * (size - 1) for step, size in spans))


def cut_at(indices: Sequence[Index], key: Any, shape: Sequence[Any]) -> list[Index] | None:
    """Where `x[key]` read at `indices` reads an `x` of this shape; None where the key is a tensor, say."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        missing = len(shape) - sum(k is not None and k is not Ellipsis for k in keys)
        keys[at : at + 1] = [slice(None)] * missing
    keys += [slice(None)] * (len(shape) - sum(k is not None for k in keys))
    if len(indices) != sum(k is None or isinstance(k, slice) for k in keys):
        return None
    found: list[Index] = []
    left, sizes = list(indices), list(shape)
    for k in keys:
        if k is None:
            left.pop(0)
            continue
        size = sizes.pop(0)
        if k == slice(None):
            found.append(left.pop(0))
        elif isinstance(k, int) and not isinstance(k, bool) and isinstance(size, int):
            found.append(Index(k % size))
        elif isinstance(k, slice) and _static_slice(k) and isinstance(size, int):
            start, _, step = k.indices(size)
            found.append(left.pop(0).shifted(start, step))
        else:
            return None
    return found


def _static_slice(key: slice) -> bool:
    return all(part is None or isinstance(part, int) for part in (key.start, key.stop, key.step))
