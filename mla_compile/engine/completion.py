"""What becomes of one prompt."""

from collections.abc import Container
from dataclasses import dataclass, field

from mla_compile.engine.reports import Logprob, RowReport


@dataclass
class Completion:
    """What became of one prompt, or of one of several completions of it.

    token_ids: the generated tokens, a stop id included where one ended the row.
    finish_reason: "stop" (a stop id or a stop string), "length" (max_tokens or the model's length), "abort", "error"
        (see `error`), None while it runs.
    num_steps: verify steps that the row took part in.
    num_prefills: tokens that came of the prompt instead: the first one, and one after each preemption.
    text: of the tokens, special ones left out, up to a stop string; None where no tokenizer decoded them.
    logprobs: for each token, the log-probabilities of the chosen one and of the `SamplingParams.logprobs` most likely
        ones, by token id, as in vLLM; the chosen one comes first and, if it is not among the likely ones, makes one
        more. None where they were not asked for.
    error: why this prompt alone could not go on after these tokens: its grammar allows none, or the model's logits are
        NaN or infinite. None where all went well.
    prompt_index: which of a call's prompts it completes; index: which of that prompt's `SamplingParams.n`.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_steps: int = 0
    num_prefills: int = 0
    text: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    prompt_index: int = field(default=0, compare=False)
    index: int = field(default=0, compare=False)

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all tokens together; None without `logprobs`."""
        if self.logprobs is None:
            return None
        return sum(place[token].logprob for place, token in zip(self.logprobs, self.token_ids, strict=True))

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify step, 1..k+1; None where no step was taken."""
        return (len(self.token_ids) - self.num_prefills) / self.num_steps if self.num_steps else None

    def extend(self, report: RowReport, stop_ids: Container[int], *, is_step: bool) -> None:
        """Append what a step emitted, or a prompt's end (`is_step` False); a finished completion stays as it is."""
        if self.finish_reason is not None:
            return
        self.token_ids += report.tokens
        if report.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += report.logprobs
        self.num_steps += is_step
        self.num_prefills += 0 if is_step else len(report.tokens)
        self.error = report.error
        if self.error is not None:
            self.finish_reason = "error"
        elif not report.active:
            self.finish_reason = "stop" if self.token_ids[-1] in stop_ids else "length"

    def end_at(self, num_tokens: int, text: str) -> None:
        """Take back what follows a stop string, which the last of `num_tokens` completes; `text` is before it."""
        del self.token_ids[num_tokens:]
        if self.logprobs is not None:
            del self.logprobs[num_tokens:]
        self.text, self.error, self.finish_reason = text, None, "stop"
