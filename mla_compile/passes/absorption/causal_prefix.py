"""Recognise a mask that lets each query token see a prefix of the keys, and compute its length.

    keys_at <= positions       arange(keys) < seq_lens[:, None]       ~(arange(keys) > positions)

A comparison of whole numbers, one side of which counts the keys from 0 by `arange` and the other does not depend on
the key. Both may have constants and further `arange`s added; masks of 0 and -inf made by `where` or `masked_fill` from
such a comparison count too. With several query tokens, the bound must grow by one from token to token, which shows
where it is `start + arange(q_len)`; positions that a caller hands in are anybody's numbers, and are accepted for a
single token only.

A bound may be any number of its dtype: the highest is a usual way to say that there is none. So what the graph adds to
it is added in the graph's dtype, in which it may wrap, and what follows from the comparison only after a clamp. The
side that counts keys is known when compiling, and must not wrap.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mla_compile.passes.absorption.index_map import Sizes, expanded, index_of
from mla_compile.passes.absorption.trace import View, trace
from mla_compile.passes.nodes import argument, is_tensor, tensor_of, torch_name

LABELS = "abcd"
"""Rows, heads, query tokens, keys."""

FURTHEST = 1 << 40
"""Further than any key, and far from the ends of int64."""

_WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Sum:
    """`constant + sum(step * position[label]) + sum(sign * view)`, added in `dtype`.

    counted: the `arange`s that the steps come from, which hold only as long as nobody writes to them.
    """

    dtype: torch.dtype
    constant: int = 0
    steps: tuple[tuple[str, int], ...] = ()
    views: tuple[tuple[int, View], ...] = ()
    counted: tuple[View, ...] = ()

    def plus(self, other: "Sum", sign: int) -> "Sum":
        steps = self.steps + tuple((label, sign * step) for label, step in other.steps)
        views = self.views + tuple((sign * own, view) for own, view in other.views)
        constant = self.constant + sign * other.constant
        return Sum(self.dtype, constant, steps, views, self.counted + other.counted)

    def step(self, label: str) -> int:
        return sum(step for own, step in self.steps if own == label)

    @property
    def is_view(self) -> bool:
        return (self.constant, self.steps) == (0, ()) and [sign for sign, _ in self.views] == [1]

    def fits(self, sizes: Sizes) -> bool:
        """Whether no value that it takes is beyond its dtype; only of a sum without views."""
        spans = [(self.step(label), sizes[label]) for label in {label for label, _ in self.steps}]
        if self.views or not all(isinstance(size, int) for _, size in spans):
            return False
        ends = [step * (size - 1) for step, size in spans]
        low, high = (self.constant + sum(pick(end, 0) for end in ends) for pick in (min, max))
        limits = torch.iinfo(self.dtype)
        return bool(limits.min <= low and high <= limits.max)


@dataclass(frozen=True)
class Prefix:
    """How many keys a query token of a row sees: `bound + token + more`, cut off at 0 and at the number of keys.

    bound: of whole rows. With what the graph adds to it, it may be any number of its dtype.
    token_in_bound: whether the graph adds the token's number to the bound, in the bound's dtype.
    counted: as in `Sum`, of the whole comparison.
    """

    bound: Sum
    token_in_bound: bool
    more: int
    counted: tuple[View, ...]


def causal_prefix(mask: fx.Node, sizes: Sizes) -> Prefix | None:
    """The prefix that a mask lets every query token see; None where it is not known to.

    sizes: of `LABELS`; query tokens and keys must be static.
    """
    labels = LABELS[-tensor_of(mask).dim() :] if tensor_of(mask).dim() else ""
    indices = [index_of(label, size) for label, size in zip(labels, tensor_of(mask).shape)]
    found = _compared(View(mask, tuple(indices)), sizes)
    if found is None or not isinstance(sizes["c"], int):
        return None
    counting, bound, or_equal = found
    # A key is seen where `key + rest < bound`.
    if not counting.fits(sizes) or counting.step("d") != 1 or any(counting.step(label) for label in "ab"):
        return None
    of_views = set[str]().union(*(view.labels for _, view in bound.views))
    if not bound.views or of_views & {"b", "d"} or any(bound.step(label) for label in "abd"):
        return None
    steps = bound.step("c"), -counting.step("c")
    if sizes["c"] > 1 and (steps not in ((1, 0), (0, 1)) or "c" in of_views):
        return None
    more = int(or_equal) - counting.constant
    counted = counting.counted + bound.counted
    return Prefix(bound, steps[0] == 1, more, counted) if abs(more) <= FURTHEST else None


def _compared(view: View, sizes: Sizes, visible: bool = True) -> tuple[Sum, Sum, bool] | None:
    """The `x`, `y` and `or_equal` for which the mask lets a query see a key just where `x < y`, or `x <= y`."""
    view = trace(view, sizes)
    node, name = view.node, torch_name(view.node)
    if name in ("invert", "logical_not", "bitwise_not"):
        return _under(view, node.args[0], sizes, not visible)
    if name == "where":
        seen, unseen = (_number(argument(node, i, side)) for i, side in ((1, "input"), (2, "other")))
        return _under(view, node.args[0], sizes, visible) if (seen, unseen) == (0.0, -math.inf) else None
    if name == "masked_fill":
        filled, value = _number(node.args[0]), _number(argument(node, 2, "value"))
        mask = argument(node, 1, "mask")
        return _under(view, mask, sizes, not visible) if (filled, value) == (0.0, -math.inf) else None
    if name not in ("le", "lt", "ge", "gt") or len(node.args) != 2 or node.kwargs:
        return None
    left, right = (_whole_number(side, view, sizes) for side in node.args)
    if left is None or right is None or _common_dtype(node) != max(left.dtype, right.dtype, key=_bits):
        return None
    less, more = (left, right) if name in ("le", "lt") else (right, left)
    or_equal = name in ("le", "ge")
    # not (l < m) is m <= l
    return (less, more, or_equal) if visible else (more, less, not or_equal)


def _common_dtype(comparison: fx.Node) -> torch.dtype:
    """In which two tensors are compared. A tensor without dimensions is cast to it, and may wrap."""
    left, right = (tensor_of(side) for side in comparison.args if isinstance(side, fx.Node))
    return torch.result_type(left, right)


def _under(view: View, operand: Any, sizes: Sizes, visible: bool) -> tuple[Sum, Sum, bool] | None:
    """The condition that a mask is made of."""
    inner = _operand(view, operand)
    return None if inner is None else _compared(inner, sizes, visible)


def _operand(view: View, operand: Any) -> View | None:
    """What an elementwise op reads of an operand."""
    if not is_tensor(operand):
        return None
    indices = expanded(view.indices, tensor_of(view.node).shape, tensor_of(operand).shape)
    return None if indices is None else view.onto(operand, indices)


def _number(value: Any) -> float | None:
    """A number, or the one that a tensor was just filled with."""
    if isinstance(value, (int, float)):
        return float(value)
    if not is_tensor(value) or len(value.users) != 1:
        return None
    name = torch_name(value)
    if name in ("full", "full_like", "new_full"):
        return _number(argument(value, 1 if name != "new_full" else 2, "fill_value"))
    if name in ("tensor", "scalar_tensor", "as_tensor"):
        return _number(value.args[0])
    return 0.0 if name in ("zeros", "zeros_like", "new_zeros") else None


def _whole_number(value: Any, reader: View, sizes: Sizes) -> Sum | None:
    """`value` as a sum of constants, `arange`s and views, where `reader` broadcasts it; None of other dtypes."""
    view = _operand(reader, value)
    if view is None or tensor_of(view.node).dtype not in _WHOLE:
        return None
    view = trace(view, sizes)
    node, name = view.node, torch_name(view.node)
    found: Sum | None = None
    if name == "arange":
        found = _counting(view, sizes)
    elif name in ("to", "long", "int", "type", "type_as"):
        found = _addend(node.args[0], view, sizes)
    elif name in ("add", "sub") and len(node.args) == 2 and not node.kwargs:
        left, right = (_addend(side, view, sizes) for side in node.args)
        if left is not None and right is not None:
            found = left.plus(right, 1 if name == "add" else -1)
    return Sum(tensor_of(node).dtype, views=((1, view),)) if found is None else found


def _addend(value: Any, reader: View, sizes: Sizes) -> Sum | None:
    """An operand in the dtype of `reader`; None where the cast to it could change it, or moves it elsewhere."""
    dtype = tensor_of(reader.node).dtype
    if isinstance(value, int) and not isinstance(value, bool):
        return Sum(dtype, value)
    found = _whole_number(value, reader, sizes)
    if found is None or tensor_of(value).device != tensor_of(reader.node).device:
        return None
    if found.dtype == dtype:
        return found
    cast = replace(found, dtype=dtype)
    if found.fits(sizes):
        return cast if cast.fits(sizes) else None
    if _bits(found.dtype) > _bits(dtype):
        return None
    # What was added before the cast may have wrapped, so that only its result counts.
    whole = _operand(reader, value)
    assert whole is not None
    return cast if found.is_view else Sum(dtype, views=((1, trace(whole, sizes)),))


def _bits(dtype: torch.dtype) -> int:
    return torch.iinfo(dtype).bits


def _counting(view: View, sizes: Sizes) -> Sum | None:
    """`arange` as read by a view."""
    node, (index,) = view.node, view.indices
    start, step = (node.args[0], argument(node, 2, "step", 1)) if len(node.args) > 1 else (0, 1)
    start, step = node.kwargs.get("start", start), node.kwargs.get("step", step)
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    moved = index.shifted(start, step)
    found = Sum(tensor_of(node).dtype, moved.offset, moved.terms, counted=(view,))
    return found if found.fits(sizes) else None
