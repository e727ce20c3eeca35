"""How many drafts each step makes and verifies: fixed, or chosen from measured acceptance and measured step times.

Every length is a step of its own, compiled and captured once, over the same states; changing it is calling another
one. Tokens never depend on it, so a choice may depend on a clock. With expected tokens a row E(n) = 1 + sum over
p <= n of the probability that the first p drafts are accepted, and a step of n drafts taking t(n), the choice is the
n with the largest E(n) / t(n).
"""

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

MEMORY = 1 / 16
"""The weight of the newest step in what is known of acceptance, and in how often each bucket's turn comes: both follow
what is served within some 16 steps."""
MEASURED = 3
"""A length's time in a bucket is the median of so many first steps."""
OUTLIER = 1.25
"""A step that takes longer by more than this factor, or shorter, counts as one that takes so much longer."""
RATE = 0.1
"""How far a step's time moves those of all lengths, and once more its own length's."""
MARGIN = 1.02
"""A length must promise so many times the tokens a second of the current one: within that, changing gains nothing."""
PROBE = 6
"""Launches of a length that was changed to, until the next change. The first one has no more drafts to verify than the
step before made; reports are late."""
PROBE_SHARE = 0.01
"""The share of the time that probes of other lengths may cost."""


@dataclass(frozen=True)
class Drafting:
    """What a launch did about drafts.

    length: how many it has made for each row.
    num_verified: how many of each row it has verified at most: no more than the launch before has made.
    bucket: what its time depends on besides.
    """

    length: int
    num_verified: int
    bucket: Hashable


class DraftLength(Protocol):
    """Says how many drafts each launch makes and verifies."""

    lengths: list[int]
    """All that `choose` may say, ascending."""

    def choose(self, bucket: Hashable) -> int:
        """How many drafts the next launch makes."""

    def learn(self, drafting: Drafting, accepted: Sequence[int], seconds: float | None) -> None:
        """Take in a launch's report, in the order of the launches.

        accepted: how many drafts were accepted of each row that verified.
        seconds: from the report before, or from the launch after a pause, to this one. What takes turns takes so long.
            None where something was compiled or recorded meanwhile.
        """


class FixedLength:
    """The same for every launch."""

    def __init__(self, length: int) -> None:
        self.lengths = [length]

    def choose(self, bucket: Hashable) -> int:
        return self.lengths[0]

    def learn(self, drafting: Drafting, accepted: Sequence[int], seconds: float | None) -> None:
        pass


class AdaptiveLength:
    """The length that promises the most tokens a second; up to `longest`, which the first launches have.

    In a new bucket each length runs until it has been measured. From then on the best one runs, and within a share of
    the time the next longer and the next shorter one in turn, which shows whether acceptance or times have changed.
    Where buckets take turns, decode steps and those with prompts, one length is best for all: a launch verifies no
    more drafts than the one before has made. Its time is the mean over the launches of late.
    """

    def __init__(self, longest: int) -> None:
        self.lengths = draft_lengths(longest)
        self._acceptance = Acceptance(longest)
        self._times: dict[Hashable, StepTimes] = {}
        self._shares: dict[Hashable, float] = {}  # of the launches of late
        self._current = longest
        self._num_left = 0  # launches until the length may change
        self._credit = 0.0  # seconds that a probe may cost
        self._probes_longer = True

    def choose(self, bucket: Hashable) -> int:
        """See `DraftLength`."""
        times = self._times.setdefault(bucket, StepTimes())
        self._shares = {known: (1 - MEMORY) * share for known, share in self._shares.items()}
        self._shares[bucket] = self._shares.get(bucket, 0.0) + MEMORY
        unmeasured = [length for length in self.lengths if length not in times]
        if unmeasured:
            # At its end the best one is chosen at once.
            self._current, self._num_left = unmeasured[-1], 0
        elif self._num_left > 0:
            self._num_left -= 1
        else:
            self._decide(self._mean_times())
        return self._current

    def learn(self, drafting: Drafting, accepted: Sequence[int], seconds: float | None) -> None:
        """See `DraftLength`."""
        self._acceptance.learn(drafting.num_verified, accepted)
        if seconds is None:
            return
        times = self._times[drafting.bucket]
        if drafting.length in times:  # what waits for its caller earns nothing
            self._credit += PROBE_SHARE * min(seconds, OUTLIER * times[drafting.length])
        times.learn(drafting.length, seconds)

    def _mean_times(self) -> dict[int, float]:
        """Seconds of a step of each length, over the launches of late in buckets where all have been measured."""
        measured = [
            (share, self._times[bucket])
            for bucket, share in self._shares.items()
            if all(length in self._times[bucket] for length in self.lengths)
        ]
        total = sum(share for share, _ in measured)
        return {n: sum(share * times[n] for share, times in measured) / total for n in self.lengths}

    def _decide(self, times: dict[int, float]) -> None:
        speeds = {n: self._acceptance.tokens(n) / times[n] for n in self.lengths}
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] > MARGIN * speeds[self._current]:
            self._current, self._num_left = best, PROBE - 1
            return
        index = self.lengths.index(self._current)
        around = [*self.lengths[max(0, index - 1) : index], *self.lengths[index + 1 : index + 2]]
        if around:
            self._probe(around[-1 if self._probes_longer else 0], speeds[self._current], times)

    def _probe(self, length: int, speed: float, times: dict[int, float]) -> None:
        """Try another length, if there has been time enough for what that may cost.

        speed: tokens a second and row of the current one.
        """
        # Drafts beyond the current length are taken to be rejected.
        tokens = self._acceptance.tokens(min(length, self._current))
        loss = PROBE * (times[length] - tokens / speed)
        if self._credit < loss:
            return
        if length > self._current:
            self._acceptance.forget_from(self._current)
        self._credit = 0.0
        self._probes_longer = not self._probes_longer
        self._current, self._num_left = length, PROBE - 1


def draft_length_of(longest: int, *, adaptive: bool) -> DraftLength:
    """The policy of an engine that makes up to `longest` drafts a step."""
    return AdaptiveLength(longest) if adaptive else FixedLength(longest)


def draft_lengths(longest: int) -> list[int]:
    """The lengths that are compiled: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32 as far as they go, and `longest`."""
    doubling = (n * 2**i for i in range(1, longest.bit_length()) for n in (2, 3))
    return sorted({n for n in (0, 1, 2, 3, *doubling) if n < longest} | {longest})


class Acceptance:
    """How likely the first, the second, ... draft is accepted once those before it are; old steps fade."""

    def __init__(self, longest: int) -> None:
        self._verified, self._accepted = [0.0] * longest, [0.0] * longest

    def learn(self, num_verified: int, accepted: Sequence[int]) -> None:
        """Take in a step: of each row, how many of `num_verified` drafts were accepted.

        A row that made fewer counts as if the others had been rejected, as what is asked is what a step would give.
        """
        for place in range(num_verified if accepted else 0):
            reached = sum(count >= place for count in accepted)
            agreed = sum(count > place for count in accepted)
            self._verified[place] += reached - MEMORY * self._verified[place]
            self._accepted[place] += agreed - MEMORY * self._accepted[place]

    def forget_from(self, place: int) -> None:
        """What is known of drafts from this place on is out of date."""
        for later in range(place, len(self._verified)):
            self._verified[later] = self._accepted[later] = 0.0

    def tokens(self, length: int) -> float:
        """That a row is expected to emit in a step that verifies so many drafts, 1 to 1 + `length`."""
        total = survives = 1.0
        rate = 0.5
        for verified, accepted in zip(self._verified[:length], self._accepted[:length], strict=True):
            # Where nothing is known a draft is as good as the one before it.
            rate = (accepted + rate) / (verified + 1)
            survives *= rate
            total += survives
        return total


class StepTimes:
    """Seconds of a step of each length, in one bucket."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._first: dict[int, list[float]] = {}

    def __contains__(self, length: int) -> bool:
        return length in self._seconds

    def __getitem__(self, length: int) -> float:
        return self._seconds[length]

    def learn(self, length: int, seconds: float) -> None:
        """Take in the time of a step."""
        if length not in self:
            first = self._first.setdefault(length, [])
            first.append(seconds)
            if len(first) == MEASURED:
                self._seconds[length] = statistics.median(first)
            return
        ratio = min(max(seconds / self[length], 1 / OUTLIER), OUTLIER)
        # What slows one length down, longer texts or a busy machine, slows the others down as well.
        for other in (*self._seconds, length):
            self._seconds[other] *= ratio**RATE
