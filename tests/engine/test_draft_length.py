"""The choice of a draft length by itself: on simulated texts and devices, whose times and acceptance are known."""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_compile.engine.draft_length import (
    Acceptance,
    AdaptiveLength,
    Drafting,
    DraftLength,
    FixedLength,
    StepTimes,
    draft_lengths,
)

LONGEST = 4


@dataclass
class Device:
    """Steps of a batch, and how long they take.

    rates: how likely the first, the second, ... draft is accepted once those before it are.
    seconds: of a step. per_draft: by how much a draft makes it longer, as a share. noise: by which times vary.
    lag: launches whose reports come late.
    """

    rates: list[float]
    rows: int = 1
    seconds: float = 1.0
    per_draft: float = 0.12
    noise: float = 0.0
    lag: int = 1
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    made: int = 0
    lengths: list[int] = field(default_factory=list)
    late: deque[tuple[Drafting, list[int], float]] = field(default_factory=deque)

    def run(self, policy: DraftLength, steps: int) -> float:
        """So many launches; tokens a second and row."""
        tokens = seconds = 0.0
        for _ in range(steps):
            length = policy.choose("bucket")
            self.lengths.append(length)
            verified, self.made = min(length, self.made), length
            accepted = [self._accepted(verified) for _ in range(self.rows)]
            took = self.seconds * (1 + self.per_draft * length) * self.dice.lognormvariate(0, self.noise)
            tokens += self.rows + sum(accepted)
            seconds += took
            self.late.append((Drafting(length, verified, "bucket"), accepted, took))
            while len(self.late) > self.lag:
                policy.learn(*self.late.popleft())
        return tokens / seconds / self.rows

    def _accepted(self, verified: int) -> int:
        return next((p for p in range(verified) if self.dice.random() >= self.rates[p]), verified)


def best_fixed(rates: list[float], **settings: object) -> float:
    return max(Device(rates, **settings).run(FixedLength(n), 4000) for n in range(LONGEST + 1))


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "rate", [0.0, 0.3, 0.9, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (0.05, 0.6, 1.0))]
)
def test_it_gives_95_percent_of_the_best_fixed_lengths_tokens(rate: float, rows: int, noise: float) -> None:
    settings = {"rows": rows, "noise": noise}
    got = Device([rate] * LONGEST, **settings).run(AdaptiveLength(LONGEST), 4000)
    assert got > 0.95 * best_fixed([rate] * LONGEST, **settings)


def test_drafts_that_are_only_good_at_first_are_kept_short() -> None:
    rates = [0.9, 0.1, 0.9, 0.9]
    got = Device(rates, rows=8).run(AdaptiveLength(LONGEST), 4000)
    assert got > 0.95 * best_fixed(rates, rows=8)


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 8])
def test_it_follows_a_text_that_changes(rows: int) -> None:
    device, policy = Device([0.9] * LONGEST, rows=rows), AdaptiveLength(LONGEST)
    for rate in (0.9, 0.0, 0.9):
        device.rates = [rate] * LONGEST
        device.run(policy, 300)
        settled = device.run(policy, 700)
        assert settled > 0.95 * best_fixed(device.rates, rows=rows), f"acceptance {rate}"


@pytest.mark.long
def test_it_follows_steps_whose_times_change() -> None:
    device, policy = Device([0.5] * LONGEST, rows=8, per_draft=0.5), AdaptiveLength(LONGEST)
    for per_draft in (0.5, 0.02, 0.5):
        device.per_draft = per_draft
        device.run(policy, 2000)
        expected = best_fixed(device.rates, rows=8, per_draft=per_draft)
        assert device.run(policy, 1000) > 0.95 * expected, f"{per_draft} a draft"


def test_it_keeps_its_length_on_a_machine_that_slows_down() -> None:
    """Though only the current length is seen to be slower."""
    device, policy = Device([0.9] * LONGEST, rows=8), AdaptiveLength(LONGEST)
    device.run(policy, 500)
    device.seconds = 3.0
    expected = best_fixed(device.rates, rows=8, seconds=3.0)
    assert device.run(policy, 300) > 0.95 * expected


def test_the_first_launches_measure_every_length_beginning_with_the_longest() -> None:
    device = Device([0.5] * LONGEST, lag=0)
    device.run(AdaptiveLength(LONGEST), 25)
    assert device.lengths[:15] == [length for length in (4, 3, 2, 1, 0) for _ in range(3)]


def test_launches_without_a_time_do_not_count() -> None:
    policy = AdaptiveLength(1)
    lengths = []
    for seconds in (None, None, 1.0, None, 1.0, 1.0):
        lengths.append(policy.choose("bucket"))
        policy.learn(Drafting(lengths[-1], lengths[-1], "bucket"), [0], seconds)
    assert lengths == [1] * 6 and policy.choose("bucket") == 0, "the longest is measured first, then the next"


def test_a_single_slow_step_is_not_taken_for_a_lengths_time() -> None:
    times = StepTimes()
    for seconds in (1.0, 9.0, 1.0):
        assert 3 not in times
        times.learn(3, seconds)
    assert times[3] == 1.0
    times.learn(3, 60.0)
    assert times[3] < 1.05


def test_one_length_serves_buckets_that_take_turns() -> None:
    """A draft, accepted three times in ten, pays beside prompts only; launches with prompts are many, then few."""
    policy = AdaptiveLength(3)
    for share in (0.9, 0.1):
        dice = random.Random(0)
        chosen = []
        for _ in range(600):
            bucket = "prompts" if dice.random() < share else "decode"
            chosen.append(policy.choose(bucket))
            seconds = 3.0 if bucket == "prompts" else 1.0 + 0.5 * chosen[-1]
            accepted = min(int(dice.random() < 0.3), chosen[-1])
            policy.learn(Drafting(chosen[-1], chosen[-1], bucket), [accepted], seconds)
        drafting = sum(length > 0 for length in chosen[300:])
        assert drafting > 250 if share == 0.9 else drafting < 100


def test_time_that_a_caller_took_is_not_spent_on_probes() -> None:
    policy = AdaptiveLength(1)
    for _ in range(10):
        length = policy.choose("bucket")
        policy.learn(Drafting(length, length, "bucket"), [0], 1.0 + length)
    policy.learn(Drafting(0, 0, "bucket"), [0], 3600.0)
    assert [policy.choose("bucket") for _ in range(20)] == [0] * 20


def test_a_new_bucket_is_measured_when_it_is_first_met() -> None:
    policy = AdaptiveLength(1)
    for bucket in ("1 row", "2 rows"):
        chosen = []
        for _ in range(6):
            chosen.append(policy.choose(bucket))
            policy.learn(Drafting(chosen[-1], chosen[-1], bucket), [0], 1.0 + chosen[-1])
        assert chosen == [1] * 3 + [0] * 3
    assert policy.choose("1 row") == 0, "nothing is accepted and both were measured"


def test_an_unknown_draft_is_as_good_as_the_one_before_it() -> None:
    acceptance = Acceptance(3)
    for _ in range(300):
        acceptance.learn(1, [1, 1, 1, 0])
    assert acceptance.tokens(0) == 1
    assert acceptance.tokens(1) == pytest.approx(1.75, abs=0.01)
    assert acceptance.tokens(3) == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3, abs=0.03)
    acceptance.learn(3, [])
    acceptance.forget_from(0)
    assert acceptance.tokens(1) == 1.5, "nothing is known"


@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 4), max_size=5)), max_size=30))
def test_expected_tokens_grow_with_the_length_by_less_than_one_a_draft(
    steps: list[tuple[int, list[int]]],
) -> None:
    acceptance = Acceptance(4)
    for verified, accepted in steps:
        acceptance.learn(verified, [min(count, verified) for count in accepted])
    tokens = [acceptance.tokens(n) for n in range(5)]
    assert all(0 <= longer - shorter <= 1 + 1e-9 for shorter, longer in pairwise(tokens))


def test_few_of_many_lengths_are_compiled() -> None:
    assert draft_lengths(0) == [0]
    assert draft_lengths(3) == [0, 1, 2, 3]
    assert draft_lengths(5) == [0, 1, 2, 3, 4, 5]
    assert draft_lengths(32) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
