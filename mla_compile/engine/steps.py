"""The calls of a step and the states that they run on: compiled on first use, and captured if possible."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_compile.batch import ForwardOutput
from mla_compile.engine.background import run_in_background
from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.capture import Captures
from mla_compile.engine.config import FittedConfig
from mla_compile.ranks import Ranks
from mla_compile.speculate import DecodeState, PackedChunks, ServedModel, SpeculativeDecoder
from mla_compile.torch_internals import eager_until_compiled, mark_varying, with_own_code

EAGER_MIXED_STEPS = 16
"""Steps with prompts are compiled after this many steps that mix prompts and decode rows; until then they run eagerly.
A batch on an idle engine needs no more, and so waits for one compilation instead of two."""

EAGER_STEPS = 256
"""Steps of a kind that an engine with a background compiler runs before it compiles them: a few requests end sooner."""

VERIFY = "verify"
"""The name of a step's first part."""

StepCall = Callable[..., None]
"""A whole step, called with a state and, with prompts, their `PackedChunks`."""


class Steps:
    """The steps of one engine: a step has three parts, `verify`, `choose_targets` and `advance`.

    If CUDA graphs are recorded, the three are compiled and captured as one call, except in steps between whose parts
    the host reads logits. Otherwise `verify` and `advance` are compiled apart, and all steps share them.

    Steps with prompts run eagerly until they are warmed up or `EAGER_MIXED_STEPS` have run, and always if no CUDA
    graphs are recorded: compiling them would take longer than it saves. `choose_targets` runs eagerly outside of whole
    captured steps. With `batch_invariant` all of this is compiled from the first step on, since compiled code and eager
    code round differently.

    In float32 on a CPU, where compiled and eager steps choose the same tokens, a thread compiles steps while they run
    eagerly, unless `compile` is True: no request waits for a compilation. Processes that share a model compile on first
    use, as a step's collectives must run on all of them.

    decoders: greedy (False) and sampled (True).
    pads: whether prompts are padded to a few sizes, each of which is captured.
    compiles_in_background: whether steps run eagerly until a thread has compiled them.
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
        self._is_captured = why_not is None
        self.compiles_in_background = _compiles_in_background(model, config, ranks)
        self._num_steps = Counter[bool]()
        self.pads = _compiles_mixed(model, why_not)
        self.around: Callable[[StepCall, SpeculativeDecoder], StepCall] | None = None
        self.num_mixed, self.warms_prompts = 0, False
        self._captures = Captures(config, model.device, why_not, ranks)
        self.sizes, self.check_again = self._captures.sizes, self._captures.check_again
        self._calls: dict[tuple[str, bool], Callable[..., Any]] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._states: dict[tuple[int, bool], DecodeState] = {}

    def report(self) -> CaptureReport:
        return self._captures.report()

    @property
    def compiles_prompts(self) -> bool:
        """Whether steps with prompts are compiled now."""
        pays = self.pads and (self.warms_prompts or self.num_mixed > EAGER_MIXED_STEPS)
        return pays or self._config.batch_invariant

    def whole(self, *, sampled: bool, prompts: bool) -> StepCall:
        """A step without the host between its parts."""
        decoder = self._decoders[sampled]
        if not self._is_captured:
            step: StepCall = partial(self._in_parts, sampled)
        elif prompts:
            step = self._call(f"mixed, {_kind(sampled)}", decoder.mixed, compile=self.compiles_prompts)
        else:
            step = self._call(_kind(sampled), decoder.forward)
        return step if self.around is None else self.around(step, decoder)

    def _in_parts(self, sampled: bool, state: DecodeState, packed: PackedChunks | None = None) -> None:
        logits, output = self.verify(state, packed)
        targets = self.choose_targets(state, logits, None, sampled=sampled)
        self.advance(targets, output, state, packed, sampled=sampled)

    def verify(self, state: DecodeState, packed: PackedChunks | None = None) -> tuple[Tensor, ForwardOutput]:
        """See `SpeculativeDecoder.verify`; the next replay overwrites what it returns."""
        method, state = self._decoders[False].verify, state.without_counts
        if packed is None:
            logits, output = self._call(VERIFY, method)(state)
        else:
            logits, output = self._call(f"mixed, {VERIFY}", method, compile=self.compiles_prompts)(
                state, packed
            )
        return logits, output

    def choose_targets(
        self, state: DecodeState, logits: Tensor, allowed: Tensor | None, *, sampled: bool
    ) -> Tensor:
        """See `SpeculativeDecoder.choose_targets`. Rank 0 may call it alone."""
        method = self._decoders[sampled].choose_targets
        if not self._config.batch_invariant:
            return method(state, logits, allowed)
        logits = logits.clone()
        for given in (logits, allowed):
            if given is not None:
                mark_varying(given)
        chosen: Tensor = self._call(f"choose, {_kind(sampled)}", method, captured=False)(
            state, logits, allowed
        )
        return chosen

    def advance(
        self,
        targets: Tensor,
        output: ForwardOutput,
        state: DecodeState,
        packed: PackedChunks | None = None,
        *,
        sampled: bool,
    ) -> None:
        """See `SpeculativeDecoder.advance`."""
        begins = torch.zeros_like(state.active) if packed is None else packed.begins
        call = self._call(f"advance, {_kind(sampled)}", self._decoders[sampled].advance)
        call(state, *_for_advance(targets, output, begins))
        self._num_steps[sampled] += 1
        if self.compiles_in_background and self._num_steps[sampled] == EAGER_STEPS:
            what = f"compiling the {_kind(sampled)} step"
            job = partial(self.compile_parts, sampled, inference=torch.is_inference_mode_enabled())
            run_in_background(what, job)

    def compile_parts(self, sampled: bool, *, inference: bool) -> None:
        """Compile the parts of a step that run eagerly until then, on rows of their own, which write to no cache.

        inference: whether steps run in inference mode, on which compiled code depends.
        """
        state = self._allocate(2, sampled)
        with torch.inference_mode(inference), torch.no_grad():
            logits, output = self._compiled[VERIFY](state.without_counts)
            targets = self._decoders[sampled].choose_targets(state, logits)
            given = _for_advance(targets, output, torch.zeros_like(state.active))
            self._compiled[f"advance, {_kind(sampled)}"](state, *given)

    def _call(
        self, name: str, method: Callable[..., Any], *, compile: bool = True, captured: bool = True
    ) -> Callable[..., Any]:
        """A decoder's method, compiled on its first call or in the background; `name` identifies it."""
        config, key = self._config, (name, compile)
        if key not in self._calls:
            call = method
            if config.compile is not False and compile:
                compiled = torch.compile(
                    with_own_code(method), backend="mla", fullgraph=True, **config.compile_settings
                )
                self._compiled[name] = compiled
                if self.compiles_in_background:
                    call = eager_until_compiled(compiled)
                elif captured:
                    call = self._captures.measured(name, compiled)
                else:
                    call = self._captures.uncaptured(compiled)
            self._calls[key] = call
        return self._calls[key]

    def state_for(self, count: int, *, sampled: bool) -> DecodeState:
        """The state of the smallest bucket with at least `count` rows, allocated once: graphs hold its addresses."""
        key = next(size for size in self.sizes if size >= count), sampled
        if key not in self._states:
            self._states[key] = self._allocate(*key)
        return self._states[key]

    def _allocate(self, rows: int, sampled: bool) -> DecodeState:
        config = self._config
        has_history = self._k > 0 and config.drafter.needs_history
        return DecodeState.allocate(
            rows,
            self._k,
            max_pages=config.pages_per_row,
            penalised_vocab=self._model.vocab_size if sampled else None,
            history_len=config.pages_per_row * config.page_size if has_history else None,
            device=self._model.device,
        )


def _for_advance(
    targets: Tensor, output: ForwardOutput, begins: Tensor
) -> tuple[Tensor, ForwardOutput, Tensor]:
    """The arguments of a compiled `advance` besides the state; the output as a copy, which a replay may overwrite."""
    output = output.map(torch.clone)
    for given in (targets, output.hidden, *output.aux, begins):
        mark_varying(given)
    return targets, output, begins


def _kind(sampled: bool) -> str:
    return "sampled" if sampled else "greedy"


def _compiles_mixed(model: ServedModel, why_not_captured: str | None) -> bool:
    """Whether it pays to compile steps with prompts in them, and to pad their prompts to a few sizes."""
    # Uncaptured, they would save less time than compiling takes. Recurrent layers need lengths on the host.
    return why_not_captured is None and not model.is_recurrent


def _compiles_in_background(model: ServedModel, config: FittedConfig, ranks: Ranks | None) -> bool:
    can = (
        config.compile is None and not config.batch_invariant and ranks is None and model.device.type == "cpu"
    )
    return can and all(spec.dtype == torch.float32 for spec in model.cache_specs())


def _why_not_captured(config: FittedConfig, device: torch.device) -> str | None:
    """Why no CUDA graph will be recorded; None if graphs will be."""
    if config.compile is False:
        return "compile=False"
    if not config.captures:
        return f"mode {config.mode or 'default'} has no CUDA graphs"
    return None if device.type == "cuda" else f"the device is {device}"
