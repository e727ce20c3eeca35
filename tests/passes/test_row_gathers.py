"""`hoist_row_gather` on random graphs (`row_gathers.py`): what it rewrites is right, what it refuses stays as it was.

A failure names its seed: `check(seed)` draws it again. `MLA_ROW_GATHERS=20000` sets how many there are.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from mla_compile.passes import rowwise
from mla_compile.passes.nodes import tensor_of
from tests.passes import row_gathers
from tests.passes.row_gathers import Op, check

CALLED = {name if isinstance(name, str) else name.__name__ for name in rowwise._RULES}


@pytest.mark.long
def test_a_gather_climbs_over_random_graphs_only_where_they_are_row_wise() -> None:
    number = int(os.environ.get("MLA_ROW_GATHERS", "200"))
    results = [check(seed) for seed in range(number)]
    hoisted = sum(bool(result.climbed) for result in results)
    climbed = Counter(name for result in results for name in set(result.climbed))
    runs = sum(result.runs for result in results)
    print(f"{number} graphs, seeds from 0: {hoisted} rewritten, {runs} runs compared; over {climbed}")
    assert hoisted > number / 3 and runs > number, f"only {hoisted} of {number} rewritten"
    if number >= 20_000:
        never = {name for name in CALLED - set(climbed) if not name.startswith(("mla_decode", "moe_experts"))}
        assert not never, f"no gather has climbed over {never}"


def lists_are_indices_like_any_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rowwise, "_takes_one_or_a_range", lambda index: not isinstance(index, fx.Node))


def names_of_numpys_are_not_known(patch: pytest.MonkeyPatch) -> None:
    def by_position(node: fx.Node, rows: Any) -> list[fx.Node] | None:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
        return None if dim in (0, -tensor_of(node).dim()) else [node.args[0]]

    for name in ("softmax", torch.softmax, F.softmax):
        patch.setitem(rowwise._RULES, name, by_position)


def a_bias_is_never_of_each_row(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(rowwise._RULES, F.linear, rowwise._only_first)


def a_norm_never_covers_the_rows(patch: pytest.MonkeyPatch) -> None:
    for norm in (F.layer_norm, F.rms_norm, torch.rms_norm):
        patch.setitem(rowwise._RULES, norm, rowwise._only_first)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mistake", "ops"),
    [
        (lists_are_indices_like_any_other, ["index"]),
        (names_of_numpys_are_not_known, ["along"]),
        (a_bias_is_never_of_each_row, ["linear"]),
        (a_norm_never_covers_the_rows, ["norm"]),
    ],
)
def test_the_graphs_notice(
    mistake: Callable[[pytest.MonkeyPatch], None], ops: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    drawn: list[Op] = [getattr(row_gathers, name) for name in ops]
    with pytest.raises(AssertionError, match="seed"):
        list(map(functools.partial(check, ops=drawn), range(300)))
