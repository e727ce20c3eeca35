"""The optional parts of the decode step that a batch needs: each combination is compiled separately, on first use."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla_compile.sampling_params import MAX_LOGPROBS, SamplingParams

LOGPROB_PLACES = (5, MAX_LOGPROBS)
"""The compiled-in numbers of most likely tokens that a step can report; a row uses the next larger one."""


@dataclass(frozen=True)
class Variant:
    """A kind of step, one of 2 x 2 x 3. The parts that a kind leaves out cost nothing.

    sampled: noise, sorting and filtering, if any row has a temperature above 0.
    penalised: penalties, if any row has one; the state then counts tokens.
    num_logprobs: None, or one of `LOGPROB_PLACES`.
    """

    sampled: bool = False
    penalised: bool = False
    num_logprobs: int | None = None

    @classmethod
    def of(cls, sampling: Sequence[SamplingParams]) -> "Variant":
        """The smallest variant that serves these rows."""
        asked = [params.logprobs for params in sampling if params.logprobs is not None]
        return cls(
            sampled=any(params.temperature > 0 for params in sampling),
            penalised=any(params.penalised for params in sampling),
            num_logprobs=min(n for n in LOGPROB_PLACES if n >= max(asked)) if asked else None,
        )

    def serves(self, other: "Variant") -> bool:
        """Whether rows that need `other` can run in this one."""
        mine = -1 if self.num_logprobs is None else self.num_logprobs
        needed = -1 if other.num_logprobs is None else other.num_logprobs
        return self.sampled >= other.sampled and self.penalised >= other.penalised and mine >= needed

    @property
    def name(self) -> str:
        """The variant's name in the capture report: "sampled, penalties, 5 logprobs"."""
        parts = ["sampled" if self.sampled else "greedy"]
        parts += ["penalties"] * self.penalised
        if self.num_logprobs is not None:
            parts.append(f"{self.num_logprobs} logprobs")
        return ", ".join(parts)
