"""A request that an engine has taken on: what was asked for, and what has come of it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from mla_compile.engine.completion import Completion
from mla_compile.engine.grammar import GrammarRow
from mla_compile.engine.reports import RowReport
from mla_compile.engine.scheduler import Request
from mla_compile.engine.stop_strings import StopStrings
from mla_compile.speculate import SamplingParams

if TYPE_CHECKING:
    from mla_compile.engine.engine import Engine


class TokenChooser(Protocol):
    """Chooses tokens on the host, from logits: what cannot be compiled into the step."""

    def __call__(self, logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
        """The target's tokens at the positions of some rows.

        Args:
            logits: `[rows, n, vocab_size]`: position j follows the completion's tokens and the row's first j drafts.
                n is 1 after a prompt, 1 + k in a step of k drafts; a launch that has both makes two calls.
            drafts: int64 `[rows, n - 1]`.
            completions: what each row has emitted. `Completion.prompt_index` tells which of the prompts it is.

        Returns:
            int64 `[rows, n]`. Drafts are accepted as long as they agree with it. Where logits are NaN or infinite it
            does not matter: the row ends with finish_reason "error" if it comes there.
        """


@dataclass
class Progress:
    """Of several requests together: whether any has grown or ended since somebody looked."""

    has_grown: bool = False


@dataclass(eq=False)
class Generation:
    """One completion under way, as `Engine.add` returns it.

        async for token in engine.add(prompt, params):
            ...

    Iteration runs the engine's steps while it waits for tokens; a loop that is left early aborts the request.

    completion: what is known by now; it grows, and has a `finish_reason` in the end.
    """

    engine: "Engine"
    completion: Completion
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_len: int
    priority: int
    grammar: GrammarRow | None
    choose: TokenChooser | None
    stop_strings: StopStrings | None
    request: Request | None = None
    """The scheduler's, once it was handed over."""
    progress: Progress = field(default_factory=Progress)

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason is not None

    @property
    def has_begun(self) -> bool:
        """Whether its prompt has been run, or will never be."""
        return bool(self.completion.token_ids) or self.has_ended

    @property
    def is_chosen_on_host(self) -> bool:
        """Whether the host must see the logits of each step."""
        return self.grammar is not None or self.choose is not None

    def abort(self) -> None:
        """End it now; see `Engine.abort`."""
        self.engine.abort(self)

    def end(self, finish_reason: str, error: str | None = None) -> None:
        """Nothing more comes, for a reason outside the text."""
        self.completion.finish_reason, self.completion.error = finish_reason, error
        self.progress.has_grown = True

    def extend(self, report: RowReport, *, is_step: bool) -> None:
        """Take in what a step emitted, or a prompt's last chunk (`is_step` False), up to a stop string."""
        completion = self.completion
        if self.grammar is not None:
            report = self.grammar.settle(report)
        self.progress.has_grown = True
        num_known = len(completion.token_ids)
        if len(self.prompt) + num_known + len(report.tokens) >= self.max_len:
            report = replace(report, active=False)  # whatever the device says, or nothing would ever end it
        completion.extend(report, self.stop_ids, is_step=is_step)
        if self.stop_strings is not None:
            found = self.stop_strings.feed(completion.token_ids[num_known:])
            if found is not None:
                completion.end_at(num_known + found.num_tokens, found.text)
        if self.has_ended and completion.text is None and self.engine.tokenizer is not None:
            text = self.engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            completion.text = str(text)

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
                    await self.engine.turn()
        finally:
            self.engine.leave(self)
