"""`causal_prefix` says of a mask how many keys each query sees: of random masks, at the borders of integer types.

`MLA_MASKS=20000` sets how many masks are drawn.
"""

import operator
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.absorption import causal_prefix as rules
from mla_compile.passes.absorption import form
from mla_compile.passes.absorption.causal_prefix import Prefix, Sum, View, causal_prefix
from mla_compile.passes.absorption.form import reader
from mla_compile.passes.emit import inline, set_example_value

ROWS, NUM_KEYS = 2, 6
COMPARISONS = (
    *(operator.le, operator.lt, operator.ge, operator.gt),
    *("le", "lt", "ge", "gt"),
    torch.le,
    torch.gt,
)
DTYPES = (*[torch.int64] * 6, *[torch.int32] * 6, torch.int16, torch.uint8, torch.float64)


def borders(dtype: torch.dtype) -> list[float]:
    """Numbers around 0, around the number of keys, and at the ends of every integer type that `dtype` can hold."""
    near = [-1, 0, 1, 2, NUM_KEYS - 1, NUM_KEYS, NUM_KEYS + 1]
    ends = [end for bits in (8, 16, 32, 64) for end in (-(1 << bits - 1), 1 << bits - 1, 1 << bits)]
    found = near + [end + more for end in ends for more in (-2, -1, 0, 1, 2)]
    if dtype.is_floating_point:
        return [*map(float, found), torch.inf, -torch.inf, 2.5]
    limits = torch.iinfo(dtype)
    return [number for number in found if limits.min <= number <= limits.max]


class Mask:
    """A comparison of a sum that counts keys with a sum of inputs, as a graph; each sum in any dtypes and order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.graph, self.mode = rng, fx.Graph(), FakeTensorMode()
        self.q_len = rng.choice((1, 1, 2, 3))
        with self.mode:
            self.like = self.placeholder(torch.empty(ROWS, NUM_KEYS, 4))
            self.inputs = [
                self.placeholder(torch.empty(self.shape(), dtype=rng.choice(DTYPES))) for _ in range(2)
            ]
        self.mask = self.compared(self.keys(), self.bound())
        self.reference = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self.reference.graph_copy(self.graph, copies)
        self.reference.output(copies[self.mask])

    def shape(self) -> tuple[int, ...]:
        by_row = self.rng.choice((ROWS, ROWS, ROWS, 1))
        return self.rng.choice(((by_row, 1, 1, 1), (by_row, 1, 1, 1), (by_row, 1, self.q_len, 1), ()))

    def placeholder(self, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        node.meta["example_value"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        set_example_value(node, self.mode)
        return node

    def keys(self) -> fx.Node:
        counted = self.counting(NUM_KEYS, self.rng.choice((0, 0, 0, 0, 1, -3)))
        return self.changed(
            counted, self.rng.choice((0, 0, 0, 0, 1, 2)), [self.tokens] if self.q_len > 1 else []
        )

    def bound(self) -> fx.Node:
        others = [lambda: self.inputs[1], *[self.tokens] * (2 if self.q_len > 1 else 0)]
        x = self.inputs[0]
        if self.q_len > 1 and self.rng.random() < 0.7:
            x = self.call(operator.add, x, self.tokens())
        return self.changed(x, self.rng.choice((0, 0, 1, 2)), others)

    def counting(self, stop: int, start: int = 0) -> fx.Node:
        dtype = self.rng.choice((*[torch.int64] * 4, *[torch.int32] * 3, torch.int16))
        return self.call(torch.arange, start, start + stop, dtype=dtype)

    def tokens(self) -> fx.Node:
        return self.call(operator.getitem, self.counting(self.q_len), (slice(None), None))

    def changed(self, x: fx.Node, times: int, others: list[Callable[[], fx.Node]]) -> fx.Node:
        """`x` with constants and tensors added or subtracted, and cast."""
        numbers = (1, 1, -1, 2, *(int(n) for n in borders(torch.int64)))
        for _ in range(times):
            other = self.rng.choice((lambda: self.rng.choice(numbers), *others, *others))()
            dtype = self.rng.choice((torch.int64, torch.int32))
            x = self.rng.choice(
                (
                    lambda x=x, other=other: self.call(operator.add, x, other),
                    lambda x=x, other=other: self.call(operator.sub, x, other),
                    lambda x=x, other=other: self.call(operator.add, other, x),
                    lambda x=x, other=other: self.call("sub", x, other),
                    lambda x=x, dtype=dtype: self.call("to", x, dtype),
                    lambda x=x: self.call(self.rng.choice(("int", "long")), x),
                )
            )()
        return x

    def compared(self, keys: fx.Node, bound: fx.Node) -> fx.Node:
        sides = (keys, bound) if self.rng.random() < 0.6 else (bound, keys)
        mask = self.call(self.rng.choice(COMPARISONS), *sides)
        if self.rng.random() < 0.4:
            mask = self.call(self.rng.choice((operator.invert, "logical_not")), mask)
        if self.rng.random() < 0.2:
            mask = self.call(torch.where, mask, 0.0, -torch.inf)
        return mask

    def visible(self, values: list[Tensor]) -> Tensor:
        """Which keys the graph lets each query see, `[rows, 1, q_len, keys]`."""
        mask = fx.Interpreter(nn.Module(), graph=self.reference).run(torch.empty(0), *values)
        mask = mask if mask.dtype == torch.bool else mask == 0
        return mask.expand(ROWS, 1, self.q_len, NUM_KEYS)

    def lengths(self) -> fx.Interpreter | None:
        """The graph with what the pass makes of the mask, or None where it is not taken for a prefix."""
        sizes = {"a": ROWS, "b": 1, "c": self.q_len, "d": NUM_KEYS}
        prefix = causal_prefix(self.mask, sizes)
        if prefix is None:
            return None
        readers = [(sign, reader(view, sizes, "a")) for sign, view in prefix.bound.views]

        def emit(like: Any, values: Any) -> Any:
            terms = [(sign, read(value)) for (sign, read), value in zip(readers, values)]
            return form.token_lengths(like, prefix, terms, ROWS, self.q_len, NUM_KEYS)

        after = self.call("logical_not", self.mask)
        self.graph.output(inline(after, emit, (self.like, [read.node for _, read in readers])))
        return fx.Interpreter(nn.Module(), graph=self.graph)


def check(seed: int, runs: int = 6) -> bool:
    """Whether the mask was taken for a prefix; if so, it is one, for any values.

    Raises:
        AssertionError: it is none, or of another length.
    """
    rng = random.Random(seed)
    mask = Mask(rng)
    before = str(mask.graph)
    lengths = mask.lengths()
    if lengths is None:
        assert str(mask.graph) == before
        return False
    for _ in range(runs):
        values = []
        for node in mask.inputs:
            example = node.meta["example_value"]
            drawn = [rng.choice(borders(example.dtype)) for _ in range(example.numel())]
            values.append(torch.tensor(drawn, dtype=example.dtype).view(example.shape))
        visible = mask.visible(values)
        got = lengths.run(torch.empty(0), *values)
        expected = torch.arange(NUM_KEYS) < got.view(ROWS, 1, mask.q_len, 1)
        assert got.dtype == torch.int32 and torch.equal(visible, expected), (
            f"seed {seed}: of {values} the mask is\n{visible.int()}\nand lengths {got.tolist()}\n{before}"
        )
    return True


def test_a_mask_that_is_taken_for_a_prefix_is_one_at_the_borders_of_integer_types() -> None:
    number = int(os.environ.get("MLA_MASKS", "400"))
    taken = sum(check(seed) for seed in range(number))
    print(f"{number} masks, seeds from 0: {taken} taken for a prefix")
    assert taken > number / 8, f"only {taken} of {number}"


def what_follows_from_the_comparison_is_added_in_the_bounds_dtype(patch: pytest.MonkeyPatch) -> None:
    lengths = form.token_lengths

    def too_early(like: Any, prefix: Prefix, *rest: Any) -> Any:
        bound = replace(prefix.bound, constant=prefix.bound.constant + prefix.more)
        return lengths(like, replace(prefix, bound=bound, more=0), *rest)

    patch.setattr(form, "token_lengths", too_early)


def casts_change_nothing(patch: pytest.MonkeyPatch) -> None:
    def addend(value: Any, view: View, sizes: Any) -> Sum | None:
        return Sum(torch.int64, value) if isinstance(value, int) else rules._whole_number(value, view, sizes)

    patch.setattr(rules, "_addend", addend)


def sums_do_not_wrap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sum, "fits", lambda self, sizes: not self.views)


def comparisons_are_exact(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rules, "_common_dtype", lambda comparison: torch.int64)


@pytest.mark.parametrize(
    "mistake",
    [
        what_follows_from_the_comparison_is_added_in_the_bounds_dtype,
        *(casts_change_nothing, sums_do_not_wrap, comparisons_are_exact),
    ],
)
def test_the_masks_notice(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match="the mask is"):
        list(map(check, range(400)))
