"""From a plan to a launched step: the rows' state is prepared, and the step that serves them runs on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_compile.backend import resolve_settings
from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.capture import CALLS_TO_RECORD, Captures
from mla_compile.engine.config import FittedConfig
from mla_compile.engine.grammar import allowed_tokens
from mla_compile.engine.reports import StepReport
from mla_compile.engine.rows import Rows
from mla_compile.engine.scheduler import Plan
from mla_compile.engine.variants import Variant
from mla_compile.errors import MLAError, is_request_error
from mla_compile.ranks import Ranks
from mla_compile.speculate import (
    DecodeState,
    Drafter,
    PackedChunks,
    PromptChunk,
    ServedModel,
    SpeculativeDecoder,
    Step,
    shadow_check,
)
from mla_compile.speculate.choice import NO_TOKEN
from mla_compile.torch_internals import mark_varying, with_own_code

VERIFY = "verify"
"""The step's first half, where tokens are chosen on the host."""

EAGER_MIXED_STEPS = 16
"""So many steps with prompts beside rows that decode run eagerly, and all with prompts before. A batch that comes to an
idle engine needs no more, and waits for one compiled step instead of two."""


class RankZeroFailed(Exception):
    """Rank 0 could not choose tokens: there is no step."""


@dataclass
class Launch:
    """A step under way.

    plan: what it runs; report: what it will say of `plan.sampled`.
    on_host: whether the host had a say in its tokens.
    """

    plan: Plan
    report: StepReport
    on_host: bool


class Launcher:
    """Launches the steps that plans ask for.

    A step is one compiled call, captured if it can be, the prompts in it padded to one of a few sizes. Steps with
    prompts run eagerly until `warm_up` or `EAGER_MIXED_STEPS`, and always where no CUDA graph is recorded: compiling
    them would take longer than it saves. Where tokens are chosen on the host a step is a call for each half, and what
    chooses between them runs eagerly. With `batch_invariant` all of this is compiled, and from the first step on, since
    compiled code and eager code round differently.

    Where processes share the model, each launches the same steps. What depends on free memory or on the host's choice
    of tokens, rank 0 decides for all.

    Args:
        model, drafter: with allocated caches.
        ranks: of those processes; None for a process that has all of the model.
    """

    def __init__(
        self, model: ServedModel, drafter: Drafter | None, config: FittedConfig, ranks: Ranks | None = None
    ) -> None:
        self._model, self._config, self._ranks = model, config, ranks
        self._k, self._device = config.num_speculative_tokens, model.device
        self._decoders = {
            sampled: SpeculativeDecoder(
                model,
                self._k,
                page_size=config.page_size,
                drafter=drafter,
                sampled=sampled,
                decode_backend=config.decode_backend,
            )
            for sampled in (False, True)
        }
        why_not = _why_not_captured(config, self._device)
        self._pads = _compiles_mixed(model, why_not)
        self._compiles_prompts = config.batch_invariant
        self._num_mixed = 0
        self._captures = Captures(
            config.max_rows,
            q_len=1 + self._k,
            device=self._device,
            budget=config.capture_budget,
            why_not=why_not,
            agree=self._agreed,
        )
        self._calls: dict[tuple[str, bool], Callable[..., Any]] = {}
        self._states: dict[tuple[int, int, bool, int | None], DecodeState] = {}
        self._chunks: dict[tuple[int, ...], PackedChunks] = {}
        self.choice_failed = False
        """Whether the last launch ended, on all ranks, as the host could not choose its tokens."""
        self._chooses = False
        self.rows = Rows(self._state_for, pages_per_grant=config.pages_per_grant, device=self._device)
        """The rows of the requests that run."""

    def launch(self, plan: Plan) -> Launch:
        """Run a plan.

        Raises:
            RankZeroFailed: on a rank above 0, in the middle of a step whose tokens rank 0 chooses.
        """
        self.choice_failed = False
        if plan.admitted:
            self._captures.check_again()
        state = self.rows.prepare(plan)
        variant, sampled = self.rows.variant, plan.sampled
        on_host = self.rows.on_host and any(request.is_chosen_on_host for request in sampled)
        chunks = self._packed(plan, state) if plan.chunks else None
        self._num_mixed += bool(plan.chunks and plan.decodes)
        self._compiles_prompts |= self._pads and self._num_mixed > EAGER_MIXED_STEPS
        if on_host:
            self._run_in_halves(variant, state, chunks, plan)
        elif chunks is not None:
            self._mixed(variant)(state, chunks)
        else:
            self.step(variant)(state)
        rows = self.rows.of(sampled)
        counts: dict[int, int] = {}
        if variant.num_logprobs is not None:
            wanted = ((row, request.params.logprobs) for row, request in zip(rows, sampled, strict=True))
            counts = {row: count for row, count in wanted if count is not None}
        return Launch(plan, StepReport(state, rows, counts), on_host)

    def _agreed(self, number: int) -> int:
        """Rank 0's number; while rank 0 chooses tokens, which it does alone, its own."""
        return number if self._ranks is None or self._chooses else self._ranks.agree([number])[0]

    def step(self, variant: Variant) -> Step:
        """The step of rows that all decode."""
        step: Step = self._call(variant.name, self._decoders[variant.sampled].forward, is_checked=True)
        return step

    def _mixed(self, variant: Variant) -> Callable[[DecodeState, PackedChunks], None]:
        """The step of rows that decode and prompts beside them."""
        mixed, compile = self._decoders[variant.sampled].mixed, self._compiles_prompts
        return self._call(f"mixed, {variant.name}", mixed, compile=compile, is_checked=compile)

    def warm_up(self, variant: Variant, num_stop_ids: int, prompts: bool) -> None:
        """Compile the step, and record it for all numbers of rows, largest first.

        prompts: where steps with prompts are compiled, or it pays to, compile those too, with a prompt that is nothing
        but padding.
        """
        self._captures.check_again()
        self._compiles_prompts |= self._pads and prompts
        for size in reversed(self._captures.sizes):
            state = self._state_for(size, variant, num_stop_ids, False)
            state.active.zero_()
            for _ in range(CALLS_TO_RECORD):
                self.step(variant)(state)
        if prompts and self._compiles_prompts:
            # Any sizes will do: each is recorded when prompts first have it.
            state = self._state_for(1, variant, num_stop_ids, False)
            chunks = self._pack([PromptChunk(0, [0, 0], 0, 1)], state)
            chunks.bounds.zero_()  # it is padding
            self._mixed(variant)(state, chunks)

    def capture_report(self) -> CaptureReport:
        return self._captures.report()

    def _call(
        self, name: str, method: Callable[..., Any], *, compile: bool = True, is_checked: bool = False
    ) -> Callable[..., Any]:
        """A decoder's method, compiled on its first call; `name` tells it from others."""
        config, key = self._config, (name, compile)
        if key not in self._calls:
            call = method
            if config.compile and compile:
                own, settings = with_own_code(method), config.compile_settings
                call = torch.compile(own, backend="mla", fullgraph=True, **settings)
                call = self._captures.measured(name, call)
            if is_checked and config.shadow_check_every is not None:
                call = shadow_check(call, every=config.shadow_check_every)
            self._calls[key] = call
        return self._calls[key]

    def _state_for(self, count: int, variant: Variant, num_stop_ids: int, on_host: bool) -> DecodeState:
        """The state of the bucket for so many rows, always the same one: captured graphs know its addresses."""
        name = VERIFY if on_host else variant.name
        rows = self._captures.rows_for(name, count, num_stop_ids)
        num_logprobs = variant.num_logprobs
        if num_logprobs is not None:
            num_logprobs = min(num_logprobs, self._model.vocab_size)
        key = rows, num_stop_ids, variant.penalised, num_logprobs
        if key not in self._states:
            pages = self._config.pages_per_row
            has_history = self._k > 0 and self._config.drafter.needs_history
            self._states[key] = DecodeState.allocate(
                rows,
                self._k,
                max_pages=pages,
                num_stop_ids=num_stop_ids,
                penalised_vocab=self._model.vocab_size if variant.penalised else None,
                num_logprobs=num_logprobs,
                history_len=pages * self._config.page_size if has_history else None,
                device=self._device,
            )
        return self._states[key]

    def _packed(self, plan: Plan, state: DecodeState) -> PackedChunks:
        rows = self.rows
        chunks = [PromptChunk(rows[c.request], rows.text(c.request), c.start, c.end) for c in plan.chunks]
        return self._pack(chunks, state)

    def _pack(self, chunks: Sequence[PromptChunk], state: DecodeState) -> PackedChunks:
        return PackedChunks.pack(
            chunks,
            state,
            page_size=self._config.page_size,
            pad=self._pads,
            most=self._config.prompt_tokens_per_step,
            kept=self._chunks if self._pads else None,
        )

    def _run_in_halves(
        self, variant: Variant, state: DecodeState, chunks: PackedChunks | None, plan: Plan
    ) -> None:
        """A step whose tokens the host has a say in, between its halves."""
        decoder = self._decoders[variant.sampled]
        if chunks is None:
            begins = torch.zeros_like(state.active)
            logits, output = self._call(VERIFY, decoder.verify)(state)
        else:
            begins, compile = chunks.begins, self._compiles_prompts
            logits, output = self._call(f"mixed, {VERIFY}", decoder.verify, compile=compile)(state, chunks)
        targets = self._chosen(lambda: self._choose(variant, decoder, state, logits, plan), state)
        output = output.map(torch.clone)  # the next replay overwrites what this one returned
        for given in (targets, output.hidden, *output.aux, begins):
            mark_varying(given)
        self._call(f"advance, {variant.name}", decoder.advance)(state, targets, output, begins)

    def _chosen(self, choose: Callable[[], Tensor], state: DecodeState) -> Tensor:
        """What `choose` gives on rank 0, int64 `[rows, k + 1]`."""
        if self._ranks is None:
            return choose()
        numbers: Sequence[int] = ()
        try:
            if self._ranks.rank == 0:
                self._chooses = True
                numbers = choose().flatten().tolist()
        finally:
            self._chooses, self.choice_failed = False, not numbers
            numbers = self._ranks.agree(numbers)  # none, where choosing has failed
        if not numbers:
            raise RankZeroFailed
        return torch.tensor(numbers, device=self._device).view(len(state.active), self._k + 1)

    def _choose(
        self, variant: Variant, decoder: SpeculativeDecoder, state: DecodeState, logits: Tensor, plan: Plan
    ) -> Tensor:
        """The target's tokens, int64 `[rows, k + 1]`: among those that grammars allow, or those of a `TokenChooser`."""
        sampled = [(self.rows[request], request) for request in plan.sampled]
        grammars = {row: request.grammar for row, request in sampled if request.grammar is not None}
        first = set(self.rows.of(plan.first_sampled))
        guesses, allowed = state.drafts, None
        if grammars:
            allowed = allowed_tokens(grammars, guesses, vocab_size=self._model.vocab_size, first=first)
        choose_targets = decoder.choose_targets
        if self._config.batch_invariant:
            choose_targets = self._call(f"choose, {variant.name}", decoder.choose_targets)
            logits = logits.clone()  # the next replay overwrites it
            for given in (logits, allowed):
                if given is not None:
                    mark_varying(given)
        targets = choose_targets(state, logits, allowed).clone()
        choosers = dict.fromkeys(request.choose for _, request in sampled if request.choose is not None)
        for choose in choosers:
            asked = {row: request for row, request in sampled if request.choose is choose}
            # A first token follows no drafts.
            for n, rows in ((1, asked.keys() & first), (self._k + 1, asked.keys() - first)):
                if not rows:
                    continue
                index = torch.tensor(sorted(rows), device=self._device)
                drafts, requests = guesses[index, : n - 1], [asked[row] for row in sorted(rows)]
                has_token = targets[index, :n] != NO_TOKEN
                try:
                    chosen = choose(logits[index, :n], drafts, [request.said for request in requests])
                    _check_chosen(chosen, has_token, self._model.vocab_size)
                    targets[index, :n] = torch.where(has_token, chosen, NO_TOKEN)
                except BaseException as error:
                    if not is_request_error(error):
                        raise
                    for request in requests:
                        request.failure = error
        return targets


def _check_chosen(chosen: object, counts: Tensor, vocab_size: int) -> None:
    """Raises `MLAError` where a `TokenChooser` gave no tokens `[rows, n]`; counts: bool, the places that matter."""
    expected = f"int64 {list(counts.shape)} of ids in [0, {vocab_size})"
    if not isinstance(chosen, Tensor):
        raise MLAError("choose", expected, repr(chosen))
    if chosen.dtype != torch.int64 or chosen.shape != counts.shape:
        raise MLAError("choose", expected, f"{chosen.dtype} {list(chosen.shape)}")
    outside = chosen[((chosen < 0) | (chosen >= vocab_size)) & counts]
    if len(outside):
        raise MLAError("choose", expected, int(outside[0]))


def _compiles_mixed(model: ServedModel, why_not_captured: str | None) -> bool:
    """Whether it pays to compile steps with prompts in them, and to pad their prompts to a few sizes."""
    # Uncaptured, they would save less than compiling takes. Recurrent layers take lengths on the host.
    return why_not_captured is None and not model.is_recurrent


def _why_not_captured(config: FittedConfig, device: torch.device) -> str | None:
    """Why no CUDA graph will be recorded; None where they will."""
    if not config.compile:
        return "compile=False"
    if not resolve_settings(config.mode, None).get("triton.cudagraphs"):
        return f"mode {config.mode or 'default'} has no CUDA graphs"
    return None if device.type == "cuda" else f"the device is {device}"
