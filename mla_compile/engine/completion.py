"""The completion of one prompt."""

from dataclasses import dataclass, field

from mla_compile.engine.reports import Logprob


@dataclass
class Completion:
    """The completion of one prompt, or one of its `SamplingParams.n` completions.

    token_ids: the generated tokens, including the stop id if one ended the row.
    finish_reason: "stop" (a stop id or a stop string), "length" (max_tokens or the model's length), "abort", "error"
        (see `error`), None while it runs.
    num_steps: verify steps that the row took part in.
    num_prefills: tokens sampled by prefill instead: the first one, and one after each preemption.
    text: of the tokens before the stop id or stop string; it is what the pieces of a `TextStream` join to.
        `SamplingParams` say whether it has special tokens and the end. None while it runs, and in an engine without a
        tokenizer.
    logprobs: for each token, the log-probabilities of the chosen token and of the `SamplingParams.logprobs` most likely
        ones, by token id, as in vLLM; the chosen token comes first and, if it is not among the likely ones, is one
        more. None if they were not requested.
    error: why this completion alone ended early: its grammar allows no token, the model's logits are NaN or infinite,
        or the host's work on it failed. None without an error.
    draft_positions: for each token, which draft of its step it was, from 1 on, and 0 for a step's last token, which the
        model itself chose.
    prompt_index: which of a call's prompts it completes; index: which of that prompt's `SamplingParams.n`.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_steps: int = 0
    num_prefills: int = 0
    text: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    draft_positions: list[int] = field(default_factory=list, compare=False)
    prompt_index: int = field(default=0, compare=False)
    index: int = field(default=0, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over all tokens; None without `logprobs`."""
        if self.logprobs is None:
            return None
        return sum(place[token].logprob for place, token in zip(self.logprobs, self.token_ids, strict=True))

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify step, 1..k+1; None before the first."""
        return (len(self.token_ids) - self.num_prefills) / self.num_steps if self.num_steps else None
