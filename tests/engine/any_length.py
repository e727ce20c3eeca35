"""Draft lengths that no clock decides."""

import random
from collections.abc import Sequence

from mla_compile.engine.draft_length import Drafting


class AnyLength:
    """The lengths that were given, then random ones: single steps, and runs in which rows stay without drafts.

    learned: what it was told; seconds: and the times.
    """

    def __init__(self, longest: int, seed: int = 0, first: Sequence[int] = ()) -> None:
        self.lengths = list(range(longest + 1))
        self.learned: list[tuple[Drafting, list[int]]] = []
        self.seconds: list[float | None] = []
        self._next = list(first)
        self._random = random.Random(seed)

    def choose(self, bucket: object) -> int:
        if not self._next:
            self._next = [self._random.choice(self.lengths)] * self._random.choice([1, 1, 2, 5])
        return self._next.pop(0)

    def learn(self, drafting: Drafting, accepted: Sequence[int], seconds: float | None) -> None:
        assert seconds is None or seconds > 0
        assert all(0 <= count <= drafting.num_verified <= drafting.length for count in accepted)
        self.learned.append((drafting, list(accepted)))
        self.seconds.append(seconds)
