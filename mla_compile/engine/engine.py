"""Generation for a batch of prompts that start together: prefill, then speculative steps until every row has ended."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_compile.backend import resolve_settings
from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.capture import CALLS_TO_RECORD, Captures
from mla_compile.engine.completion import Completion
from mla_compile.engine.grammar import Grammar, GrammarMasks, grammar_per_prompt
from mla_compile.engine.prefill import prefill_prompts
from mla_compile.engine.reports import ReportReader
from mla_compile.engine.variants import Variant
from mla_compile.errors import MLAError
from mla_compile.ops.backends import DecodeCall, describe_device, select_backend
from mla_compile.speculate import (
    DecodeState,
    SamplingParams,
    ServedModel,
    SpeculativeDecoder,
    Step,
    shadow_check,
)
from mla_compile.torch_internals import mark_rows, with_own_code

VERIFY = "verify"
"""The step's first half, where tokens are chosen on the host."""


class TokenChooser(Protocol):
    """Chooses tokens on the host, from logits: what cannot be compiled into the step."""

    def __call__(self, logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
        """The target's token at every position of a step.

        Args:
            logits: `[rows, n, vocab_size]`, of the rows that have a prompt: position j follows the completion's tokens
                and the row's first j drafts.
            drafts: int64 `[rows, n - 1]`.
            completions: what each row has emitted; a finished one's logits mean nothing, and its token is ignored.

        Returns:
            int64 `[rows, n]`. Drafts are accepted as long as they agree with it.
        """


class Engine:
    """Runs one model on batches of up to `max_rows` prompts.

    Args:
        model: its caches are allocated here, `max_rows` rows of `max_model_len` tokens and the dummy page 0; they serve
            one engine at a time, the newest.
        num_speculative_tokens: drafts per step, k >= 0; k > 0 needs a model with an MTP layer.
        max_rows: rows that decode at once; longer lists of prompts run in several waves.
        max_model_len: tokens of a row at most, prompt included.
        page_size: tokens per cache page.
        compile: False runs everything eagerly.
        mode: the mode of `torch.compile` for steps; "reduce-overhead" replays one CUDA graph per step.
        shadow_check_every: for debugging: every so many steps, compare one with its eager run (see `shadow_check`).
        decode_backend: the decode backend of steps, compiled or not; None takes the fastest. One that this device or
            `compile` rules out is refused here, one that the model's sizes rule out when a step is compiled or run.
        capture_budget: bytes of device memory for CUDA graphs. Once they hold so many, no further number of rows is
            recorded: its batches are padded to a larger recorded one, or run uncaptured where there is none. 0 captures
            nothing. None for no limit: there are few numbers of rows, as they double, and graphs share their memory.

    Raises:
        MLAError: a bad argument, named.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        num_speculative_tokens: int = 0,
        max_rows: int = 8,
        max_model_len: int = 2048,
        page_size: int = 16,
        compile: bool = True,
        mode: str | None = "reduce-overhead",
        shadow_check_every: int | None = None,
        decode_backend: str | None = None,
        capture_budget: int | None = None,
    ) -> None:
        sizes = {"max_rows": max_rows, "max_model_len": max_model_len, "page_size": page_size}
        if shadow_check_every is not None:
            sizes["shadow_check_every"] = shadow_check_every
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise MLAError(name, "an integer >= 1", value)
        if capture_budget is not None and (type(capture_budget) is not int or capture_budget < 0):
            raise MLAError("capture_budget", "an integer >= 0, in bytes, or None", repr(capture_budget))
        if num_speculative_tokens > 0 and not model.has_mtp:
            mend = "set it to 0 or load a checkpoint with an MTP layer"
            expected = "0 for a model without MTP layers"
            raise MLAError("num_speculative_tokens", expected, num_speculative_tokens, mend)
        device = describe_device(model.device)  # what else a backend may lack shows when the model runs
        select_backend(DecodeCall(*device, captured=compile), decode_backend, "decode_backend")
        why_not = _why_not_captured(
            compile, mode, model.device
        )  # and an unknown mode is refused before any step
        self.model = model
        self.k = num_speculative_tokens
        self.max_rows, self.max_model_len, self.page_size = max_rows, max_model_len, page_size
        self.pages_per_row = -(-max_model_len // page_size)
        self.device = model.device
        self._decoders = {
            sampled: SpeculativeDecoder(
                model, self.k, page_size=page_size, sampled=sampled, decode_backend=decode_backend
            )
            for sampled in (False, True)
        }

        self._captures = Captures(
            max_rows, self.k + 1, device=self.device, budget=capture_budget, why_not=why_not
        )

        self._compile, self._mode, self._shadow_check_every = compile, mode, shadow_check_every
        self._steps: dict[Variant, Step] = {}
        # The halves serve where tokens are chosen on the host.
        self._verify = self._compiled(VERIFY, self._decoders[False].verify)
        self._advance: dict[Variant, Callable[..., Any]] = {}
        with torch.inference_mode(False):  # an inference tensor could not be changed outside that mode
            model.allocate_cache(1 + max_rows * self.pages_per_row, page_size)
        self._caches = model.caches()
        self._num_started = 0
        self._states: dict[tuple[int, int, bool, int | None], DecodeState] = {}

    def _compiled(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, which is traced on its first call."""
        if not self._compile:
            return method
        step = torch.compile(with_own_code(method), backend="mla", mode=self._mode, fullgraph=True)
        return self._captures.measured(name, step)

    def _step(self, variant: Variant) -> Step:
        if variant not in self._steps:
            step: Step = self._compiled(variant.name, self._decoders[variant.sampled].forward)
            if self._shadow_check_every is not None:
                step = shadow_check(step, every=self._shadow_check_every)
            self._steps[variant] = step
        return self._steps[variant]

    def _advance_of(self, variant: Variant) -> Callable[..., Any]:
        if variant not in self._advance:
            name = f"advance, {variant.name}"
            self._advance[variant] = self._compiled(name, self._decoders[variant.sampled].advance)
        return self._advance[variant]

    def warm_up(
        self, *, sampling: SamplingParams | None = None, stop_ids: Sequence[int] = ()
    ) -> CaptureReport:
        """Compile the step for this kind of sampling and number of stop ids, and record it for all numbers of rows.

        A kind is: greedy or not; with penalties or not; no log-probabilities, up to 5, or up to 20.

        Largest first: the smaller graphs then find room in its memory. The rows are inactive ones: they read no cache
        and write none. A stream that is under way must start again.
        """
        self._check_caches()
        self._num_started += 1
        variant, width = Variant.of([sampling or SamplingParams()]), _stop_id_places(stop_ids)
        for size in reversed(self._captures.sizes):
            rows = self._captures.rows_for(variant.name, size, width)
            state = self._state(rows, width, variant)
            state.active.zero_()
            for _ in range(CALLS_TO_RECORD):
                self._step(variant)(state)
        return self.capture_report()

    def capture_report(self) -> CaptureReport:
        """Which numbers of rows were compiled and captured by now, in what time and memory, and why others were not."""
        return self._captures.report()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop_ids: Sequence[int] = (),
        grammars: Grammar | Sequence[Grammar | None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt; see `stream`."""
        stream = self.stream(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids, grammars=grammars
        )
        last = deque(stream, maxlen=1)
        return last[0] if last else []

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop_ids: Sequence[int] = (),
        grammars: Grammar | Sequence[Grammar | None] | None = None,
        choose: TokenChooser | None = None,
    ) -> Iterator[list[Completion]]:
        """Yield the completions of all prompts, in their order, each time some of them have grown.

        Args:
            prompts: token ids of each prompt, at least one each.
            max_new_tokens: at most so many tokens a prompt, >= 1; a row also ends at `max_model_len`.
            sampling: for all prompts, or one for each; greedy by default.
            stop_ids: a row ends with the first of these that it emits.
            grammars: what completions may say, for all prompts, or one for each; None for a free one, whose tokens are
                those it has without grammars beside it. A complete text is followed by a stop id. Of a grammar's row
                `sampling` chooses among the tokens allowed; penalties come before that, and log-probabilities are of
                all tokens. A row whose grammar allows none ends with finish_reason "error", and the others go on.
                Prompts that run beside one with a grammar are as slow as with `choose`.
            choose: picks the tokens on the host, between the two halves of a step; `sampling` is then for the drafts
                only. Slower: the host waits for every step.

        An engine runs one stream at a time. The list yielded is the same one each time, its completions growing.

        Raises:
            MLAError: a bad argument or prompt, named, before anything runs; later, that another stream or engine has
                taken over the model's caches.
        """
        for name, given in {"choose": choose, "grammars": grammars}.items():
            if given is not None and self._shadow_check_every is not None:
                raise MLAError(name, "None in an engine with shadow_check_every", type(given).__name__)
        if choose is not None and grammars is not None:
            raise MLAError("choose", "None where there are grammars", type(choose).__name__)
        if max_new_tokens < 1:
            raise MLAError("max_new_tokens", "an integer >= 1", max_new_tokens)
        for i, prompt in enumerate(prompts):
            self._check_prompt(f"prompts[{i}]", prompt)
        for token in stop_ids:
            if type(token) is not int:
                raise MLAError("stop_ids", "integers", repr(token))
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise MLAError("sampling", f"one entry per prompt ({len(prompts)})", len(sampling))
        if choose is not None and any(params.logprobs is not None for params in sampling):
            raise MLAError("logprobs", "None where `choose` picks the tokens", "a number")
        per_prompt = grammar_per_prompt(
            grammars, count=len(prompts), vocab_size=self.model.vocab_size, stop_ids=stop_ids
        )
        return self._waves(prompts, max_new_tokens, sampling, stop_ids, per_prompt, choose)

    def _check_prompt(self, name: str, prompt: object) -> None:
        vocab_size = self.model.vocab_size
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            raise MLAError(name, "a list of token ids", type(prompt).__name__)
        if not prompt:
            raise MLAError(name, "at least one token", "an empty prompt")
        if len(prompt) >= self.max_model_len:
            expected = f"fewer than max_model_len = {self.max_model_len} tokens"
            raise MLAError(name, expected, len(prompt), "shorten the prompt or raise max_model_len")
        for token in prompt:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise MLAError(name, f"token ids in [0, {vocab_size})", repr(token))

    def _waves(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
        grammars: Sequence[Grammar | None],
        choose: TokenChooser | None,
    ) -> Iterator[list[Completion]]:
        completions = [Completion() for _ in prompts]
        for start in range(0, len(prompts), self.max_rows):
            wave = slice(start, start + self.max_rows)
            mine = completions[wave]
            asked = prompts[wave], max_new_tokens, sampling[wave], stop_ids
            masks = None
            if choose is not None:
                step, state = self._start_choosing(choose, mine, *asked)
            elif any(grammars[wave]):
                masks = GrammarMasks(
                    grammars[wave], mine, stop_ids, vocab_size=self.model.vocab_size, first=start
                )
                step, state = self._start_masked(masks, *asked)
            else:
                step, state = self.start(*asked)
            reader = ReportReader(state, [params.logprobs for params in sampling[wave]])
            for _ in self._run(
                step, state, mine, stop_ids, reader, masks, lag=choose is None and masks is None
            ):
                yield completions

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
    ) -> tuple[Step, DecodeState]:
        """Prefill up to `max_rows` prompts, sample their first tokens (in `state.report`) and draft behind them.

        Returns the step and the state to call it with, for loops that are not `stream`'s.
        """
        decoder, state, hidden = self._prefill(prompts, max_new_tokens, sampling, stop_ids)
        decoder.start(state, hidden)
        return self._step(Variant.of(sampling)), state

    def _start_choosing(
        self,
        choose: TokenChooser,
        completions: Sequence[Completion],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
    ) -> tuple[Step, DecodeState]:
        """`start` with tokens that `choose` picks on the host, the first ones and those of the steps."""
        decoder, state, hidden = self._prefill(prompts, max_new_tokens, sampling, stop_ids, step=VERIFY)
        count = len(prompts)

        def chosen(logits: Tensor, drafts: Tensor) -> Tensor:
            tokens = choose(logits[:count], drafts[:count], completions)
            return torch.nn.functional.pad(tokens, (0, 0, 0, logits.shape[0] - count))

        with torch.no_grad():
            first = chosen(self.model.logits(hidden)[:, None], state.drafts[:, :0])
        decoder.begin(state, first, hidden)
        step = self._in_halves(Variant.of(sampling), lambda state, logits: chosen(logits, state.drafts))
        return step, state

    def _start_masked(
        self,
        masks: GrammarMasks,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
    ) -> tuple[Step, DecodeState]:
        """`start` with tokens among those that `masks` allows, the first ones and those of the steps."""
        decoder, state, hidden = self._prefill(prompts, max_new_tokens, sampling, stop_ids, step=VERIFY)

        def chosen(state: DecodeState, logits: Tensor) -> Tensor:
            return decoder.choose_targets(state, logits, masks.allowed(state.drafts))

        decoder.start(state, hidden, masks.allowed(state.drafts[:, :0]))
        return self._in_halves(Variant.of(sampling), chosen), state

    def _in_halves(self, variant: Variant, choose: Callable[[DecodeState, Tensor], Tensor]) -> Step:
        """A step whose tokens `choose(state, logits)` picks between its halves."""
        advance = self._advance_of(variant)

        def step(state: DecodeState) -> None:
            logits, hidden = self._verify(state)
            targets = choose(state, logits)
            hidden = hidden.clone()  # the next replay overwrites what this one returned
            for given in (targets, hidden):
                mark_rows(given)
            advance(state, targets, hidden)

        return step

    def _prefill(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
        step: str | None = None,
    ) -> tuple[SpeculativeDecoder, DecodeState, Tensor]:
        """The decoder, its state after the prompts, and the hidden states of their last tokens.

        step: the name of what runs on the state next; by default the decoder's whole step.
        """
        self._check_caches()
        self._num_started += 1
        variant, width = Variant.of(sampling), _stop_id_places(stop_ids)
        decoder = self._decoders[variant.sampled]
        rows = self._captures.rows_for(step or variant.name, len(prompts), width)
        state = self._state(rows, width, variant)
        self._fill(state, prompts, max_new_tokens, sampling, stop_ids)
        return decoder, state, prefill_prompts(decoder, prompts, state)

    def _state(self, rows: int, num_stop_ids: int, variant: Variant) -> DecodeState:
        """The state of a bucket, always the same one: captured graphs know its addresses."""
        num_logprobs = variant.num_logprobs
        if num_logprobs is not None:
            num_logprobs = min(num_logprobs, self.model.vocab_size)
        key = rows, num_stop_ids, variant.penalised, num_logprobs
        if key not in self._states:
            self._states[key] = DecodeState.allocate(
                rows,
                self.k,
                max_pages=self.pages_per_row,
                num_stop_ids=num_stop_ids,
                penalised_vocab=self.model.vocab_size if variant.penalised else None,
                num_logprobs=num_logprobs,
                device=self.device,
            )
        return self._states[key]

    def _fill(
        self,
        state: DecodeState,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
    ) -> None:
        """Write the prompts' rows, and inactive ones after them, in place."""
        count, (rows, width) = len(prompts), state.stop_ids.shape

        def fill(tensor: Tensor, values: Sequence[float], padding: float) -> None:
            tensor.copy_(torch.tensor([*values, *[padding] * (rows - count)], dtype=tensor.dtype))

        fill(state.num_cached, [len(prompt) for prompt in prompts], 0)
        fill(state.active, [True] * count, False)
        fill(state.max_len, [min(len(p) + max_new_tokens, self.max_model_len) for p in prompts], 0)
        fill(state.seed, [params.seed for params in sampling], 0)
        fill(state.temperature, [params.temperature for params in sampling], 0)
        fill(state.top_k, [params.top_k for params in sampling], 0)
        fill(state.top_p, [params.top_p for params in sampling], 1)
        fill(state.min_p, [params.min_p for params in sampling], 0)
        fill(state.repetition_penalty, [params.repetition_penalty for params in sampling], 1)
        fill(state.presence_penalty, [params.presence_penalty for params in sampling], 0)
        fill(state.frequency_penalty, [params.frequency_penalty for params in sampling], 0)
        if state.in_prompt is not None and state.num_emitted is not None:
            state.num_emitted.zero_()
            pairs = [(row, token) for row, prompt in enumerate(prompts) for token in prompt]
            owner, token = torch.tensor(pairs, device=self.device).unbind(1)
            state.in_prompt.zero_()[owner, token] = True
        state.stop_ids.copy_(torch.tensor([*stop_ids, *[-1] * (width - len(stop_ids))]).expand(rows, -1))
        pages = torch.zeros(rows, self.pages_per_row, dtype=torch.int32)
        pages[:count] = 1 + torch.arange(count * self.pages_per_row).view(count, -1)
        state.block_table.copy_(pages)
        state.last_token.zero_()
        state.drafts.zero_()

    def _run(
        self,
        step: Step,
        state: DecodeState,
        completions: list[Completion],
        stop_ids: Sequence[int],
        reader: ReportReader,
        masks: GrammarMasks | None,
        *,
        lag: bool,
    ) -> Iterator[None]:
        """Step until every row has ended; yields when `completions` have grown.

        masks: of the step, where it has any.
        lag: read the reports a step late where that spares a device a wait.
        """
        started = self._num_started

        def collect(*, is_step: bool) -> None:
            reports = reader.pop() if masks is None else masks.settle(reader.pop())
            for completion, report in zip(completions, reports, strict=True):
                completion.extend(report, stop_ids, is_step=is_step)

        reader.push()
        collect(is_step=False)
        yield
        while any(completion.finish_reason is None for completion in completions):
            self._check_caches()
            if self._num_started != started:
                mend = "finish one stream before the next, or give both lists of prompts to one"
                raise MLAError("stream", "one stream of an engine at a time", "another one has started", mend)
            step(state)
            reader.push()
            if reader.ready() or not lag:
                collect(is_step=True)
                yield

    def _check_caches(self) -> None:
        if any(mine is not now for mine, now in zip(self._caches, self.model.caches(), strict=True)):
            mend = "use the newest engine of a model only"
            raise MLAError("model", "the caches that this engine allocated", "newer ones", mend)


def _stop_id_places(stop_ids: Sequence[int]) -> int:
    """How many stop ids a row has places for: 8, 16, ..., since the number is compiled in."""
    return max(8, 1 << (len(stop_ids) - 1).bit_length())


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
