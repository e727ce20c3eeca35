"""The calls that steps are made of, and the states that they run on: compiled on first use, captured if they can be."""

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
"""So many steps with prompts beside rows that decode run eagerly, and all with prompts before. A batch that comes to an
idle engine needs no more, and waits for one compiled step instead of two."""

VERIFY = "verify"
"""The step's first half, where tokens are chosen on the host."""

StepCall = Callable[..., None]
"""A whole step, called with a state and, with prompts, their `PackedChunks`."""


class Steps:
    """The steps of one engine.

    Steps with prompts run eagerly until they are warmed up or `EAGER_MIXED_STEPS` have run, and always where no CUDA
    graph is recorded: compiling them would take longer than it saves. Where tokens are chosen on the host a step is a
    call for each half, and what chooses between them runs eagerly. With `batch_invariant` all of this is compiled, and
    from the first step on, since compiled code and eager code round differently.

    decoders: greedy (False) and sampled (True).
    pads: whether prompts are padded to a few sizes: each is captured.
    num_mixed: steps with rows that decode and prompts by now. warms_prompts: whether steps with prompts are warmed up.
    around: for debugging, what makes the call of each whole step, of it and of the decoder that does the same eagerly.
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
        """Whether steps with prompts are compiled by now."""
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
        """A step's first half, called like a whole one; what it returns is overwritten by the next replay."""
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
        """A decoder's method, compiled on its first call; `name` tells it from others."""
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
        """The state of the smallest bucket with so many rows, always the same one: graphs know its addresses.

        num_stop_ids: places for them in a row.
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
    # Uncaptured, they would save less than compiling takes. Recurrent layers take lengths on the host.
    return why_not_captured is None and not model.is_recurrent


def _why_not_captured(config: FittedConfig, device: torch.device) -> str | None:
    """Why no CUDA graph will be recorded; None where they will."""
    if not config.compile:
        return "compile=False"
    if not config.captures:
        return f"mode {config.mode or 'default'} has no CUDA graphs"
    return None if device.type == "cuda" else f"the device is {device}"
