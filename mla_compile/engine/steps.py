"""The calls of a step and the states that they run on: compiled on first use, and captured if possible."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mla_compile.batch import ForwardOutput
from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.capture import Captures
from mla_compile.engine.config import FittedConfig
from mla_compile.engine.variants import Variant
from mla_compile.ranks import Ranks
from mla_compile.speculate import DecodeState, PackedChunks, ServedModel, SpeculativeDecoder
from mla_compile.torch_internals import mark_varying, with_own_code

EAGER_MIXED_STEPS = 16
"""Steps with prompts are compiled after this many steps that mix prompts and decode rows; until then they run eagerly.
A batch on an idle engine needs no more, and so waits for one compilation instead of two."""

VERIFY = "verify"
"""The name of a step's first half, if the host chooses tokens."""

StepCall = Callable[..., None]
"""A whole step, called with a state and, with prompts, their `PackedChunks`."""


class Steps:
    """The steps of one engine.

    Steps with prompts run eagerly until they are warmed up or `EAGER_MIXED_STEPS` have run, and always if no CUDA
    graphs are recorded: compiling them would take longer than it saves. If the host chooses tokens, each half of a step
    is one call, and choosing between them runs eagerly. With `batch_invariant` all of this is compiled from the first
    step on, since compiled code and eager code round differently.

    decoders: greedy (False) and sampled (True).
    pads: whether prompts are padded to a few sizes, each of which is captured.
    num_mixed: steps with decode rows and prompts so far. warms_prompts: whether steps with prompts are warmed up.
    around: for debugging, wraps the call of each whole step; it gets the call and its decoder, which runs it eagerly.
    """

    def __init__(
        self,
        model: ServedModel,
        config: FittedConfig,
        decoders: Mapping[bool, SpeculativeDecoder],
        ranks: Ranks | None,
    ) -> None:
        self._model, self._config, self._decoders = model, config, decoders
        self._k = config.num_speculative_tokens
        why_not = _why_not_captured(config, model.device)
        self.pads = _compiles_mixed(model, why_not)
        self.around: Callable[[StepCall, SpeculativeDecoder], StepCall] | None = None
        self.num_mixed, self.warms_prompts = 0, False
        self._captures = Captures(config, model.device, why_not, ranks)
        self.sizes, self.check_again = self._captures.sizes, self._captures.check_again
        self._calls: dict[tuple[str, bool], Callable[..., Any]] = {}
        self._states: dict[tuple[int, int, bool, int | None], DecodeState] = {}

    def report(self) -> CaptureReport:
        return self._captures.report()

    @property
    def compiles_prompts(self) -> bool:
        """Whether steps with prompts are compiled now."""
        pays = self.pads and (self.warms_prompts or self.num_mixed > EAGER_MIXED_STEPS)
        return pays or self._config.batch_invariant

    def whole(self, variant: Variant, *, prompts: bool) -> StepCall:
        """A step that chooses its own tokens."""
        decoder = self._decoders[variant.sampled]
        step: StepCall = (
            self._call(f"mixed, {variant.name}", decoder.mixed, compile=self.compiles_prompts)
            if prompts
            else self._call(variant.name, decoder.forward)
        )
        return step if self.around is None else self.around(step, decoder)

    def verify(self, variant: Variant, *, prompts: bool) -> Callable[..., tuple[Tensor, ForwardOutput]]:
        """A step's first half, called like a whole one; the next replay overwrites what it returns."""
        method = self._decoders[variant.sampled].verify
        if prompts:
            return self._call(f"mixed, {VERIFY}", method, compile=self.compiles_prompts)
        return self._call(VERIFY, method)

    def choose_targets(
        self, variant: Variant, state: DecodeState, logits: Tensor, allowed: Tensor | None
    ) -> Tensor:
        """Between the halves: see `SpeculativeDecoder.choose_targets`. Rank 0 may call it alone."""
        method = self._decoders[variant.sampled].choose_targets
        if not self._config.batch_invariant:
            return method(state, logits, allowed)
        logits = logits.clone()
        for given in (logits, allowed):
            if given is not None:
                mark_varying(given)
        chosen: Tensor = self._call(f"choose, {variant.name}", method, captured=False)(state, logits, allowed)
        return chosen

    def advance(
        self,
        variant: Variant,
        targets: Tensor,
        output: ForwardOutput,
        state: DecodeState,
        packed: PackedChunks | None = None,
    ) -> None:
        """A step's second half: see `SpeculativeDecoder.advance`."""
        output = output.map(torch.clone)
        begins = torch.zeros_like(state.active) if packed is None else packed.begins
        for given in (targets, output.hidden, *output.aux, begins):
            mark_varying(given)
        self._call(f"advance, {variant.name}", self._decoders[variant.sampled].advance)(
            state, targets, output, begins
        )

    def _call(
        self, name: str, method: Callable[..., Any], *, compile: bool = True, captured: bool = True
    ) -> Callable[..., Any]:
        """A decoder's method, compiled on its first call; `name` identifies it."""
        config, key = self._config, (name, compile)
        if key not in self._calls:
            call = method
            if config.compile and compile:
                compiled = torch.compile(
                    with_own_code(method), backend="mla", fullgraph=True, **config.compile_settings
                )
                call = (
                    self._captures.measured(name, compiled)
                    if captured
                    else self._captures.uncaptured(compiled)
                )
            self._calls[key] = call
        return self._calls[key]

    def state_for(self, count: int, variant: Variant, num_stop_ids: int) -> DecodeState:
        """The state of the smallest bucket with at least `count` rows, allocated once: graphs hold its addresses.

        num_stop_ids: places for stop ids per row.
        """
        rows = next(size for size in self.sizes if size >= count)
        num_logprobs = variant.num_logprobs
        if num_logprobs is not None:
            num_logprobs = min(num_logprobs, self._model.vocab_size)
        key = rows, num_stop_ids, variant.penalised, num_logprobs
        if key not in self._states:
            config = self._config
            has_history = self._k > 0 and config.drafter.needs_history
            self._states[key] = DecodeState.allocate(
                rows,
                self._k,
                max_pages=config.pages_per_row,
                num_stop_ids=num_stop_ids,
                penalised_vocab=self._model.vocab_size if variant.penalised else None,
                num_logprobs=num_logprobs,
                history_len=config.pages_per_row * config.page_size if has_history else None,
                device=self._model.device,
            )
        return self._states[key]


def _compiles_mixed(model: ServedModel, why_not_captured: str | None) -> bool:
    """Whether it pays to compile steps with prompts in them, and to pad their prompts to a few sizes."""
    # Uncaptured, they would save less time than compiling takes. Recurrent layers need lengths on the host.
    return why_not_captured is None and not model.is_recurrent


def _why_not_captured(config: FittedConfig, device: torch.device) -> str | None:
    """Why no CUDA graph will be recorded; None if graphs will be."""
    if not config.compile:
        return "compile=False"
    if not config.captures:
        return f"mode {config.mode or 'default'} has no CUDA graphs"
    return None if device.type == "cuda" else f"the device is {device}"
