"""The engine: requests -> scheduler -> batch layout -> compiled step -> sampler -> streamed completions.

Requests come and go at any time. Each step runs the rows that decode, k drafts each, and as much of waiting prompts as
fits beside them (`scheduler.py`); they share pages of the caches (`pages.py`), and rows of decode states (`rows.py`).
On a device the host plans step i + 1 while step i runs, and reads of step i what was copied meanwhile (`reports.py`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from mla_compile.defaults import DEFAULT_MAX_TOKENS
from mla_compile.engine.buckets import CaptureReport
from mla_compile.engine.caches import EngineCaches
from mla_compile.engine.completion import Completion
from mla_compile.engine.config import EngineConfig, check_boolean, config_of
from mla_compile.engine.grammar import Grammar
from mla_compile.engine.intake import Intake, checked_sampling
from mla_compile.engine.launch import Launch, Launcher
from mla_compile.engine.leader import LeadingLauncher
from mla_compile.engine.request import Progress, Request, TokenChooser
from mla_compile.engine.rows import stop_id_places
from mla_compile.engine.scheduler import Plan, Scheduler
from mla_compile.engine.stats import EngineStats
from mla_compile.engine.turn import Turn
from mla_compile.engine.variants import Variant
from mla_compile.engine.weights import Weights
from mla_compile.engine_settings import EngineSettings
from mla_compile.errors import MLAError
from mla_compile.models import Parallel
from mla_compile.ranks import Ranks
from mla_compile.sampling_params import SamplingParams, check_token_ids
from mla_compile.speculate import ServedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Engine:
    """Serves one model to requests that arrive at any time, up to `max_rows` of them at once.

    Where processes share the model, rank 0 has the engine, and the others run `follow`.

    It belongs to one thread at a time: what another one calls while a call runs raises an `MLAError` and changes
    nothing, `has_work` and `stats` excepted. Between calls it may be handed over.

    model, config: what it was made of; nothing is left open in the config.
    report_lag: launches whose reports are held back: one on a device, where the host plans a step while another runs.
    """

    def __init__(
        self,
        model: ServedModel,
        config: EngineConfig | None = None,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """An engine of its own caches.

        Args:
            model: its caches are allocated here; they serve one engine at a time, the newest.
            config, settings: an `EngineConfig`, or its keyword arguments.
            tokenizer: the model's: completions that have ended get their text, and requests may have stop strings.

        Raises:
            MLAError: a bad argument, named; a rank above 0.
        """
        self._ranks = ranks = _ranks_of(model)
        self.config = config_of(config, settings).fitted_to(model)
        self.model, self.device, self.tokenizer = model, model.device, tokenizer
        self.report_lag = int(self.device.type == "cuda")
        self._intake = Intake(model.vocab_size, self.config.max_model_len, tokenizer)
        drafter = self.config.build_drafter(model)
        self._caches = EngineCaches(model, drafter)
        self._counts = EngineStats(max_rows=self.config.max_rows, num_pages=self.config.num_pages - 1)
        self._turn = Turn()
        self._is_closed = False
        self._caches.allocate(self.config)
        self._launcher = (
            Launcher(model, drafter, self.config)
            if ranks is None
            else LeadingLauncher(model, drafter, self.config, ranks)
        )
        self._begin_anew()
        self._weights = Weights(model if self.config.prefix_caching else None)

    def _begin_anew(self) -> None:
        """With no request, and nothing known of what the caches hold, on the other ranks too."""
        self._scheduler = Scheduler(self.config, self._caches.lookahead)
        self._under_way: deque[Launch] = deque()
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
        stop_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
        priority: int = 0,
        max_drafts: int | None = None,
        client: str | None = None,
    ) -> Request:
        """Take on a request, which runs with the next steps.

        Args:
            prompt: token ids, at least one.
            sampling: of one completion (`n` is 1); greedy by default.
            max_new_tokens: at most so many, >= 1, where `SamplingParams.max_tokens` says nothing.
            stop_ids, grammar: see `stream`.
            priority: an integer; lower ones are served first.
            client: whom the request is of, by any name. Among equal priorities a free row goes to a client with the
                fewest rows, and the requests of one client, or of none, run in the order of their arrival.
            max_drafts: of a step, at most so many of its drafts are verified, >= 0; None for all. The tokens stay.

        Raises:
            MLAError: a bad request, by what is wrong with it; the others go on.
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
        self._take_on(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, whatever it is doing, with finish_reason "abort"; one that has ended stays as it is.

        Args:
            request: what `add` returned.

        Raises:
            MLAError: anything else.
        """
        if not getattr(request, "has_ended", False) and getattr(request, "engine", None) is not self:
            raise MLAError("request", "what this engine's `add` returned", repr(request))
        with self._turn:
            self._scheduler.abort(request)

    def leave(self, request: Request) -> None:
        """Abort a request that nobody reads any more; while a call of the engine runs, when that one ends."""
        self._turn.when_free(lambda: self.abort(request))

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._scheduler.has_work() or bool(self._under_way)

    def step(self) -> None:
        """Launch what can run next, and take in what an earlier launch gave: requests grow and end.

        Raises:
            MLAError: the model's caches are not this engine's any more: another one's, or moved with the model.
            Exception: what the model raised; all requests have ended with finish_reason "error" then. Host-side work
                on one request (text, stop strings, grammars, log-probabilities, choosing its tokens) raises nothing
                here: it ends that request with "error" and a sentence, and the others go on.
        """
        with self._turn:
            self._check_caches()
            try:
                self._step()
            except BaseException as error:
                for request in self._scheduler.requests():
                    request.end("error", str(error))
                if self._is_launching and not self._launcher.has_not_chosen:
                    self._fail_with_others()
                self._begin_anew()
                raise

    def _fail_with_others(self) -> None:
        """After an error that the other ranks of the model need not have: they end, and this engine is closed."""
        if self._ranks is not None:
            self._is_closed = True
            self._ranks.fail()

    def _step(self) -> None:
        start = time.perf_counter()
        may_admit = self._scheduler.num_waiting and self._scheduler.num_running < self.config.max_rows
        if may_admit and self._weights.have_changed():
            self._scheduler.forget_prefixes()
        plan, lag = self._scheduler.plan(), 0
        # Where the host chooses tokens it must have those before them.
        if plan and not self._launch(plan).on_host:
            lag = self.report_lag
        while len(self._under_way) > lag:
            self._collect()
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

    def _collect(self) -> None:
        """Take in the oldest report."""
        launch = self._under_way.popleft()
        reports = launch.report.read()
        self._counts.count_reports(launch.plan, reports)
        self._scheduler.update(launch.plan, reports)

    async def turn(self) -> None:
        """A step if there is anything to do, and a chance for other tasks."""
        if self.has_work():
            self.step()
        await asyncio.sleep(0)

    @property
    def stats(self) -> EngineStats:
        """Counters and gauges, a copy; it does not change later."""
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
        stop_ids: Sequence[int] = (),
        grammars: Grammar | Sequence[Grammar | None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt; what `stream` yields in the end.

        Args:
            prompts, sampling, max_new_tokens, stop_ids, grammars: see `stream`.

        Raises:
            MLAError: as `stream` does.
        """
        stream = self.stream(
            prompts, sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids, grammars=grammars
        )
        with self._turn:
            last = deque(stream, maxlen=1)
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
                those it has without grammars beside it. A complete text is followed by a stop id. In a grammar's row
                `sampling` chooses among the tokens allowed; penalties come before that, and log-probabilities are of
                all tokens. A row whose grammar allows none ends with finish_reason "error", and the others go on.
                Prompts that run beside one with a grammar are as slow as with `choose`.
            choose: picks the tokens on the host, between the two halves of a step; `sampling` is then for the drafts
                only. Slower: the host waits for every step. What it raises, this stream raises; its requests end, and
                others go on.

        The list yielded is the same one each time, its completions growing. Streams may run side by side, and beside
        other requests. One that is left early aborts its requests.

        Raises:
            MLAError: a bad argument or prompt, named, before anything runs; later, that another engine has taken over
                the model's caches.
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
                    self._take_on(request)
            while True:
                if progress.has_grown:
                    progress.has_grown = False
                    for request in requests:
                        if request.failure is not None:
                            raise request.failure
                    while followers and first_of[followers[0].completion.prompt_index].has_begun:
                        self._take_on(followers.popleft())
                    yield completions
                elif all(request.has_ended for request in requests):
                    return
                else:
                    self.step()
        finally:
            for request in requests:
                self.leave(request)

    # --- before and beside requests

    def warm_up(
        self, *, sampling: SamplingParams | None = None, stop_ids: Sequence[int] = (), prompts: bool = True
    ) -> CaptureReport:
        """Compile the step for a kind of sampling, and record it for all numbers of rows.

        A kind is: greedy or not; with penalties or not; no log-probabilities, up to 5, or up to 20. Where CUDA graphs
        are recorded the step that has prompts in it is compiled too, and recorded when prompts come. Steps whose tokens
        the host chooses, of grammars say, are compiled when they are first met. No cache is read or written.

        Args:
            sampling: of the kind; greedy by default.
            stop_ids: as many as requests will have.
            prompts: False leaves out the step that has prompts in it. It takes as long as the other one, and requests
                that all come at once need it a few times only: then it runs eagerly (see `EngineConfig.mode`). In a
                batch-invariant engine it never does.

        Raises:
            MLAError: a bad argument, named; requests are under way.
        """
        params = SamplingParams() if sampling is None else checked_sampling("sampling", sampling)
        check_token_ids("stop_ids", stop_ids, self.model.vocab_size)
        check_boolean("prompts", prompts)
        with self._turn:
            self._check_idle("warm_up")
            if self.model.is_recurrent:  # its states get their sizes from a prompt
                self.generate([[0]], max_new_tokens=1)
            variant, places = Variant.of([params]), stop_id_places({*stop_ids, *params.stop_token_ids})
            try:
                self._launcher.warm_up(variant, places, prompts)
            except BaseException:
                self._fail_with_others()
                raise
            return self.capture_report()

    def capture_report(self) -> CaptureReport:
        """Which numbers of rows were compiled and captured by now, in what time and memory, and why others were not."""
        with self._turn:
            return self._launcher.steps.report()

    def reset_prefix_cache(self) -> None:
        """Forget what the caches hold, after the model's weights have changed in a way that `Weights` does not notice.

        torch does not count writes through `.data`, NumPy or fused optimizers, for example (docs/serving.md).

        Raises `MLAError` while requests are under way.
        """
        with self._turn:
            self._check_idle("reset_prefix_cache")
            self._begin_anew()

    def close(self) -> None:
        """End all requests, and the engine. Where processes share the model, their `follow` returns.

        Of an engine that a newer one of the model has replaced, nothing is left to end.
        """
        with self._turn:
            for request in self._scheduler.requests():
                self.abort(request)
            self._under_way.clear()
            if self._ranks is not None and self._caches.are_in_place() and not self._is_closed:
                self._ranks.say(["close"])
            self._is_closed = True

    def _take_on(self, request: Request) -> None:
        with self._turn:
            self._check_caches(layers=True)
            self._scheduler.add(request)

    def _check_idle(self, name: str) -> None:
        self._check_caches()
        if self._scheduler.has_work():
            got, hint = f"{len(self._scheduler.requests())} under way", "wait for them, or abort them"
            raise MLAError(name, "an engine without requests", got, hint)
        while self.has_work():  # reports of requests that were aborted
            self.step()

    def _check_caches(self, *, layers: bool = False) -> None:
        """layers: whether the model's own list is looked at too, before a request; a step's time is too dear."""
        if self._is_closed:
            raise MLAError("engine", "one that is not closed", "a closed one", "make another")
        if not self._caches.are_in_place() or (layers and not self._caches.are_of_all_layers()):
            hint = "make an engine after moving the model or changing its layers, and use a model's newest one only"
            raise MLAError("model", "the caches that this engine allocated", "others", hint)


def _ranks_of(model: ServedModel) -> Ranks | None:
    """The processes that share a model, this one of which is rank 0; None where it has the whole model."""
    parallel: Parallel | None = getattr(model, "parallel", None)
    if parallel is None or parallel.ranks is None or parallel.size == 1:
        return None
    if parallel.rank > 0:
        got, hint = f"that of rank {parallel.rank}", "run `mla_compile.follow(model)` there"
        raise MLAError("model", "rank 0's part, as rank 0 takes requests", got, hint)
    return parallel.ranks
