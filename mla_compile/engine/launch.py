"""From a plan to a launched step: prepares the rows' state, and runs the step on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mla_compile.engine.capture import CALLS_TO_RECORD
from mla_compile.engine.choice import RankZeroFailed, choose_on_host
from mla_compile.engine.config import FittedConfig
from mla_compile.engine.reports import StepReport
from mla_compile.engine.rows import Rows
from mla_compile.engine.scheduler import Plan
from mla_compile.engine.steps import Steps
from mla_compile.engine.weights import Weights
from mla_compile.packing import prompt_shapes
from mla_compile.ranks import Ranks
from mla_compile.sampling_params import MAX_LOGPROBS
from mla_compile.speculate import (
    DecodeState,
    Drafter,
    PackedChunks,
    PromptChunk,
    ServedModel,
    SpeculativeDecoder,
)
from mla_compile.speculate.drafter import cache_specs
from mla_compile.speculate.sampling import top_logprobs


@dataclass
class Launch:
    """A launched step, not reported yet.

    plan: what it runs; report: its report of `plan.sampled`, once it has run.
    on_host: whether the host chose or masked tokens.
    """

    plan: Plan
    report: StepReport
    on_host: bool


class Launcher:
    """Launches the steps of plans.

    If processes share the model, each launches the same steps. Rank 0 decides for all what depends on free memory or on
    the host's choice of tokens.

    Args:
        model, drafter: with allocated caches.
        ranks: the processes that share the model; None for a process that has all of it.

    rows: of the running requests. steps: the step calls.
    weights: the model's, if anything depends on them; before a plan that may admit requests, check for a change.
    has_not_chosen: whether the last launch ended, on all ranks, because its tokens could not be chosen.
    """

    def __init__(
        self, model: ServedModel, drafter: Drafter | None, config: FittedConfig, ranks: Ranks | None = None
    ) -> None:
        self._config, self._ranks = config, ranks
        decoders = {
            sampled: SpeculativeDecoder(
                model,
                config.num_speculative_tokens,
                page_size=config.page_size,
                drafter=drafter,
                sampled=sampled,
                decode_backend=config.decode_backend,
            )
            for sampled in (False, True)
        }
        self.steps = Steps(model, config, decoders, ranks)
        self.has_not_chosen = False
        caches = [spec.cache for spec in cache_specs(model, drafter)]
        depends = self.steps.captures or config.prefix_caching
        self.weights, self._num_changes = Weights(model if depends else None, caches), 0
        self.rows = Rows(
            self.steps.state_for,
            max_rows=config.max_rows,
            pages_per_grant=config.pages_per_grant,
            device=model.device,
        )
        self._chunks: dict[tuple[int, ...], PackedChunks] = {}

    def launch(self, plan: Plan) -> Launch:
        """Run a plan.

        Raises:
            RankZeroFailed: on a rank above 0, if rank 0 failed to choose tokens in the middle of the step.
        """
        steps, rows, sampled = self.steps, self.rows, plan.sampled
        self.has_not_chosen = False
        has_changed = self._num_changes != self.weights.num_changes
        if plan.admitted and (has_changed or len(rows) == len(plan.removed)):
            self._num_changes = self.weights.num_changes
            steps.check_again()  # also in an idle engine, as `Weights` does not notice all changes of modules
        steps.num_mixed += bool(plan.decodes and plan.chunks)
        state = rows.prepare(plan)
        chunks = [
            PromptChunk(rows[chunk.request], rows.text(chunk.request), chunk.start, chunk.end)
            for chunk in plan.chunks
        ]
        if chunks:
            tokens = sum(chunk.length for chunk in plan.chunks)
            state = steps.mixed_state(len(state.active), tokens, sampled=rows.sampled)
        inputs = (state, self._pack(chunks, state)) if chunks else (state,)
        on_host = rows.on_host and any(request.is_chosen_on_host for request in sampled)
        num_logprobs = [request.params.logprobs for request in sampled]
        logprobs = None
        if not on_host and not any(n is not None for n in num_logprobs):
            steps.whole(sampled=rows.sampled, prompts=bool(chunks))(*inputs)
        else:
            logits, output = steps.verify(*inputs)
            choose_targets = partial(steps.choose_targets, sampled=rows.sampled)
            if not on_host:
                targets = choose_targets(state, logits, None)
            else:
                choose = partial(choose_on_host, plan, rows, state, logits, choose_targets)
                targets = choose() if self._ranks is None else self._chosen_by_rank_0(choose, logits)
            if any(n is not None for n in num_logprobs):
                logprobs = top_logprobs(logits, targets.clamp(min=0), min(MAX_LOGPROBS, logits.shape[-1]))
            steps.advance(targets, output, *inputs, sampled=rows.sampled)
        return Launch(plan, StepReport(state, rows.of(sampled), num_logprobs, logprobs), on_host)

    def _chosen_by_rank_0(self, choose: Callable[[], Tensor], logits: Tensor) -> Tensor:
        assert self._ranks is not None
        numbers: list[int] = []
        try:
            if self._ranks.rank == 0:
                numbers = choose().flatten().tolist()
        finally:
            self.has_not_chosen = not numbers
            numbers = self._ranks.agree(numbers)  # empty if choosing has failed
        if not numbers:
            raise RankZeroFailed
        return torch.tensor(numbers, device=logits.device).view(logits.shape[:2])

    def clear(self) -> None:
        """Forget all requests."""
        self.rows.clear()

    def warm_up(self, kinds: Sequence[bool], *, prompts: bool, parts: bool) -> None:
        """Compile steps, and capture them for all bucket row counts, largest first.

        kinds: whether they sample. prompts: if compiling steps with prompts pays, compile them too, with a prompt that
        is only padding, load all kernels and record graphs with `_run_prompts`. parts: also compile steps between whose
        parts the host reads logits.
        """
        steps = self.steps
        steps.check_again()
        steps.warms_prompts |= prompts
        steps.state_for(self._config.max_rows, sampled=False).active.zero_()
        for sampled in kinds:
            for size in reversed(steps.sizes):
                state = steps.state_for(size, sampled=sampled)
                for _ in range(CALLS_TO_RECORD):
                    steps.whole(sampled=sampled, prompts=False)(state)
                    if parts:
                        self._run_parts(sampled, state)
            if steps.compiles_in_background:
                steps.compile_parts(sampled, inference=torch.is_inference_mode_enabled())
            if prompts and steps.compiles_prompts:
                state = steps.state_for(1, sampled=sampled)  # any size serves to compile
                chunks = self._padding(state)
                steps.whole(sampled=sampled, prompts=True)(state, chunks)
                if parts:
                    self._run_parts(sampled, state, chunks)
                if steps.pads:
                    self._run_prompts(sampled)

    def _run_prompts(self, sampled: bool) -> None:
        """Run each of `prompt_shapes`, largest first, and record those without cached tokens that are not long."""
        steps, config = self.steps, self._config
        shapes = prompt_shapes(config.prompt_tokens_per_step, config.max_model_len)
        for tokens, cached in sorted(shapes, reverse=True):
            state = steps.mixed_state(1, tokens, sampled=sampled)
            chunks = self._padding(state, tokens, cached)
            if cached or tokens > config.captured_prompt_tokens:
                steps.uncaptured(sampled=sampled)(state, chunks)
            else:
                for _ in range(CALLS_TO_RECORD):
                    steps.whole(sampled=sampled, prompts=True)(state, chunks)

    def _padding(self, state: DecodeState, num_tokens: int = 0, num_cached: int = 0) -> PackedChunks:
        """A prompt of padding alone, of at least `num_tokens` tokens after `num_cached` ones."""
        chunk = PromptChunk(0, [0] * (num_cached + 2), num_cached, num_cached + 1)
        chunks = self._pack([chunk], state, num_tokens)
        chunks.bounds.zero_()
        return chunks

    def _run_parts(self, sampled: bool, state: DecodeState, *chunks: PackedChunks) -> None:
        """A step with logits read between its parts."""
        logits, output = self.steps.verify(state, *chunks)
        targets = self.steps.choose_targets(state, logits, None, sampled=sampled)
        if self._config.batch_invariant:  # it is compiled for both
            allowed = torch.ones_like(logits, dtype=torch.bool)
            self.steps.choose_targets(state, logits, allowed, sampled=sampled)
        self.steps.advance(targets, output, state, *chunks, sampled=sampled)

    def _pack(self, chunks: Sequence[PromptChunk], state: DecodeState, least: int = 0) -> PackedChunks:
        pads = self.steps.pads
        return PackedChunks.pack(
            chunks,
            state,
            page_size=self._config.page_size,
            pad=pads,
            most=self._config.prompt_tokens_per_step,
            longest=self._config.captured_prompt_tokens,
            least=least,
            kept=self._chunks if pads else None,
        )
