"""The engine: requests -> scheduler -> batch layout -> compiled step -> sampler -> streamed completions.

Requests come and go at any time. Each step runs the rows that decode, k drafts each, and as much of waiting prompts as
fits beside them (`scheduler.py`); they share pages of the caches (`pages.py`), and rows of decode states (`rows.py`).
On a device the host plans step i + 1 while step i runs, and reads of step i what was copied meanwhile (`reports.py`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mla_compile.defaults import DEFAULT_MAX_TOKENS, DrafterName
from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.completion import Completion
from mla_compile.engine.draft_length import AdaptiveLength, Drafting, FixedLength
from mla_compile.engine.generation import Generation, Progress, TokenChooser
from mla_compile.engine.grammar import Grammar, GrammarRow, check_grammar
from mla_compile.engine.launch import Launched, Launcher
from mla_compile.engine.pages import PagePool
from mla_compile.engine.progress_bar import with_progress_bar
from mla_compile.engine.reports import ReportReader, RowReport
from mla_compile.engine.rows import stop_id_places
from mla_compile.engine.scheduler import Chunk, Grant, Plan, Request, Row, Scheduler
from mla_compile.engine.stats import EngineStats
from mla_compile.engine.stop_strings import StopStrings
from mla_compile.engine.turn import Turn
from mla_compile.engine.variants import Variant
from mla_compile.errors import MLAError
from mla_compile.ops.backends import DecodeCall, check_name, describe_device, select_backend
from mla_compile.speculate import DecodeState, SamplingParams, ServedModel, Step
from mla_compile.speculate.drafter import check_drafter
from mla_compile.speculate.step import check_num_drafts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TOKENS_PER_STEP = 2048
"""Of decode rows and prompts together: it bounds the activations, and how long a prompt delays the rows that decode."""
DEFAULT_MAX_ROWS = 8
"""Requests that run at once."""
DEFAULT_MAX_MODEL_LEN = 2048
"""Tokens of a request. The caches' size follows from it and is compiled in, so what takes it shares compiled steps."""
DEFAULT_PAGE_SIZE = 16
"""Tokens of a cache page."""


class Engine:
    """Serves one model to requests that arrive at any time, up to `max_rows` of them at once.

    It belongs to one thread at a time: what another one calls while a call runs raises an `MLAError` and changes
    nothing, `has_work` and `stats` excepted. Between calls it may be handed over.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        num_speculative_tokens: int = 0,
        drafter: DrafterName | None = None,
        adaptive_draft_length: bool = False,
        max_rows: int = DEFAULT_MAX_ROWS,
        max_model_len: int = DEFAULT_MAX_MODEL_LEN,
        page_size: int = DEFAULT_PAGE_SIZE,
        num_pages: int | None = None,
        max_tokens_per_step: int | None = None,
        prefix_caching: bool = True,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        compile: bool = True,
        compile_mixed: bool = False,
        mode: str | None = "reduce-overhead",
        shadow_check_every: int | None = None,
        decode_backend: str | None = None,
        capture_budget: int | None = None,
    ) -> None:
        """An engine of its own caches.

        Args:
            model: its caches are allocated here; they serve one engine at a time, the newest.
            num_speculative_tokens: drafts per step, k >= 0; 0 for a model with recurrent layers.
            drafter: what proposes them: "mtp", the model's MTP layer, or "ngram", a look-up of the last tokens in the
                request's own text. None for the MTP layer where there is one, else the look-up.
            adaptive_draft_length: from 0 to k drafts per step, whatever gives the most tokens a second by measured
                acceptance and measured step times (`draft_length.py`); fewer for rows whose own are seldom right.
                Tokens do not depend on it. Each number of drafts is a step of its own, compiled and captured when it is
                first tried, or by `warm_up`.
            max_rows: requests that run at once; others wait.
            max_model_len: tokens of a request at most, prompt included.
            page_size: tokens per cache page.
            num_pages: of the caches, the dummy page 0 included. By default enough for `max_rows` requests of
                `max_model_len` tokens. With fewer, requests that find no page run again later, what they have said
                becoming part of their prompt; at least as many as one request needs.
            max_tokens_per_step: query tokens of a step at most; a longer prompt takes several. By default 2048, at
                least 512 more than `max_rows` decode rows take.
            prefix_caching: whether prompts reuse cached pages of others that begin alike.
            tokenizer: the model's: completions that have ended get their text, and requests may have stop strings.
            compile: False runs everything eagerly.
            compile_mixed: compile steps with prompts in them too, when they are first met or by `warm_up`, and capture
                them around prefill attention. Their prompts are padded to one of a few sizes, each recorded when it is
                met. That takes as long as compiling the step, and eager steps cost the host several times what they
                cost the device, so it pays in what serves for long.
            mode: the mode of `torch.compile` for steps; "reduce-overhead" replays one CUDA graph per step, several for
                one with prompts.
            shadow_check_every: for debugging: every so many steps, compare one with its eager run (see `shadow_check`).
            decode_backend: the decode backend of steps, compiled or not; None takes the fastest. One that this device
                or `compile` rules out is refused here, one that the model's sizes rule out when a step is compiled or
                run.
            capture_budget: bytes of device memory for CUDA graphs. Once they hold so many, no further number of rows is
                recorded: its batches are padded to a larger recorded one, or run uncaptured where there is none;
                further numbers of prompt tokens run uncaptured. 0 captures nothing. None for no limit: there are few
                numbers of either, and graphs share memory.

        Raises:
            MLAError: a bad argument, named.
        """
        _check_model(model)
        _check_integers(
            max_rows=max_rows,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=num_pages,
            max_tokens_per_step=max_tokens_per_step,
            shadow_check_every=shadow_check_every,
        )
        _check_booleans(
            adaptive_draft_length=adaptive_draft_length,
            prefix_caching=prefix_caching,
            compile=compile,
            compile_mixed=compile_mixed,
        )
        if capture_budget is not None and (type(capture_budget) is not int or capture_budget < 0):
            raise MLAError("capture_budget", "an integer >= 0, in bytes, or None", repr(capture_budget))
        check_num_drafts(num_speculative_tokens)
        device = describe_device(model.device)  # what else a backend may lack shows when the model runs
        check_name("decode_backend", decode_backend)
        select_backend(DecodeCall(*device, captured=compile), decode_backend, "decode_backend")
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise MLAError("tokenizer", "a tokenizer of transformers or None", type(tokenizer).__name__)
        self.model, self.device, self.tokenizer = model, model.device, tokenizer
        self.k = num_speculative_tokens
        self.drafter = _checked_drafter(drafter, self.k, model)
        self.max_rows, self.max_model_len, self.page_size = max_rows, max_model_len, page_size
        self.pages_per_row = -(-max_model_len // page_size)
        self.num_pages = num_pages or 1 + max_rows * self.pages_per_row
        if self.num_pages < 1 + self.pages_per_row:
            expected = (
                f"at least {1 + self.pages_per_row}, for one row of max_model_len = {max_model_len} tokens"
            )
            raise MLAError("num_pages", expected, num_pages)
        default_tokens = max(DEFAULT_TOKENS_PER_STEP, max_rows * (1 + self.k) + 512)
        self.max_tokens_per_step = max_tokens_per_step or default_tokens
        self.prefix_caching = prefix_caching
        self._pages_per_grant = 1
        if model.is_recurrent:
            if num_pages is not None or max_tokens_per_step is not None:
                name = "num_pages" if num_pages is not None else "max_tokens_per_step"
                raise MLAError(name, "None for a model with recurrent layers", getattr(self, name))
            if compile_mixed:
                raise MLAError("compile_mixed", "False for a model with recurrent layers", compile_mixed)
            self._pages_per_grant, self.prefix_caching = self.pages_per_row, False
            self.max_tokens_per_step = max_rows * (1 + max_model_len)
        self._launcher = Launcher(
            model,
            drafter=self.drafter,
            draft_length=AdaptiveLength(self.k) if adaptive_draft_length else FixedLength(self.k),
            max_rows=max_rows,
            max_pages=self.pages_per_row,
            page_size=page_size,
            pages_per_grant=self._pages_per_grant,
            compile=compile,
            compile_mixed=compile_mixed,
            mode=mode,
            shadow_check_every=shadow_check_every,
            decode_backend=decode_backend,
            capture_budget=capture_budget,
        )
        self._checks_steps = shadow_check_every is not None
        self._counts = EngineStats(max_rows=max_rows, num_pages=self.num_pages - 1)
        self._generations: dict[Request, Generation] = {}
        self._reports = ReportReader(self.device)
        self._launched: deque[tuple[list[Row], Drafting]] = deque()  # of the reports that are awaited
        self._turn = Turn()
        self._begin_anew()
        with torch.inference_mode(False):  # an inference tensor could not be changed outside that mode
            model.allocate_cache(self.num_pages, page_size)
        self._caches = model.caches()

    def _begin_anew(self) -> None:
        """With no request, and nothing known of what the caches hold."""
        self._pool = PagePool(
            1 + (self.num_pages - 1) // self._pages_per_grant,
            self.page_size * self._pages_per_grant,
            has_drafter=self.k > 0 and self.drafter == "mtp",
            keeps_prefixes=self.prefix_caching,
        )
        self._scheduler = Scheduler(
            self._pool,
            num_speculative_tokens=self.k,
            max_rows=self.max_rows,
            max_tokens_per_step=self.max_tokens_per_step,
        )
        self._launcher.rows.clear()
        self._reports.clear()
        self._launched.clear()
        self._num_untimed = 0  # of the next reports, those whose times tell nothing
        self._last_report = 0.0  # when it came, or when the first launch after a pause began
        self._generations.clear()

    # --- requests, one by one

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_TOKENS,
        stop_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
        priority: int = 0,
    ) -> Generation:
        """Take on a request, which runs with the next steps.

        Args:
            prompt: token ids, at least one.
            sampling: of one completion (`n` is 1); greedy by default.
            max_new_tokens: at most so many, >= 1, where `SamplingParams.max_tokens` says nothing.
            stop_ids: the model's end-of-sequence ids; see `stream`.
            grammar: what it may say; None for anything. See `stream`.
            priority: an integer; lower ones are served first, and equal ones in the order of their arrival.

        Raises:
            MLAError: a bad request, by what is wrong with it; the others go on.
        """
        self._check_chosen_in_step(grammar=grammar)
        sampling = SamplingParams() if sampling is None else _checked_sampling("sampling", sampling)
        if type(priority) is not int:
            raise MLAError("priority", "an integer", repr(priority))
        if sampling.n != 1:
            raise MLAError("n", "1", sampling.n, "add a request for each of `SamplingParams.copies()`")
        generation = self._generation(
            prompt,
            sampling,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            grammar=grammar,
            priority=priority,
        )
        self._take_on(generation)
        return generation

    def abort(self, generation: Generation) -> None:
        """End a request now, whatever it is doing, with finish_reason "abort"; one that has ended stays as it is.

        generation: what `add` returned.

        Raises:
            MLAError: anything else.
        """
        self._check_mine(generation)
        with self._turn:
            if not generation.has_ended:
                generation.end("abort")
                self._let_go(generation)

    def _check_mine(self, generation: object) -> None:
        if not isinstance(generation, Generation) or generation.engine is not self:
            raise MLAError("generation", "what this engine's `add` returned", repr(generation))

    def leave(self, generation: Generation) -> None:
        """Abort a request that nobody reads any more; while a call of the engine runs, when that one ends."""
        self._turn.when_free(lambda: self.abort(generation))

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work()

    def step(self) -> None:
        """Launch what can run next, and take in what an earlier launch gave: requests grow and end.

        Raises:
            MLAError: another engine has taken over the model's caches.
            Exception: what the model raised; all requests have ended with finish_reason "error" then.
        """
        with self._turn:
            self._step()

    def _step(self) -> None:
        self._check_caches()
        start = time.perf_counter()
        preempted = self._scheduler.num_preemptions
        plan = self._scheduler.plan()
        self._counts.num_preemptions += self._scheduler.num_preemptions - preempted
        lag = 0
        # Where the host chooses tokens it must have those before them.
        if plan and not self._launch(plan).on_host:
            lag = self._reports.lag
        while len(self._reports) > lag:
            self._collect()
        if plan:
            self._counts.step_seconds = time.perf_counter() - start
            self._counts.total_step_seconds += self._counts.step_seconds

    async def turn(self) -> None:
        """A step if there is anything to do, and a chance for other tasks."""
        if self.has_work():
            self.step()
        await asyncio.sleep(0)

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges, a copy; it does not change later."""
        grants = self._pool.num_pages - 1 - self._pool.num_free
        return replace(
            self._counts,
            rows_in_use=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            pages_in_use=grants * self._pages_per_grant,
        )

    # --- lists of prompts

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_TOKENS,
        stop_ids: Sequence[int] = (),
        grammars: Grammar | Sequence[Grammar | None] | None = None,
        show_progress: bool = False,
    ) -> list[Completion]:
        """Complete every prompt; what `stream` yields in the end.

        Args:
            prompts, sampling, max_new_tokens, stop_ids, grammars: see `stream`.
            show_progress: with a bar on stderr.

        Raises:
            MLAError: as `stream` does.
        """
        _check_booleans(show_progress=show_progress)
        stream = self.stream(
            prompts, sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids, grammars=grammars
        )
        with self._turn:
            last = deque(with_progress_bar(stream) if show_progress else stream, maxlen=1)
        return last[0] if last else []

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_TOKENS,
        stop_ids: Sequence[int] = (),
        grammars: Grammar | Sequence[Grammar | None] | None = None,
        choose: TokenChooser | None = None,
    ) -> Iterator[list[Completion]]:
        """Yield the completions of all prompts, in their order, each time some of them have grown.

        Args:
            prompts: token ids of each prompt, at least one each.
            sampling: for all prompts, or one for each; greedy by default. A prompt has `SamplingParams.n` completions,
                one after the other in the list.
            max_new_tokens: at most so many tokens a prompt, >= 1, where its `SamplingParams.max_tokens` says nothing;
                a row also ends at `max_model_len`.
            stop_ids: the model's end-of-sequence ids; a row ends with the first of these that it emits.
            grammars: what completions may say, for all prompts, or one for each; None for a free one, whose tokens are
                those it has without grammars beside it. A complete text is followed by a stop id. Of a grammar's row
                `sampling` chooses among the tokens allowed; penalties come before that, and log-probabilities are of
                all tokens. A row whose grammar allows none ends with finish_reason "error", and the others go on.
                Prompts that run beside one with a grammar are as slow as with `choose`.
            choose: picks the tokens on the host, between the two halves of a step; `sampling` is then for the drafts
                only. Slower: the host waits for every step.

        The list yielded is the same one each time, its completions growing. Streams may run side by side, and beside
        other requests. One that is left early aborts its requests.

        Raises:
            MLAError: a bad argument or prompt, named, before anything runs; later, that another engine has taken over
                the model's caches.
        """
        self._check_chosen_in_step(choose=choose, grammars=grammars)
        if choose is not None and not callable(choose):
            raise MLAError("choose", "a TokenChooser or None", repr(choose))
        if choose is not None and grammars is not None:
            raise MLAError("choose", "None where there are grammars", type(choose).__name__)
        _check_prompts(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        if grammars is None or isinstance(grammars, Grammar):
            grammars = [grammars] * len(prompts)
        _check_one_each("sampling", sampling, prompts)
        _check_one_each("grammars", grammars, prompts)
        generations = [
            self._generation(
                prompt,
                params,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                grammar=grammar,
                choose=choose,
                place=(i, j),
                name=f"prompts[{i}]",
                grammar_name=f"grammars[{i}]",
            )
            for i, (prompt, asked, grammar) in enumerate(zip(prompts, sampling, grammars, strict=True))
            for j, params in enumerate(_checked_sampling(f"sampling[{i}]", asked).copies())
        ]
        return self._stream(generations)

    def _stream(self, generations: list[Generation]) -> Iterator[list[Completion]]:
        completions = [generation.completion for generation in generations]
        progress = Progress()
        for generation in generations:
            generation.progress = progress
        # A prompt's further completions wait until the first one has filled the pages that they share.
        first_of = {g.completion.prompt_index: g for g in generations if g.completion.index == 0}
        followers = deque(g for g in generations if g.completion.index and self.prefix_caching)
        try:
            for generation in generations:
                if generation.completion.index == 0 or not self.prefix_caching:
                    self._take_on(generation)
            while True:
                if progress.has_grown:
                    progress.has_grown = False
                    while followers and first_of[followers[0].completion.prompt_index].has_begun:
                        self._take_on(followers.popleft())
                    yield completions
                elif all(generation.has_ended for generation in generations):
                    return
                else:
                    self.step()
        finally:
            for generation in generations:
                self.leave(generation)

    # --- before and beside requests

    def warm_up(
        self, *, sampling: SamplingParams | None = None, stop_ids: Sequence[int] = ()
    ) -> CaptureReport:
        """Compile the step for this kind of sampling and number of stop ids, and record it for all numbers of rows, and
        of drafts where they vary.

        A kind is: greedy or not; with penalties or not; no log-probabilities, up to 5, or up to 20. With
        `compile_mixed` the step that has prompts in it is compiled too, and recorded when prompts come. Steps of
        grammars, and of others whose tokens the host chooses, are not: they run in halves, which are compiled when they
        are first met.

        Largest first: the smaller graphs then find room in its memory. The rows are inactive ones: they read no cache
        and write none.

        Args:
            sampling: of the kind; greedy by default.
            stop_ids: as many as requests will have.

        Raises:
            MLAError: a bad argument, named; requests are under way.
        """
        params = SamplingParams() if sampling is None else _checked_sampling("sampling", sampling)
        _check_stop_ids(stop_ids)
        with self._turn:
            self._check_idle("warm_up")
            if self.model.is_recurrent:  # its states get their sizes from a prompt
                self.generate([[0]], max_new_tokens=1)
            self._launcher.warm_up(Variant.of([params]), stop_id_places({*stop_ids, *params.stop_token_ids}))
            return self.capture_report()

    def capture_report(self) -> CaptureReport:
        """Which numbers of rows were compiled and captured by now, in what time and memory, and why others were not."""
        with self._turn:
            return self._launcher.capture_report()

    def reset_prefix_cache(self) -> None:
        """Forget what the caches hold: after the model's weights have changed, say.

        Raises:
            MLAError: requests are under way.
        """
        with self._turn:
            self._check_idle("reset_prefix_cache")
            self._begin_anew()

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
    ) -> tuple[Step, DecodeState]:
        """Prefill up to `max_rows` prompts, sample their first tokens (in `state.report`) and draft behind them.

        Args:
            prompts: token ids of each, at least one each.
            max_new_tokens: of a prompt at most, >= 1, where its `SamplingParams.max_tokens` says nothing.
            sampling: for each prompt.
            stop_ids: the model's end-of-sequence ids.

        Returns the step and the state to call it with, for loops that are not the engine's. They are good until the
        engine takes on its next request. Row i is that of prompt i, with pages for all of its tokens.

        Raises:
            MLAError: a bad argument, named; requests are under way.
        """
        with self._turn:
            return self._start(prompts, max_new_tokens, sampling, stop_ids)

    def _start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sequence[SamplingParams],
        stop_ids: Sequence[int],
    ) -> tuple[Step, DecodeState]:
        self._check_idle("start")
        _check_prompts(prompts)
        _check_one_each("sampling", sampling, prompts)
        if not 1 <= len(prompts) <= self.max_rows:
            raise MLAError("prompts", f"1 to max_rows = {self.max_rows} of them", len(prompts))
        if len(prompts) * self.pages_per_row >= self.num_pages:
            raise MLAError("num_pages", f"more than {len(prompts) * self.pages_per_row}", self.num_pages)
        plan, generations, grants = Plan(), {}, self.pages_per_row // self._pages_per_grant
        for slot, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            params = _checked_sampling(f"sampling[{slot}]", params)
            generation = self._generation(prompt, params, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
            request = Request(generation.prompt, generation.max_len, (0, slot))
            generations[request] = generation
            plan.admitted.append(Row(slot, request))
            plan.grants.append(Grant(slot, 0, [1 + slot * grants + i for i in range(grants)]))
            plan.chunks.append(Chunk(slot, request, 0, len(prompt), is_last=True))
        self._begin_anew()
        state = self._launcher.launch(plan, generations).state
        self._begin_anew()
        return self._launcher.step(Variant.of(sampling), self.k), state

    # --- inside

    def _generation(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        grammar: Grammar | None = None,
        choose: TokenChooser | None = None,
        priority: int = 0,
        place: tuple[int, int] = (0, 0),
        name: str = "prompt",
        grammar_name: str = "grammar",
    ) -> Generation:
        """A request that has been checked; nothing has changed."""
        _check_integers(max_new_tokens=max_new_tokens)
        self._check_prompt(name, prompt)
        _check_stop_ids(stop_ids)
        if choose is not None and params.logprobs is not None:
            raise MLAError("logprobs", "None where `choose` picks the tokens", "a number")
        if params.stop_strings and not hasattr(self.tokenizer, "backend_tokenizer"):
            raise MLAError("stop", "none in an engine without a fast tokenizer", params.stop_strings)
        ends = {*(() if params.ignore_eos else stop_ids), *params.stop_token_ids}
        completion = Completion(prompt_index=place[0], index=place[1])
        row = None
        if grammar is not None:
            check_grammar(grammar, grammar_name, vocab_size=self.model.vocab_size, stop_ids=ends)
            row = GrammarRow(grammar, completion, ends, grammar_name)
        stops = None
        if params.stop_strings and self.tokenizer is not None:
            stops = StopStrings(params.stop_strings, self.tokenizer)
        return Generation(
            engine=self,
            completion=completion,
            prompt=list(prompt),
            params=params,
            stop_ids=frozenset(ends),
            max_len=min(len(prompt) + (params.max_tokens or max_new_tokens), self.max_model_len),
            priority=priority,
            grammar=row,
            choose=choose,
            stop_strings=stops,
        )

    def _check_chosen_in_step(self, **on_host: object) -> None:
        """What has the host choose tokens has no step that could be checked as a whole."""
        for name, given in on_host.items():
            if given is not None and self._checks_steps:
                raise MLAError(name, "None in an engine with shadow_check_every", type(given).__name__)

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

    def _take_on(self, generation: Generation) -> None:
        with self._turn:
            generation.request = self._scheduler.add(
                generation.prompt, max_len=generation.max_len, priority=generation.priority
            )
            self._generations[generation.request] = generation

    def _let_go(self, generation: Generation) -> None:
        """Of a request that has ended: its pages are free, and what is still launched for it is dropped."""
        if generation.request in self._generations:
            del self._generations[generation.request]
            self._scheduler.abort(generation.request)

    def _launch(self, plan: Plan) -> Launched:
        if not self._launched:  # the time before it was nobody's step
            self._last_report = time.perf_counter()
        try:
            launched = self._launcher.launch(plan, self._generations)
        except BaseException as error:
            for generation in self._generations.values():
                generation.end("error", str(error))
            self._begin_anew()
            raise
        self._reports.push(launched.state, launched.rows, launched.num_logprobs)
        self._launched.append((plan.sampled, launched.drafting))
        if not launched.is_usual:  # it has kept the host from the reports before it too
            self._num_untimed = len(self._launched)
        self._counts.num_steps += 1
        self._counts.num_mixed_steps += bool(plan.decodes and plan.chunks)
        for row in plan.admitted:
            self._counts.num_prompt_tokens += len(row.request.tokens)
            self._counts.num_reused_tokens += row.request.num_reused_tokens
        return launched

    def _collect(self) -> None:
        """Take in the oldest report. A request that its stop string has ended is stopped here, its late tokens cut."""
        reports, (sampled, drafting) = self._reports.pop(), self._launched.popleft()
        self._learn(drafting, sampled, reports)
        self._scheduler.update(reports)
        counts = self._counts
        for row, report in zip(sampled, reports, strict=True):
            generation = self._generations.get(row.request)
            if generation is None:
                continue  # it has ended before
            is_step = not isinstance(row, Chunk)
            counts.num_tokens += len(report.tokens)
            counts.num_verified += is_step
            counts.num_drafts += is_step * report.num_verified
            counts.num_verified_tokens += is_step * len(report.tokens)
            generation.extend(report, is_step=is_step)
            if generation.has_ended:
                self._let_go(generation)

    def _learn(self, drafting: Drafting, sampled: list[Row], reports: list[RowReport]) -> None:
        """Tell what chooses draft lengths of a launch. Rows that have ended were cut, so they say nothing."""
        now = time.perf_counter()
        accepted = [
            len(report.tokens) - 1
            for row, report in zip(sampled, reports, strict=True)
            if report.active and report.tokens and not isinstance(row, Chunk)
        ]
        seconds = None if self._num_untimed else now - self._last_report
        self._num_untimed = max(0, self._num_untimed - 1)
        self._last_report = now
        self._launcher.draft_length.learn(drafting, accepted, seconds)

    def _check_idle(self, name: str) -> None:
        self._check_caches()
        if self._generations:
            mend = "wait for them, or abort them"
            raise MLAError(name, "an engine without requests", f"{len(self._generations)} under way", mend)
        while self.has_work():  # reports of requests that were aborted
            self.step()

    def _check_caches(self) -> None:
        if any(mine is not now for mine, now in zip(self._caches, self.model.caches(), strict=True)):
            mend = "use the newest engine of a model only"
            raise MLAError("model", "the caches that this engine allocated", "newer ones", mend)


def _check_integers(**values: int | None) -> None:
    for name, value in values.items():
        required = name in ("max_rows", "max_model_len", "page_size", "max_new_tokens")
        if (required or value is not None) and (type(value) is not int or value < 1):
            raise MLAError(name, "an integer >= 1", repr(value))


def _check_model(model: object) -> None:
    needed = ("logits", "allocate_cache", "caches", "vocab_size", "device", "has_mtp", "is_recurrent")
    if not callable(model) or not all(hasattr(model, name) for name in needed):
        mend = "give what `load_model` returns, or a model with all that `ServedModel` names"
        raise MLAError("model", "a model that an engine can serve", type(model).__name__, mend)


def _check_booleans(**values: object) -> None:
    for name, value in values.items():
        if type(value) is not bool:
            raise MLAError(name, "True or False", repr(value))


def _checked_drafter(name: DrafterName | None, k: int, model: ServedModel) -> DrafterName:
    check_drafter(name)
    if k > 0 and model.is_recurrent:
        expected = (
            "0 for a model with recurrent layers, whose state cannot be taken back from a rejected draft"
        )
        raise MLAError("num_speculative_tokens", expected, k)
    if k > 0 and name == "mtp" and not model.has_mtp:
        mend = "load a checkpoint with one"
        raise MLAError("drafter", "'ngram' or None for a model without an MTP layer", repr(name), mend)
    return name or ("mtp" if model.has_mtp else "ngram")


def _check_one_each(name: str, given: object, prompts: Sequence[object]) -> None:
    if not isinstance(given, Sequence):
        raise MLAError(name, "one for all prompts, or a list", repr(given))
    if len(given) != len(prompts):
        raise MLAError(name, f"one entry per prompt ({len(prompts)})", len(given))


def _check_prompts(prompts: object) -> None:
    if not isinstance(prompts, Sequence):
        raise MLAError("prompts", "a list of prompts, each a list of token ids", type(prompts).__name__)


def _check_stop_ids(stop_ids: object) -> None:
    if not isinstance(stop_ids, Collection) or isinstance(stop_ids, torch.Tensor):
        raise MLAError("stop_ids", "a list of token ids", type(stop_ids).__name__)
    for token in stop_ids:
        if type(token) is not int or not -(2**63) <= token < 2**63:
            raise MLAError("stop_ids", "integers of 64 bits", repr(token))


def _checked_sampling(name: str, given: object) -> SamplingParams:
    if not isinstance(given, SamplingParams):
        raise MLAError(name, "SamplingParams", repr(given))
    return given
