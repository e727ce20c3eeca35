"""How many drafts a row makes, from its own acceptance."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_compile.speculate.row_drafts import MEMORY, START, WORTH, learn, worthwhile


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_a_share_of_drafts_fades_draft_by_draft(steps: list[tuple[int, int]]) -> None:
    """Each accepted one and the first wrong one count; those behind it tell nothing."""
    share, acceptance = START, torch.tensor([START])
    for verified, accepted in ((max(pair), min(pair)) for pair in steps):
        for right in [True] * accepted + [False] * (accepted < verified):
            share += MEMORY * (right - share)
        acceptance = learn(acceptance, torch.tensor([verified]), torch.tensor([accepted]))
    assert acceptance.item() == pytest.approx(share, abs=1e-5)


@given(st.floats(0, 1), st.integers(0, 32))
def test_the_last_draft_that_is_made_is_likely_enough(share: float, k: int) -> None:
    (n,) = worthwhile(torch.tensor([share]), k).tolist()
    wanted = sum(share**place >= WORTH for place in range(1, k + 1))
    if all(not math.isclose(share**place, WORTH, rel_tol=1e-3) for place in range(1, k + 1)):
        assert n == max(wanted, min(1, k))


def test_rows_are_told_apart() -> None:
    acceptance = torch.tensor([1.0, 0.5, 0.3, 0.0])
    assert worthwhile(acceptance, 8).tolist() == [8, 4, 2, 1]
    assert worthwhile(acceptance, 0).tolist() == [0] * 4
    after = learn(acceptance, torch.tensor([3, 3, 0, 1]), torch.tensor([3, 0, 0, 1]))
    assert after[0] == 1 and after[1] < 0.5 and after[2] == acceptance[2] and after[3] > 0
