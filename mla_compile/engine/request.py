"""A request: its arguments, its results so far, and its scheduling state."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from mla_compile.engine.completion import Completion
from mla_compile.engine.detokenizer import TextReader, without_end
from mla_compile.engine.grammar import GrammarRow
from mla_compile.engine.reports import RowReport
from mla_compile.errors import MLAError, request_error
from mla_compile.sampling_params import SamplingParams


class TokenChooser(Protocol):
    """Chooses tokens on the host, from logits, by code that cannot be compiled into the step."""

    def __call__(self, logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
        """The target's tokens at the positions of some rows.

        Args:
            logits: `[rows, n, vocab_size]`: position j follows the completion's tokens and the row's first j drafts.
                n is 1 after a prompt, 1 + k in a step of k drafts; a launch that has both makes two calls.
            drafts: int64 `[rows, n - 1]`.
            completions: what each row has emitted. `Completion.prompt_index` identifies the prompt.

        Returns:
            int64 `[rows, n]`. Drafts are accepted as long as they agree with it. Tokens at positions whose logits are
            NaN or infinite do not matter: a row that gets there ends with finish_reason "error".
        """


@dataclass
class Progress:
    """Whether any of several requests has grown or ended since the flag was last cleared."""

    has_grown: bool = False


@dataclass(eq=False, repr=False)  # errors and logs must not show a prompt
class Request:
    """One running completion, as `Engine.add` returns it.

        async for token in engine.add(prompt, params):
            ...

    Iteration runs the engine's steps while it waits for tokens; a loop that is left early aborts the request.

    Its arguments:

    prompt, params, client: of `Engine.add`. priority: lower ones come first.
    max_len: the number of tokens, prompt included, at which it ends.
    stop_ids: any of these tokens ends it.
    max_drafts: maximum number of drafts per step; None for all.
    grammar, choose: mask or choose its tokens on the host.
    reader: reads its text, up to a stop string; None in an engine without a tokenizer.
    engine: the `Engine` that serves it; None once it has ended, so that it keeps no engine alive.

    Its results so far:

    completion: it grows, and has a `finish_reason` in the end.
    progress: shared by the requests of one call.
    failure: the error that `choose` raised; the step's report ends the request.

    Its scheduling state, which only the scheduler changes:

    rank: its place in the scheduler's order: priority, whether it has never run, the number of its first admission
        (before it, of its arrival). None until it waits or runs.
    is_running: it holds pages and has a row in every step that it is in.
    is_outdated: the weights have changed since it last began to run, so its latents are of old and new weights.
    pages: the pages that it holds, in order.
    num_reused_tokens: tokens found in the cache when it last began to run.
    num_cached: upper bound of its tokens in the cache once all launched steps have run; exact while it prefills.
    is_decoding: it has sampled since its cache was last built, or will have once all launched steps have run.
    num_steps: launched steps that it is in and that were not reported yet.
    num_samples: those of them that give it at least one token, if it has not ended and its logits are finite.
    """

    prompt: list[int]
    max_len: int
    priority: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    completion: Completion = field(default_factory=Completion)
    grammar: GrammarRow | None = None
    choose: TokenChooser | None = None
    max_drafts: int | None = None
    client: str | None = None
    reader: TextReader | None = None
    engine: Any = None
    progress: Progress = field(default_factory=Progress)

    failure: BaseException | None = None
    rank: tuple[int, bool, int] | None = None
    is_running: bool = False
    is_outdated: bool = False
    pages: list[int] = field(default_factory=list)
    num_reused_tokens: int = 0
    num_cached: int = 0
    is_decoding: bool = False
    num_steps: int = 0
    num_samples: int = 0

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and the tokens emitted so far."""
        return [*self.prompt, *self.completion.token_ids] if self.completion.token_ids else self.prompt

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion.token_ids)

    @property
    def will_have_ended(self) -> bool:
        """Whether the launched steps will end it at the latest."""
        return self.num_tokens + self.num_samples >= self.max_len

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def has_begun(self) -> bool:
        """Whether its prompt has been run, or never will be."""
        return bool(self.completion.token_ids) or self.has_ended

    @property
    def is_chosen_on_host(self) -> bool:
        """Whether the host must see the logits of each step."""
        return self.grammar is not None or self.choose is not None

    def take(self, report: RowReport, *, is_step: bool) -> None:
        """Append what a step emitted, or a prompt's last chunk (`is_step` False).

        Only this method decides whether the request ends, where and why. An error here ends this request alone.
        """
        try:
            self._take(report, is_step=is_step)
        except BaseException as error:
            self.end("error", str(request_error("reading what a step emitted", error)))

    def _take(self, report: RowReport, *, is_step: bool) -> None:
        if self.failure is not None:
            raise request_error("choosing tokens", self.failure)
        completion = self.completion
        if self.grammar is not None:
            report = self.grammar.settle(report)
        num_known = len(completion.token_ids)
        completion.token_ids += report.tokens
        if report.tokens:
            completion.draft_positions += [*range(1, len(report.tokens)), 0]
        if report.logprobs is not None:
            completion.logprobs = completion.logprobs or []
            completion.logprobs += report.logprobs
        completion.num_steps += is_step
        completion.num_prefills += 0 if is_step else len(report.tokens)
        self.progress.has_grown = True
        reason = None
        if report.error is not None:
            reason = "error"
        elif not report.active or self.num_tokens >= self.max_len:  # else it could run for ever
            reason = "stop" if completion.token_ids[-1] in self.stop_ids else "length"
        shown = without_end(completion.token_ids[num_known:], reason, self.params)
        found = self.reader and self.reader.feed(shown, is_end=reason is not None)
        if found:
            end = num_known + found.num_tokens
            del completion.token_ids[end:], completion.draft_positions[end:]
            if completion.logprobs is not None:
                del completion.logprobs[end:]
            completion.text = found.text
            self.end("stop")
        elif reason is not None:
            self.end(reason, report.error)

    def end(self, finish_reason: str, error: str | None = None) -> None:
        """Mark the request as ended."""
        completion = self.completion
        completion.finish_reason, completion.error = finish_reason, error
        if self.reader is not None and completion.text is None:
            completion.text = self.reader.text
        self.progress.has_grown = True
        self.engine = None

    def abort(self) -> None:
        """End it now; see `Engine.abort`."""
        if not self.has_ended:
            self._served_by().abort(self)

    async def __aiter__(self) -> AsyncIterator[int]:
        seen = 0
        try:
            while True:
                new = self.completion.token_ids[seen:]
                for token in new:
                    yield token
                seen += len(new)
                if not new:
                    if self.has_ended:
                        return
                    await self._served_by().turn()
        finally:
            if self.engine is not None:
                self.engine.leave(self)

    def _served_by(self) -> Any:
        if self.engine is None:
            raise MLAError("request", "one that an engine's `add` returned", "one without an engine")
        return self.engine
