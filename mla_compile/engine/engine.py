"""The engine: requests -> scheduler -> batch layout -> compiled step -> sampler -> streamed completions.

Requests come and go at any time. Each step runs the rows that decode, k drafts each, and as much of waiting prompts as
fits with them (`scheduler.py`). Requests share the caches' pages (`pages.py`) and the rows of decode states
(`rows.py`). On a GPU the host plans step i + 1 while step i runs, then reads step i's report, copied meanwhile
(`reports.py`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from mla_compile.defaults import DEFAULT_MAX_TOKENS
from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.caches import EngineCaches
from mla_compile.engine.completion import Completion
from mla_compile.engine.config import EngineConfig, config_of
from mla_compile.engine.grammar import Grammar
from mla_compile.engine.intake import Intake, checked_sampling
from mla_compile.engine.launch import Launch, Launcher
from mla_compile.engine.leader import LeadingLauncher
from mla_compile.engine.request import Progress, Request, TokenChooser
from mla_compile.engine.scheduler import Plan, Scheduler
from mla_compile.engine.single_owner import SingleOwner
from mla_compile.engine.stats import EngineStats
from mla_compile.engine_settings import EngineSettings
from mla_compile.errors import MLAError
from mla_compile.models import Parallel
from mla_compile.ranks import Ranks
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate import ServedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTERRUPTED = "interrupted"
"""The error of requests that an interrupt has ended outside of any line that could fail."""


class Engine:
    """Serves one model to requests that arrive at any time, up to `max_rows` of them at once.

    If processes share the model, rank 0 has the engine, and the others run `follow`.

    One thread at a time owns it: a call from another thread while a call runs raises an `MLAError` and changes nothing,
    except for `has_work` and `stats`. Between calls any thread may use it.

    model, config: what it was built from; the config has all defaults filled in.
    report_lag: launches whose reports are read later: 1 on a GPU, where the host plans a step while another runs.
    """

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Build an engine with caches of its own.

        Args:
            model: its caches are allocated here; they serve one engine at a time, the newest.
            config, settings: an `EngineConfig`, or its keyword arguments.
            tokenizer: the model's; with it, ended completions get their text, and requests may have stop strings.

        Raises:
            MLAError: a bad argument, named; a rank above 0.
        """
        self._ranks = ranks = _ranks_of(model)
        self.config = config_of(config, settings).fitted_to(model)
        self.model, self.device, self.tokenizer = model, model.device, tokenizer
        self.report_lag = int(self.device.type == "cuda")
        self._intake = Intake(model, self.config.max_model_len, tokenizer)
        drafter = self.config.build_drafter(model)
        self._caches = EngineCaches(model, drafter, self.config)
        self._counts = EngineStats(max_rows=self.config.max_rows, num_pages=self.config.num_pages - 1)
        self._lock = SingleOwner()
        self._is_closed = self._is_changing = False
        self._launcher = (
            Launcher(model, drafter, self.config)
            if ranks is None
            else LeadingLauncher(model, drafter, self.config, ranks)
        )
        self._restart()

    def _restart(self) -> None:
        """Drop all requests and all knowledge of the caches' contents, on the other ranks too."""
        self._scheduler = Scheduler(self.config, self._caches.lookahead)
        self._under_way: deque[Launch] = deque()
        self._to_abort: deque[Request] = deque()
        self._is_launching = False  # so other ranks may wait for this one
        if not self._is_closed:
            self._launcher.clear()

    # --- requests, one by one

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_TOKENS,
        stop_ids: Sequence[int] | None = None,
        grammar: Grammar | None = None,
        priority: int = 0,
        max_drafts: int | None = None,
        client: str | None = None,
    ) -> Request:
        """Add a request, which runs with the next steps.

        Args:
            prompt: token ids, at least one.
            sampling: of one completion (`n` is 1); by default the model's `default_sampling`, which `load_model` sets,
                else greedy.
            max_new_tokens: maximum number of new tokens, >= 1; `SamplingParams.max_tokens` takes precedence.
            stop_ids, grammar: see `stream`.
            priority: an integer; lower ones are served first.
            client: any name for the request's client. Among equal priorities a free row goes to a client with the
                fewest rows, and the requests of one client, or of none, run in the order of their arrival.
            max_drafts: maximum number of drafts verified per step, >= 0; None for all. It does not change the tokens.

        Raises:
            MLAError: a bad argument, named; other requests continue.
        """
        if type(priority) is not int:
            raise MLAError("priority", "an integer", repr(priority))
        if max_drafts is not None and (type(max_drafts) is not int or max_drafts < 0):
            raise MLAError("max_drafts", "an integer >= 0 or None", repr(max_drafts))
        if client is not None and not isinstance(client, str):
            raise MLAError("client", "a str or None", repr(client))
        request = self._intake.request(prompt, sampling, max_new_tokens, stop_ids, grammar)
        request.priority, request.max_drafts, request.client = priority, max_drafts, client
        request.engine = self
        self._enqueue(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, with finish_reason "abort"; a request that has ended stays as it is.

        In a callback of a step, or in a signal handler that interrupts a call of the engine, it ends with that call.

        Args:
            request: what `add` returned.

        Raises:
            MLAError: anything else.
        """
        if not getattr(request, "has_ended", False) and getattr(request, "engine", None) is not self:
            raise MLAError("request", "what this engine's `add` returned", repr(request))
        with self._lock:
            self._to_abort.append(request)
            if not self._is_changing:
                with self._whole_or_nothing():
                    pass  # it aborts them at its end

    def leave(self, request: Request) -> None:
        """Abort a request whose iterator was closed: now or, while a call of the engine runs, when that call ends."""
        self._lock.when_released(lambda: self.abort(request))

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work() or bool(self._under_way)

    def step(self) -> None:
        """Launch the next step, and apply the reports of an earlier one: requests grow and end.

        Raises:
            MLAError: the model's caches no longer belong to this engine: another engine replaced them, or the model
                was moved; a call in a callback of a step, such as `choose`.
            Exception: what the model raised; all requests have then ended with finish_reason "error". An error in
                host-side work on one request (text, stop strings, grammars, log-probabilities, choosing its tokens) is
                not raised: it ends that request with "error" and a message, and the others continue.
        """
        with self._lock:
            if self._is_changing:
                got, hint = "one in a callback or a signal handler", "return from it, then call the engine"
                raise MLAError("engine", "no step inside a step", got, hint)
            self._check_caches()
            with self._whole_or_nothing():
                self._step()

    @contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Changes of requests, rows and pages: an error in the middle, such as an interrupt, ends all requests."""
        with self._lock:
            is_within_another = self._is_changing
            try:
                self._is_changing = True
                yield
                while self._to_abort and not is_within_another:
                    self._scheduler.abort(self._to_abort.popleft())
                self._is_changing = is_within_another
            except BaseException as error:
                self._is_changing = is_within_another
                # An interrupt between the block and its end closes this generator.
                is_closed = isinstance(error, GeneratorExit)
                message = INTERRUPTED if is_closed else str(error) or type(error).__name__
                for request in self._scheduler.requests():
                    request.end("error", message)
                if self._is_launching and not self._launcher.has_not_chosen:
                    self._fail_with_others()
                self._restart()
                raise

    def _fail_with_others(self) -> None:
        """After an error that other ranks may not have: end them, and close this engine."""
        if self._ranks is not None:
            self._is_closed = True
            self._ranks.fail()

    def _step(self) -> None:
        start = time.perf_counter()
        may_admit = self._scheduler.num_waiting and self._scheduler.num_running < self.config.max_rows
        if may_admit and self._launcher.weights.have_changed():
            self._scheduler.forget_prefixes()
        plan, lag = self._scheduler.plan(), 0
        # If the host chooses tokens it needs the previous ones first.
        if plan and not self._launch(plan).on_host:
            lag = self.report_lag
        while len(self._under_way) > lag:
            oldest = self._under_way.popleft()
            reports = oldest.report.read()
            self._counts.count_reports(oldest.plan, reports)
            self._scheduler.update(oldest.plan, reports)
        if plan:
            self._counts.step_seconds = time.perf_counter() - start
            self._counts.total_step_seconds += self._counts.step_seconds

    def _launch(self, plan: Plan) -> Launch:
        self._is_launching = True
        launch = self._launcher.launch(plan)
        self._is_launching = False
        self._under_way.append(launch)
        self._counts.count_launch(plan)
        return launch

    async def turn(self) -> None:
        """Run a step if there is work, then let other asyncio tasks run."""
        if self.has_work():
            self.step()
        await asyncio.sleep(0)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        return replace(
            self._counts,
            rows_in_use=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            pages_in_use=self._scheduler.num_pages_in_use * self.config.pages_per_grant,
        )

    # --- lists of prompts

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_TOKENS,
        stop_ids: Sequence[int] | None = None,
        grammars: Grammar | Sequence[Grammar | None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt; returns the last list that `stream` yields.

        Args:
            prompts, sampling, max_new_tokens, stop_ids, grammars: see `stream`.

        Raises:
            MLAError: as `stream` does.
        """
        stream = self.stream(
            prompts, sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids, grammars=grammars
        )
        with self._lock:
            last = deque(stream, maxlen=1)
        return last[0] if last else []

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = DEFAULT_MAX_TOKENS,
        stop_ids: Sequence[int] | None = None,
        grammars: Grammar | Sequence[Grammar | None] | None = None,
        choose: TokenChooser | None = None,
    ) -> Iterator[list[Completion]]:
        """Yield the completions of all prompts, in their order, each time some of them have grown.

        Args:
            prompts: token ids of each prompt, at least one each.
            sampling: for all prompts, or one for each; by default the model's `default_sampling`, which `load_model`
                sets, else greedy. A prompt has `SamplingParams.n` completions, one after the other in the list.
            max_new_tokens: maximum number of new tokens per prompt, >= 1; a prompt's `SamplingParams.max_tokens` takes
                precedence. A row also ends at `max_model_len`.
            stop_ids: a row ends with the first of these that it emits; by default the model's `stop_ids`, the
                end-of-sequence ids that `load_model` sets, else none.
            grammars: constrain completions: one for all prompts, or one for each. None for no constraint; the tokens of
                such a prompt do not depend on other prompts' grammars. A stop id follows a complete text. `sampling`
                chooses among the tokens that the grammar allows; penalties are applied before the mask, and
                log-probabilities are of all tokens. A row whose grammar allows no token ends with finish_reason
                "error", and the others continue. A grammar makes the steps of all rows as slow as with `choose`.
            choose: picks the tokens on the host, between the two halves of a step; `sampling` then applies only to the
                drafts. Slower: the host waits for every step. Its errors are raised by this stream; the stream's
                requests end, and others continue.

        The same list is yielded each time; its completions grow. With `prefix_caching` the further completions of a
        prompt are added while the stream is iterated. Streams may run concurrently with one another and with
        other requests. Leaving a stream early aborts its requests.

        Raises:
            MLAError: a bad argument or prompt, named, before anything runs; later, if another engine has replaced the
                model's caches.
        """
        requests = self._intake.requests(prompts, sampling, max_new_tokens, stop_ids, grammars, choose)
        for request in requests:
            request.engine = self
        return self._stream(requests)

    def _stream(self, requests: list[Request]) -> Iterator[list[Completion]]:
        completions = [request.completion for request in requests]
        progress = requests[0].progress if requests else Progress()
        # A prompt's further completions wait until the first one has filled the pages that they share.
        first_of = {r.completion.prompt_index: r for r in requests if r.completion.index == 0}
        followers = deque(r for r in requests if r.completion.index and self.config.prefix_caching)
        try:
            for request in requests:
                if request.completion.index == 0 or not self.config.prefix_caching:
                    self._enqueue(request)
            while True:
                if progress.has_grown:
                    progress.has_grown = False
                    for request in requests:
                        if request.failure is not None:
                            raise request.failure
                    while followers and first_of[followers[0].completion.prompt_index].has_begun:
                        self._enqueue(followers.popleft())
                    yield completions
                elif all(request.has_ended for request in requests):
                    return
                else:
                    self.step()
        finally:
            for request in requests:
                self.leave(request)

    # --- other than requests

    def warm_up(self, *, sampling: SamplingParams | None = None, prompts: bool = True) -> CaptureReport:
        """Compile the steps, and capture them for all bucket row counts. No cache is read or written.

        Afterwards no request waits for a compilation. If CUDA graphs are recorded, steps with prompts are compiled too,
        and run with prompts of many sizes and with few tokens after cached ones. Each padded size without cached tokens
        is captured unless it is long, for up to three prompts beside few rows. Others are captured on their second
        calls.

        Args:
            sampling: compile only what requests with these parameters need, without grammars; None for every request.
            prompts: False skips the step with prompts. It takes as long to compile as the other one, and requests that
                all arrive at once need it only a few times: it then runs eagerly (see `EngineConfig.mode`). In a
                batch-invariant engine it is always compiled.

        Raises:
            MLAError: a bad argument, named; requests are under way.
        """
        params = None if sampling is None else checked_sampling("sampling", sampling)
        if type(prompts) is not bool:
            raise MLAError("prompts", "True or False", repr(prompts))
        kinds = [False, True] if params is None else [not params.is_argmax]
        parts = params is None or params.logprobs is not None
        with self._lock:
            self._check_idle("warm_up")
            if self.model.is_recurrent:  # its states get their sizes from a prompt
                self.generate([[0]], max_new_tokens=1)
            try:
                self._launcher.warm_up(kinds, prompts=prompts, parts=parts)
            except BaseException:
                self._fail_with_others()
                raise
            return self.capture_report()

    @property
    def compiles_first(self) -> bool:
        """Whether steps are compiled before they run, so that `warm_up` saves requests a wait; see `EngineConfig`."""
        return self.config.compile is not False and not self._launcher.steps.compiles_in_background

    def wait_until_compiled(self) -> None:
        """Wait for the steps that a background thread is compiling, if any; see `EngineConfig.compile`."""
        self._launcher.steps.wait_for_jobs()

    def capture_report(self) -> CaptureReport:
        """The buckets compiled and captured so far, with their time and memory, and why others were not."""
        with self._lock:
            return self._launcher.steps.report()

    def reset_prefix_cache(self) -> None:
        """Forget what the caches hold, after the model's weights have changed in a way that `Weights` does not detect.

        torch does not count writes through `.data`, NumPy or fused optimizers, for example (docs/serving.md).

        Raises `MLAError` while requests are under way.
        """
        with self._lock:
            self._check_idle("reset_prefix_cache")
            self._restart()

    def close(self) -> None:
        """End all requests and the engine. If processes share the model, their `follow` returns.

        If a newer engine of the same model has replaced this one, they keep following the newer one.
        """
        with self._lock:
            for request in self._scheduler.requests():
                self.abort(request)
            self._under_way.clear()
            if self._ranks is not None and self._caches.are_in_place() and not self._is_closed:
                self._ranks.broadcast(["close"])
            self._is_closed = True

    def _enqueue(self, request: Request) -> None:
        with self._lock:
            self._check_caches(layers=not self._scheduler.num_waiting)
            self._scheduler.check_size(request)
            with self._whole_or_nothing():
                self._scheduler.add(request)

    def _check_idle(self, name: str) -> None:
        self._check_caches()
        if self._scheduler.has_work():
            got, hint = f"{len(self._scheduler.requests())} under way", "wait for them, or abort them"
            raise MLAError(name, "an engine without requests", got, hint)
        while self.has_work():  # reports of requests that were aborted
            self.step()

    def _check_caches(self, *, layers: bool = False) -> None:
        """layers: also check the model's list of layers, too slow for each step; done if no other request waits."""
        if self._is_closed:
            raise MLAError("engine", "an open engine", "a closed one", "make another")
        if not self._caches.are_in_place() or (layers and not self._caches.are_of_all_layers()):
            hint = "make an engine after moving the model or changing its layers, and use a model's newest one only"
            raise MLAError("model", "the caches that this engine allocated", "others", hint)


def _ranks_of(model: ServedModel) -> Ranks | None:
    """The processes that share a model, of which this one is rank 0; None if this process has the whole model."""
    parallel: Parallel | None = getattr(model, "parallel", None)
    if parallel is None or parallel.ranks is None or parallel.size == 1:
        return None
    if parallel.rank > 0:
        got, hint = f"that of rank {parallel.rank}", "run `mla_compile.follow(model)` there"
        raise MLAError("model", "the part of rank 0, which takes the requests", got, hint)
    return parallel.ranks
