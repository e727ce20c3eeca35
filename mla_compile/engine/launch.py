"""From a plan to a launched step: the rows' state is prepared, and the step that serves them runs on it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_compile.backend import resolve_settings
from mla_compile.defaults import DrafterName
from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.capture import CALLS_TO_RECORD, Captures
from mla_compile.engine.draft_length import Drafting, DraftLength
from mla_compile.engine.generation import Generation
from mla_compile.engine.grammar import allowed_tokens
from mla_compile.engine.rows import Rows
from mla_compile.engine.scheduler import Chunk, Plan, Request, Row
from mla_compile.engine.variants import Variant
from mla_compile.packing import padded_prompt_tokens
from mla_compile.speculate import (
    DecodeState,
    PromptChunk,
    PromptChunks,
    ServedModel,
    SpeculativeDecoder,
    Step,
    shadow_check,
)
from mla_compile.speculate.choice import NO_TOKEN
from mla_compile.torch_internals import mark_varying, with_own_code

VERIFY = "verify"
"""The step's first half, where tokens are chosen on the host."""


@dataclass(frozen=True)
class Launched:
    """What `plan.sampled` will find in a state's report.

    rows: of the state, in the plan's order. num_logprobs: `SamplingParams.logprobs`, by row, where asked for.
    on_host: whether the host had a say in the tokens.
    is_usual: whether nothing was compiled or recorded, so that its time tells of others'.
    """

    state: DecodeState
    rows: list[int]
    num_logprobs: dict[int, int]
    on_host: bool
    is_usual: bool
    drafting: Drafting


class Launcher:
    """Launches the steps that plans ask for.

    A step is one compiled call where all rows decode, captured if it can be. With prompt chunks in it it runs eagerly,
    or compiled and captured around the prefill calls, its prompts padded to one of a few sizes. Where tokens are chosen
    on the host it is a call for each half.

    Args:
        model: whose caches have `page_size` tokens a page.
        draft_length: says of each launch how many drafts it makes and verifies.
        drafter, max_rows, compile, compile_mixed, mode, shadow_check_every, decode_backend, capture_budget: see
            `Engine`.
        max_pages: of a row.
        pages_per_grant: cache pages that one page of a plan stands for.

    Raises:
        MLAError: an unknown mode, a number of drafts that no step has.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        drafter: DrafterName,
        draft_length: DraftLength,
        max_rows: int,
        max_pages: int,
        page_size: int,
        pages_per_grant: int,
        compile: bool,
        compile_mixed: bool,
        mode: str | None,
        shadow_check_every: int | None,
        decode_backend: str | None,
        capture_budget: int | None,
    ) -> None:
        self._model, self.draft_length = model, draft_length
        self._longest = draft_length.lengths[-1]
        self._has_history = self._longest > 0 and drafter == "ngram"
        self._num_made = 0  # drafts for each row, by the last launch
        self._max_pages, self._page_size = max_pages, page_size
        self._device = model.device
        self._compile, self._mode, self._shadow_check_every = compile, mode, shadow_check_every
        self._compile_mixed = compile and compile_mixed
        self._decoders = {
            (sampled, length): SpeculativeDecoder(
                model,
                length,
                page_size=page_size,
                drafter=drafter,
                keep_drafter=self._longest > 0,
                sampled=sampled,
                decode_backend=decode_backend,
            )
            for sampled in (False, True)
            for length in draft_length.lengths
        }
        why_not = _why_not_captured(compile, mode, self._device)
        self._pads_prompts = self._compile_mixed and why_not is None
        self._captures = Captures(max_rows, device=self._device, budget=capture_budget, why_not=why_not)
        self._steps: dict[tuple[Variant, int], Step] = {}
        self._mixed_steps: dict[tuple[Variant, int], Callable[[DecodeState, PromptChunks], None]] = {}
        self._verifies: dict[int, Callable[..., Any]] = {}
        self._advances: dict[tuple[Variant, int], Callable[..., Any]] = {}
        self._states: dict[tuple[int, int, bool, int | None], DecodeState] = {}
        self.rows = Rows(self._state_for, pages_per_grant=pages_per_grant, device=self._device)

    def launch(self, plan: Plan, generations: Mapping[Request, Generation]) -> Launched:
        """Run a plan."""
        if plan.admitted:
            self._captures.check_again()
        state = self.rows.prepare(plan, generations)
        variant = self.rows.variant
        sampled = [(row, generations[row.request]) for row in plan.sampled]
        on_host = any(generation.is_chosen_on_host for _, generation in sampled)
        chunks = self._packed(plan, state, pad=self._pads_prompts and not on_host) if plan.chunks else None
        bucket = variant, state.stop_ids.shape, on_host, chunks is not None
        length = self.draft_length.choose(bucket)
        unusual = self._captures.num_unusual
        if on_host:
            self._run_in_halves(variant, length, state, chunks, sampled)
        elif chunks is not None:
            self._mixed(variant, length)(state, chunks)
        else:
            self.step(variant, length)(state)
        rows = [self.rows[row.slot] for row, _ in sampled]
        wanted = zip(rows, (g.params.logprobs for _, g in sampled), strict=True)
        num_logprobs = {row: count for row, count in wanted if count is not None}
        drafting = Drafting(length, min(length, self._num_made), bucket)
        self._num_made = length
        return Launched(state, rows, num_logprobs, on_host, self._captures.num_unusual == unusual, drafting)

    def step(self, variant: Variant, length: int) -> Step:
        """The step of rows that all decode, with so many drafts."""
        if (variant, length) not in self._steps:
            decoder = self._decoders[variant.sampled, length]
            step: Step = self._compiled(variant.name, decoder, decoder.forward)
            if self._shadow_check_every is not None:
                step = shadow_check(step, every=self._shadow_check_every)
            self._steps[variant, length] = step
        return self._steps[variant, length]

    def _mixed(self, variant: Variant, length: int) -> Callable[[DecodeState, PromptChunks], None]:
        """The step of rows that decode and prompts beside them."""
        if (variant, length) not in self._mixed_steps:
            decoder = self._decoders[variant.sampled, length]
            mixed = decoder.mixed
            if self._compile_mixed:
                mixed = self._compiled(f"mixed, {variant.name}", decoder, mixed)
            self._mixed_steps[variant, length] = mixed
        return self._mixed_steps[variant, length]

    def warm_up(self, variant: Variant, num_stop_ids: int) -> None:
        """Compile a step for each number of drafts, and record it for all numbers of rows, largest first.

        Where mixed steps are compiled those are too, with a prompt that is nothing but padding.
        """
        self._captures.check_again()
        lengths = self.draft_length.lengths[::-1]
        for size in reversed(self._captures.sizes):
            state = self._state_for(size, variant, num_stop_ids, False)
            state.active.zero_()
            for length in lengths:
                for _ in range(CALLS_TO_RECORD):
                    self.step(variant, length)(state)
        if self._compile_mixed:
            # Any sizes will do: each is recorded when prompts first have it.
            state = self._state_for(1, variant, num_stop_ids, False)
            num_tokens = padded_prompt_tokens(1) if self._pads_prompts else 0
            chunks = PromptChunks.pack([], state, page_size=self._page_size, num_tokens=num_tokens)
            for length in lengths:
                self._mixed(variant, length)(state, chunks)

    def capture_report(self) -> CaptureReport:
        return self._captures.report()

    def _compiled(
        self, name: str, decoder: SpeculativeDecoder, method: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The decoder's method, which is traced on its first call."""
        if not self._compile:
            return method
        step = torch.compile(with_own_code(method), backend="mla", mode=self._mode, fullgraph=True)
        return self._captures.measured(name, decoder.k + 1, step)

    def _state_for(self, count: int, variant: Variant, num_stop_ids: int, on_host: bool) -> DecodeState:
        """The state of the bucket for so many rows, always the same one: captured graphs know its addresses."""
        name = VERIFY if on_host else variant.name
        rows = self._captures.rows_for(name, self._longest + 1, count, num_stop_ids)
        num_logprobs = variant.num_logprobs
        if num_logprobs is not None:
            num_logprobs = min(num_logprobs, self._model.vocab_size)
        key = rows, num_stop_ids, variant.penalised, num_logprobs
        if key not in self._states:
            self._states[key] = DecodeState.allocate(
                rows,
                self._longest,
                varying_drafts=len(self.draft_length.lengths) > 1,
                max_pages=self._max_pages,
                num_stop_ids=num_stop_ids,
                penalised_vocab=self._model.vocab_size if variant.penalised else None,
                num_logprobs=num_logprobs,
                history_len=max(2, self._max_pages * self._page_size) if self._has_history else None,
                device=self._device,
            )
        return self._states[key]

    def _packed(self, plan: Plan, state: DecodeState, *, pad: bool) -> PromptChunks:
        chunks = [PromptChunk(self.rows[c.slot], c.request.tokens, c.start, c.end) for c in plan.chunks]
        num_tokens = padded_prompt_tokens(sum(c.length for c in plan.chunks)) if pad else 0
        return PromptChunks.pack(chunks, state, page_size=self._page_size, num_tokens=num_tokens)

    def _run_in_halves(
        self,
        variant: Variant,
        length: int,
        state: DecodeState,
        chunks: PromptChunks | None,
        sampled: list[tuple[Row, Generation]],
    ) -> None:
        """A step whose tokens the host has a say in, between its halves."""
        decoder = self._decoders[variant.sampled, length]
        if chunks is not None:
            logits, hidden = decoder.verify(state, chunks)
            decoder.advance(state, self._choose(decoder, state, logits, sampled), hidden, chunks)
            return
        if length not in self._verifies:
            self._verifies[length] = self._compiled(VERIFY, decoder, decoder.verify)
        logits, hidden = self._verifies[length](state)
        targets = self._choose(decoder, state, logits, sampled)
        hidden = hidden.clone()  # the next replay overwrites what this one returned
        for given in (targets, hidden):
            mark_varying(given)
        if (variant, length) not in self._advances:
            advance = self._compiled(f"advance, {variant.name}", decoder, decoder.advance)
            self._advances[variant, length] = advance
        self._advances[variant, length](state, targets, hidden)

    def _choose(
        self,
        decoder: SpeculativeDecoder,
        state: DecodeState,
        logits: Tensor,
        sampled: list[tuple[Row, Generation]],
    ) -> Tensor:
        """The target's tokens, int64 `[rows, k + 1]`: among those that grammars allow, or those of a `TokenChooser`."""
        grammars = {self.rows[row.slot]: g.grammar for row, g in sampled if g.grammar is not None}
        first = {self.rows[row.slot] for row, _ in sampled if isinstance(row, Chunk)}
        guesses, allowed = state.drafts[:, : decoder.k], None
        if grammars:
            allowed = allowed_tokens(grammars, guesses, vocab_size=self._model.vocab_size, first=first)
        targets = decoder.choose_targets(state, logits, allowed)
        choosers = {g.choose: None for _, g in sampled if g.choose is not None}
        for choose in choosers:
            asked = {self.rows[row.slot]: g.completion for row, g in sampled if g.choose is choose}
            # A first token follows no drafts.
            for n, rows in ((1, asked.keys() & first), (decoder.k + 1, asked.keys() - first)):
                if rows:
                    index = torch.tensor(sorted(rows), device=self._device)
                    drafts, completions = guesses[index, : n - 1], [asked[row] for row in sorted(rows)]
                    chosen = choose(logits[index, :n], drafts, completions)
                    has_token = targets[index, :n] != NO_TOKEN
                    targets[index, :n] = torch.where(has_token, chosen, NO_TOKEN)
        return targets


def _why_not_captured(compile: bool, mode: str | None, device: torch.device) -> str | None:
    """Why no CUDA graph will be recorded; None where they will.

    Raises:
        MLAError: a mode that `torch.compile` does not know.
    """
    if not compile:
        return "compile=False"
    if not resolve_settings(mode, None).get("triton.cudagraphs"):
        return f"mode {mode or 'default'} has no CUDA graphs"
    return None if device.type == "cuda" else f"the device is {device}"
