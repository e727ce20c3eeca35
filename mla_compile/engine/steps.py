"""The calls of a step and the states that they run on: compiled on first use, and captured if possible."""

import threading
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
from mla_compile.packing import padded_prompt_tokens
from mla_compile.progress import announce_if_slow
from mla_compile.ranks import Ranks
from mla_compile.speculate import DecodeState, PackedChunks, ServedModel, SpeculativeDecoder
from mla_compile.torch_internals import (
    as_varying,
    compile_seconds,
    eager_until_compiled,
    settings_of_compiled_code,
    start_cpp_compiler,
    with_own_code,
)

EAGER_MIXED_STEPS = 16
"""Steps with prompts are compiled after this many steps that mix prompts and decode rows; until then they run eagerly.
A batch on an idle engine needs no more, and so waits for one compilation instead of two."""

EAGER_STEPS = 256
"""Steps of a kind that an engine with a background compiler runs before it compiles them: a few requests end sooner.
It counts and compiles apart for each setting of torch on which compiled code depends."""

VERIFY = "verify"
"""The name of a step's first part."""

StepCall = Callable[..., None]
"""A whole step, called with a state and, with prompts, their `PackedChunks`."""


class Steps:
    """The steps of one engine: a step has three parts, `verify`, `choose_targets` and `advance`.

    The parts are compiled apart, and steps share them. If CUDA graphs are recorded, a graph holds a whole step, or, in
    steps between whose parts the host reads logits, one part.

    The target's forward of steps with prompts runs eagerly until it is warmed up or `EAGER_MIXED_STEPS` have run, and
    always if no CUDA graphs are recorded: compiling it would take longer than it saves. On CPUs `choose_targets` runs
    eagerly. With `batch_invariant` all of this is compiled from the first step on, since compiled code and eager code
    round differently. So is the forward with `fp8_activations`, which eager code does not use.

    In float32 on a CPU, where compiled and eager steps choose the same tokens, a thread compiles steps while they run
    eagerly, unless `compile` is True: no request waits for a compilation. Processes that share a model compile on first
    use, as a step's collectives must run on all of them.

    decoders: greedy (False) and sampled (True).
    pads: whether prompts are padded to a few sizes, each of which is captured.
    captures: whether CUDA graphs are recorded.
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
        self.compiles_in_background = _compiles_in_background(model, config, ranks)
        self._num_steps = Counter[tuple[object, ...]]()  # by kind and settings of torch
        self._jobs: list[threading.Thread] = []
        self.pads = _compiles_mixed(model, why_not)
        self.around: Callable[[StepCall, SpeculativeDecoder], StepCall] | None = None
        self.num_mixed, self.warms_prompts = 0, False
        self.captures = why_not is None
        self._steps = {sampled: partial(self._step, sampled) for sampled in decoders}
        self._captures = Captures(config, model.device, why_not, ranks)
        self.sizes, self.check_again = self._captures.sizes, self._captures.check_again
        self._measured: dict[str, Callable[..., Any]] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._calls: dict[str, Callable[..., Any]] = {}
        self._states: dict[tuple[int, bool], DecodeState] = {}

    def report(self) -> CaptureReport:
        return self._captures.report()

    @property
    def compiles_prompts(self) -> bool:
        """Whether steps with prompts are compiled now."""
        pays = self.pads and (self.warms_prompts or self.num_mixed > EAGER_MIXED_STEPS)
        return pays or self._config.batch_invariant or self._config.fp8_activations

    def whole(self, *, sampled: bool, prompts: bool) -> StepCall:
        """A step without the host between its parts."""
        step: StepCall = self._capturing(_kind(sampled), self._steps[sampled], prompts=prompts)
        return step if self.around is None else self.around(step, self._decoders[sampled])

    def uncaptured(self, *, sampled: bool) -> StepCall:
        """`whole` without CUDA graphs."""
        return self._steps[sampled]

    def _step(self, sampled: bool, state: DecodeState, packed: PackedChunks | None = None) -> None:
        logits, output = self._verify(state, packed)
        targets = self.choose_targets(state, logits, None, sampled=sampled)
        self._advance(sampled, state, targets, _begins(state, packed), output.hidden, *output.aux)

    def verify(self, state: DecodeState, packed: PackedChunks | None = None) -> tuple[Tensor, ForwardOutput]:
        """See `SpeculativeDecoder.verify`; one graph serves both kinds, and its next replay overwrites the result."""
        call = self._capturing(VERIFY, self._verify, prompts=packed is not None)
        found: tuple[Tensor, ForwardOutput] = call(self.state_for(len(state.active), sampled=False), packed)
        return found

    def _verify(self, state: DecodeState, packed: PackedChunks | None) -> tuple[Tensor, ForwardOutput]:
        method, state = self._decoders[False].verify, state.without_counts
        if packed is None:
            logits, output = self._call(VERIFY, method)(state)
        else:
            call = self._call(f"mixed, {VERIFY}", method) if self.compiles_prompts else method
            logits, output = call(state, packed)
        return logits, output

    def choose_targets(
        self, state: DecodeState, logits: Tensor, allowed: Tensor | None, *, sampled: bool
    ) -> Tensor:
        """See `SpeculativeDecoder.choose_targets`. Rank 0 may call it alone."""
        call: Callable[..., Tensor] = self._decoders[sampled].choose_targets
        if self._config.batch_invariant or (allowed is None and not logits.is_cpu):
            call = self._call(f"choose, {_kind(sampled)}", call)
            logits, allowed = as_varying(logits), None if allowed is None else as_varying(allowed)
        return call(state, logits, allowed)

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
        call = self._capturing(f"advance, {_kind(sampled)}", partial(self._advance, sampled))
        call(state, targets, _begins(state, packed), output.hidden, *output.aux)

    def _advance(
        self, sampled: bool, state: DecodeState, targets: Tensor, begins: Tensor, *output: Tensor
    ) -> None:
        call = self._call(f"advance, {_kind(sampled)}", self._decoders[sampled].advance)
        given: tuple[Tensor, ...] = targets, begins, *output
        if self._config.compile is not False:
            given = tuple(map(as_varying, given))
        targets, begins, hidden, *aux = given
        call(state, targets, ForwardOutput(hidden, tuple(aux)), begins)
        if self.compiles_in_background:
            kind = sampled, *settings_of_compiled_code()
            self._num_steps[kind] += 1
            if self._num_steps[kind] == EAGER_STEPS:
                job = partial(self.compile_parts, sampled, inference=torch.is_inference_mode_enabled())
                thread = run_in_background(f"compiling the {_kind(sampled)} step", job)
                self._jobs += [] if thread is None else [thread]

    def wait_for_jobs(self) -> None:
        """Wait until the background thread has compiled what it was given."""
        for thread in self._jobs:
            thread.join()
        self._jobs.clear()

    def compile_parts(self, sampled: bool, *, inference: bool) -> None:
        """Compile the parts of a step that run eagerly until then, on rows of their own, which write to no cache.

        The time counts for the largest bucket. inference: whether steps run in inference mode, on which compiled code
        depends.
        """
        bucket = self._captures.bucket(_kind(sampled), (self.sizes[-1], 0, 0, 0))
        bucket.why_not, before = self._captures.why_not, compile_seconds()
        state = self._allocate(2, sampled)
        with torch.inference_mode(inference), torch.no_grad():
            logits, output = self._compiled[VERIFY](state.without_counts)
            targets, begins = self._decoders[sampled].choose_targets(state, logits), _begins(state, None)
            compiled = self._compiled[f"advance, {_kind(sampled)}"]
            compiled(state, as_varying(targets), output.map(as_varying), as_varying(begins))
        bucket.compile_seconds += compile_seconds() - before

    def _call(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A decoder's method, compiled on its first call or in the background; `name` identifies it."""
        if self._config.compile is False:
            return method
        if name not in self._calls:
            own, options = with_own_code(method), self._config.compile_options
            compiled = torch.compile(own, backend="mla", fullgraph=True, options=options)
            self._compiled[name] = compiled
            background = self.compiles_in_background
            first = eager_until_compiled(compiled) if background else partial(self._compile, name, compiled)
            self._calls[name] = first
        return self._calls[name]

    def _compile(self, name: str, compiled: Callable[..., Any], *args: Any) -> Any:
        """The first call of compiled code."""
        if self._model.device.type == "cpu":
            start_cpp_compiler()  # while Dynamo traces
        kind = f"{name}, drafts: {self._k}"
        with announce_if_slow(f"compiling the step ({kind}), up to a minute if it is new to this machine"):
            result = compiled(*args)
        self._calls[name] = compiled
        return result

    def _capturing(self, name: str, call: Callable[..., Any], *, prompts: bool = False) -> Callable[..., Any]:
        """See `Captures.measured`; `name` identifies the call, which is wrapped once. prompts: whether it runs some."""
        if self._config.compile is False or self.compiles_in_background:
            return call
        if prompts and not self.compiles_prompts:  # it is eager for now
            return call
        name = f"mixed, {name}" if prompts else name
        if name not in self._measured:
            self._measured[name] = self._captures.measured(name, call)
        return self._measured[name]

    def state_for(self, count: int, *, sampled: bool) -> DecodeState:
        """The state of the smallest bucket with at least `count` rows; each bucket keeps its one, as graphs do.

        All of them are in the memory of the largest, so a row of one state is the same row of the others.
        """
        rows = next(size for size in self.sizes if size >= count)
        if (rows, sampled) not in self._states:
            most = self.sizes[-1]
            if rows < most:
                state = self.state_for(most, sampled=sampled).first(rows)
            elif sampled:
                state = self.state_for(most, sampled=False).with_counts(self._model.vocab_size)
            else:
                state = self._allocate(rows, sampled)
            self._states[rows, sampled] = state
        return self._states[rows, sampled]

    def mixed_state(self, count: int, prompt_tokens: int, *, sampled: bool) -> DecodeState:
        """The state of a step with prompts beside `count` rows.

        A graph serves one number of rows, so steps beside few rows use one state: the largest whose tokens are at most
        an eighth of the padded prompts'.
        """
        longest = self._config.captured_prompt_tokens
        tokens = padded_prompt_tokens(prompt_tokens, self._config.prompt_tokens_per_step, longest)
        if self.pads and self.compiles_prompts and tokens <= longest:
            count = max([count, *(size for size in self.sizes if size * (1 + self._k) <= tokens // 8)])
        return self.state_for(count, sampled=sampled)

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
            compiled=config.compile is not False,
        )


def _begins(state: DecodeState, packed: PackedChunks | None) -> Tensor:
    """The rows whose prompts end in this step, bool `[rows]`."""
    return torch.zeros_like(state.active) if packed is None else packed.begins


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
