"""Which parts of the decode step a batch needs: each combination is compiled on its own, on first use."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_compile.sampling_params import MAX_LOGPROBS, SamplingParams

LOGPROB_PLACES = (5, MAX_LOGPROBS)
"""How many likely tokens a step tells of, if any: the number is compiled in, so rows that ask for fewer share one."""


@dataclass(frozen=True)
class Variant:
    """A kind of step; there are 2 x 2 x 3. What one leaves out costs nothing in it.

    sampled: noise, sorting and filtering, where any row has a temperature above 0.
    penalised: penalties, where any row has one; the state then counts tokens.
    num_logprobs: None, or one of `LOGPROB_PLACES`.
    """

    sampled: bool = False
    penalised: bool = False
    num_logprobs: int | None = None

    @classmethod
    def of(cls, sampling: Sequence[SamplingParams]) -> "Variant":
        """The least that serves these rows."""
        asked = [params.logprobs for params in sampling if params.logprobs is not None]
        return cls(
            sampled=any(params.temperature > 0 for params in sampling),
            penalised=any(params.penalised for params in sampling),
            num_logprobs=min(n for n in LOGPROB_PLACES if n >= max(asked)) if asked else None,
        )

    def serves(self, other: "Variant") -> bool:
        """Whether rows that need `other` can run in this one."""
        told = -1 if self.num_logprobs is None else self.num_logprobs
        asked = -1 if other.num_logprobs is None else other.num_logprobs
        return self.sampled >= other.sampled and self.penalised >= other.penalised and told >= asked

    @property
    def name(self) -> str:
        """In the report of what was captured: "sampled, penalties, 5 logprobs"."""
        parts = ["sampled" if self.sampled else "greedy"]
        parts += ["penalties"] * self.penalised
        if self.num_logprobs is not None:
            parts.append(f"{self.num_logprobs} logprobs")
        return ", ".join(parts)
