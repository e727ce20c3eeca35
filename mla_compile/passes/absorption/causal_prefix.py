"""Recognise a mask that lets each query token see a prefix of the keys, and compute its length.

    keys_at <= positions       arange(keys) < seq_lens[:, None]       ~(arange(keys) > positions)

A comparison of whole numbers, one side of which counts the keys from 0 by `arange` and the other does not depend on
the key. Both may have constants and further `arange`s added; masks of 0 and -inf made by `where` or `masked_fill` from
such a comparison count too. With several query tokens, the bound must grow by one from token to token, which shows
where it is `start + arange(q_len)`; positions that a caller hands in are anybody's numbers, and are accepted for a
single token only.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_compile.passes.absorption.index_map import Sizes, expanded, index_of
from mla_compile.passes.absorption.trace import View, argument, is_tensor, tensor, torch_name, trace

LABELS = "abcd"
"""Rows, heads, query tokens, keys."""


@dataclass(frozen=True)
class Sum:
    """`constant + sum(step * position[label]) + sum(sign * view)`, of whole numbers.

    counted: the `arange`s that the steps come from, which hold only as long as nobody writes to them.
    """

    constant: int
    steps: dict[str, int]
    views: tuple[tuple[int, View], ...] = ()
    counted: tuple[View, ...] = ()

    def plus(self, other: "Sum", sign: int = 1) -> "Sum":
        steps = dict(self.steps)
        for label, step in other.steps.items():
            steps[label] = steps.get(label, 0) + sign * step
        views = tuple((sign * own, view) for own, view in other.views)
        constant = self.constant + sign * other.constant
        return Sum(constant, steps, self.views + views, self.counted + other.counted)

    @property
    def labels(self) -> set[str]:
        """What the views depend on."""
        return set().union(*(view.labels for _, view in self.views)) if self.views else set()


def prefix_length(mask: fx.Node, sizes: Sizes) -> Sum | None:
    """How many keys the *last* query token of a row sees, not yet clamped to those that there are; else None.

    The earlier tokens see one fewer each. sizes: of `LABELS`; query tokens and keys must be static.
    """
    labels = LABELS[-tensor(mask).dim() :] if tensor(mask).dim() else ""
    indices = [index_of(label, size) for label, size in zip(labels, tensor(mask).shape)]
    difference = _visible_if_negative(View(mask, tuple(indices)), sizes)
    if difference is None or not isinstance(sizes["c"], int) or difference.steps.pop("d", 0) != 1:
        return None
    growth = -difference.steps.pop("c", 0)
    if any(difference.steps.values()) or difference.labels & {"b", "d"}:
        return None
    if sizes["c"] > 1 and (growth != 1 or "c" in difference.labels):
        return None
    # key + rest < 0 holds for -rest keys; what grows with the token is taken at the last one.
    bound = Sum(0, {}).plus(Sum(difference.constant, {}, difference.views, difference.counted), -1)
    return bound.plus(Sum((sizes["c"] - 1) * growth, {}))


def _visible_if_negative(view: View, sizes: Sizes, visible: bool = True) -> Sum | None:
    """The `x` for which the mask lets a query see a key just where `x < 0`."""
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
    if name not in ("le", "lt", "ge", "gt") or len(node.args) != 2:
        return None
    left, right = (_whole_number(side, view, sizes) for side in node.args)
    if left is None or right is None:
        return None
    less, more = (left, right) if name in ("le", "lt") else (right, left)
    or_equal = name in ("le", "ge")
    if not visible:  # not (l < m) is m <= l
        less, more, or_equal = more, less, not or_equal
    return less.plus(more, -1).plus(Sum(-1 if or_equal else 0, {}))


def _under(view: View, operand: Any, sizes: Sizes, visible: bool) -> Sum | None:
    """The condition that a mask is made of."""
    inner = _operand(view, operand)
    return None if inner is None else _visible_if_negative(inner, sizes, visible)


def _operand(view: View, operand: Any) -> View | None:
    """What an elementwise op reads of an operand."""
    if not is_tensor(operand):
        return None
    indices = expanded(view.indices, tensor(view.node).shape, tensor(operand).shape)
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
    """`value` as a sum of constants, `arange`s and views, where `reader` broadcasts it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Sum(value, {})
    view = _operand(reader, value)
    if view is None or tensor(view.node).dtype not in (torch.int32, torch.int64):
        return None
    view = _through_casts(view, sizes)
    node, name = view.node, torch_name(view.node)
    if name == "arange":
        return _counting(view)
    if name in ("add", "sub") and "alpha" not in node.kwargs and len(node.args) == 2:
        sides = [_whole_number(side, view, sizes) for side in node.args]
        if None not in sides:
            left, right = sides
            assert left is not None and right is not None
            return left.plus(right, 1 if name == "add" else -1)
    return Sum(0, {}, ((1, view),))


def _through_casts(view: View, sizes: Sizes) -> View:
    """Follow layout ops and casts between whole numbers: int32 holds any position."""
    view = trace(view, sizes)
    while torch_name(view.node) in ("to", "long", "int", "type", "type_as"):
        inner = _operand(view, view.node.args[0])
        if inner is None or tensor(inner.node).dtype not in (torch.int32, torch.int64):
            break
        view = trace(inner, sizes)
    return view


def _counting(view: View) -> Sum | None:
    """`arange` as read by a view."""
    node, (index,) = view.node, view.indices
    start, step = (node.args[0], argument(node, 2, "step", 1)) if len(node.args) > 1 else (0, 1)
    start, step = node.kwargs.get("start", start), node.kwargs.get("step", step)
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    moved = index.shifted(start, step)
    total = Sum(moved.offset, {}, counted=(view,))
    for label, by in moved.terms:
        total = total.plus(Sum(0, {label: by}))
    return total
