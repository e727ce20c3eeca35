"""A toy engine around the real scheduler and page pool, for traces of requests.

The model's next token is a function of the whole text before it. The caches hold, per slot of a page, the text that
was there when the slot was written: what a real cache holds as numbers, exactly. So each read can be checked, and each
write. The device is simulated at the moment of the launch; the host hears of it `lag` steps later. The order of running
requests and those that a plan removes are private to the scheduler: the checks of its invariants read them.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_compile.defaults import DrafterName
from mla_compile.engine.config import FittedConfig
from mla_compile.engine.pages import DUMMY_PAGE, PagePool
from mla_compile.engine.reports import RowReport
from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Chunk, Plan, Scheduler
from tests.engine.engines import is_registered, references

EOS = 0
DECODED = 10**9
"""What decode adds to the number of a text, where its latents must not stand for those of prefill."""


@dataclass(frozen=True)
class Arrival:
    """A request of a trace.

    step: when it arrives.
    num_shared: tokens of its prompt that are the beginning of a text that all requests share.
    num_own: tokens that follow them, drawn from `seed`.
    max_new_tokens: at which it ends.
    abort_step: when it is aborted, or None.
    num_until_stop: the host finds a stop string as soon as it knows this many of its new tokens, or None.
    client: whom it is of.
    grammar: the kind of its grammar, in the real engine only; see `test_grammar.grammar`.
    """

    step: int
    num_shared: int
    num_own: int
    max_new_tokens: int
    seed: int = 0
    priority: int = 0
    abort_step: int | None = None
    num_until_stop: int | None = None
    client: str | None = None
    grammar: str | None = None

    def prompt(self) -> list[int]:
        shared, own = random.Random(99), random.Random(self.seed)
        return [
            *(shared.randrange(1, 4) for _ in range(self.num_shared)),
            *(own.randrange(1, 4) for _ in range(self.num_own)),
        ]


@dataclass(frozen=True)
class Trace:
    """Requests, and the engine that they meet.

    spare_pages: beyond those that the longest request needs.
    spare_tokens: in a step, beyond those that `max_rows` decode rows take.
    lag: steps that the host is late by.
    acceptance: with which probability a draft is right.
    vocab_size: of the model; one token of it ends a row.
    few_drafts: requests have different numbers of drafts, up to k; in the real engine only.
    batch_invariant: whether latents of decode and of prefill are distinguished.
    poison: what an id makes NaN or infinite where it is read, and the id; in the real engine only. See `engine_traces`.
    """

    arrivals: tuple[Arrival, ...]
    k: int = 1
    page_size: int = 4
    spare_pages: int = 100
    max_rows: int = 4
    spare_tokens: int = 8
    lag: int = 1
    acceptance: float = 0.5
    vocab_size: int = 20
    few_drafts: bool = False
    batch_invariant: bool = False
    poison: tuple[str, int] | None = None
    seed: int = 0

    @property
    def drafter(self) -> DrafterName:
        """Half of the seeds have each."""
        return "mtp" if self.seed % 2 == 0 else "ngram"

    @property
    def has_mtp(self) -> bool:
        """Whether the caches include that of an MTP layer."""
        return self.k > 0 and self.drafter == "mtp"

    def num_pages(self) -> int:
        longest = max(a.num_shared + a.num_own + a.max_new_tokens - 1 for a in self.arrivals)
        return 1 + -(-longest // self.page_size) + self.spare_pages


def maybe(values: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.none(), values)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    k = draw(st.integers(0, 3))
    arrivals = st.builds(
        Arrival,
        step=st.integers(0, 12),
        num_shared=st.sampled_from([0, 4, 8, 9, 16]),
        num_own=st.one_of(st.just(1 + k), st.integers(1, 14)),
        max_new_tokens=st.integers(1, 24),
        seed=st.integers(0, 3),
        priority=st.sampled_from([0, 0, 1, 2]),
        abort_step=maybe(st.integers(0, 30)),
        num_until_stop=maybe(st.integers(1, 10)),
    )
    drawn = draw(st.lists(arrivals, min_size=1, max_size=8))
    clients: tuple[str | None, ...] = [(None,), (None, "a"), tuple("abc")][len(drawn) % 3]
    return Trace(
        arrivals=tuple(replace(a, client=clients[a.seed % len(clients)]) for a in drawn),
        k=k,
        page_size=draw(st.sampled_from([1, 2, 4, 8])),
        spare_pages=draw(st.sampled_from([0, 0, 1, 3, 10, 50])),
        max_rows=draw(st.integers(1, 4)),
        spare_tokens=draw(st.sampled_from([0, 1, 3, 8, 64])),
        lag=draw(st.sampled_from([1, 1, 0, 2])),
        acceptance=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        vocab_size=draw(st.sampled_from([4, 20, 1000])),
        few_drafts=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


def batch_invariant_traces() -> st.SearchStrategy[Trace]:
    """With few pages, so that requests wait for them."""

    def short_of_pages(trace: Trace) -> Trace:
        arrivals = tuple(replace(a, abort_step=None) for a in trace.arrivals)
        spare = trace.spare_pages % 4
        return replace(trace, arrivals=arrivals, spare_pages=spare, max_rows=4, batch_invariant=True)

    return st.builds(short_of_pages, traces())


def scheduler_of(num_pages: int, page_size: int, *, lookahead: int, **settings: Any) -> Scheduler:
    """One with few pages, say, as no engine's settings have them."""
    defaults = {
        "pages_per_grant": 1,
        "prefix_caching": True,
        "max_keys_per_step": None,
        "captured_prompt_tokens": 8192,
        "batch_invariant": False,
    }
    given = defaults | {"num_pages": num_pages, "page_size": page_size} | settings
    return Scheduler(cast("FittedConfig", SimpleNamespace(**given)), lookahead)


@dataclass
class Texts:
    """Numbers texts: each is known by the number of the text without its last token, and that token."""

    vocab_size: int
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens_after: list[int] = field(default_factory=lambda: [1])
    fingerprints: list[int] = field(default_factory=lambda: [1])

    def append(self, text: int, token: int) -> int:
        if (text, token) not in self.numbers:
            self.numbers[text, token] = len(self.fingerprints)
            fingerprint = (
                self.fingerprints[text] * 6364136223846793005 + token + 1442695040888963407
            ) % 2**64
            self.fingerprints.append(fingerprint)
            self.tokens_after.append((fingerprint >> 33) % self.vocab_size)
        return self.numbers[text, token]

    def of(self, tokens: list[int]) -> list[int]:
        """The numbers of all beginnings of a text, the shortest (one token) first."""
        text, numbers = 0, []
        for token in tokens:
            text = self.append(text, token)
            numbers.append(text)
        return numbers


@dataclass
class DeviceRow:
    """What the device knows of a request that runs."""

    num_prompt: int  # tokens, that prefill has to write
    tokens: list[int]  # as far as it was prefilled, or sampled
    texts: list[int]
    num_cached: int
    max_len: int
    pages: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    active: bool = False


class ToyDevice:
    """Runs plans, and checks all that they make it read and write."""

    def __init__(self, trace: Trace, pool: PagePool, texts: Texts) -> None:
        self.k, self.has_mtp, self.pool, self.texts = trace.k, trace.has_mtp, pool, texts
        self.acceptance, self.random = trace.acceptance, random.Random(trace.seed)
        self.decoded = DECODED * trace.batch_invariant
        self.rows: dict[Request, DeviceRow] = {}
        self.trunk = [[-1] * pool.page_size for _ in range(pool.num_pages)]
        self.mtp = [[-1] * pool.page_size for _ in range(pool.num_pages)]

    def launch(self, plan: Plan) -> list[RowReport]:
        for request in plan.removed:
            del self.rows[request]
        for request in plan.admitted:
            assert request not in self.rows, "a request was given two rows"
            self.rows[request] = DeviceRow(len(request.prompt), [], [], 0, request.max_len)
        for grant in plan.grants:
            pages = self.rows[grant.request].pages
            assert len(pages) == grant.first, "a hole in a block table"
            pages += grant.pages
        held = Counter(page for row in self.rows.values() for page in row.pages)
        for page in range(self.pool.num_pages):
            assert references(self.pool, page) == held[page], "block tables and references disagree"
        assert held[DUMMY_PAGE] == 0
        reports = [self._decode(self.rows[request]) for request in plan.decodes]
        for chunk in plan.chunks:
            row = self.rows[chunk.request]
            self._prefill(row, chunk)
            if chunk.is_last:
                reports.append(self._start(row))
        return reports

    def _prefill(self, row: DeviceRow, chunk: Chunk) -> None:
        tokens = chunk.request.tokens
        if chunk.start and not row.tokens:  # found in the cache
            row.tokens = tokens[: chunk.start]
            row.num_cached = chunk.start
        assert chunk.start == row.num_cached == len(row.tokens), (
            "a chunk does not begin where the last one ended"
        )
        assert chunk.end == len(tokens) or not chunk.is_last
        row.tokens = tokens[: chunk.end]
        row.texts = self.texts.of(row.tokens)
        successors = self.texts.of(tokens[: chunk.end + 1])[1:]
        self._read(self.trunk, row, row.texts, chunk.start)
        if self.has_mtp:
            self._read(self.mtp, row, successors, chunk.start)
        for position in range(chunk.start, chunk.end):
            self._write(self.trunk, row, position, row.texts[position])
            if self.has_mtp:
                self._write(
                    self.mtp, row, position, successors[position] if position < len(successors) else -2
                )
        row.num_cached = chunk.end

    def _start(self, row: DeviceRow) -> RowReport:
        first = self.texts.tokens_after[row.texts[-1]]
        self._emit(row, [first])
        row.active = first != EOS and len(row.tokens) < row.max_len
        if row.active:
            if self.has_mtp:
                self._write(self.mtp, row, row.num_cached - 1, row.texts[-1])
            self._draft(row)
        return RowReport([first], row.active)

    def _decode(self, row: DeviceRow) -> RowReport:
        if not row.active:
            return RowReport([], active=False)
        n, run = row.num_cached, min(self.k + 1, row.max_len - 1 - row.num_cached)
        assert len(row.tokens) == n + 1
        fed = [row.tokens[-1], *row.drafts]
        latents = [text + self.decoded * (i >= row.num_prompt) for i, text in enumerate(row.texts)]
        self._read(self.trunk, row, latents, n)
        if self.has_mtp:
            self._read(self.mtp, row, row.texts[1:], n)
        # (rejected drafts make texts of their own, which a later read would notice)
        text, emitted, agrees = row.texts[n - 1], [], True
        for j in range(run):
            text = self.texts.append(text, fed[j])
            self._write(self.trunk, row, n + j, text + self.decoded)
            if agrees:
                emitted.append(self.texts.tokens_after[text])
                agrees = emitted[-1] != EOS and j < self.k and fed[j + 1] == emitted[-1]
        self._emit(row, emitted)
        row.active = EOS not in emitted and len(row.tokens) < row.max_len
        row.num_cached = n + len(emitted)
        if row.active:
            for j in range(run if self.has_mtp else 0):
                successor = row.texts[n + j + 1] if j < len(emitted) else -2
                self._write(self.mtp, row, n + j, successor)
            self._draft(row)
        return RowReport(emitted, row.active)

    def _draft(self, row: DeviceRow) -> None:
        row.drafts, text = [], row.texts[-1]
        for j in range(self.k):
            token = self.texts.tokens_after[text]
            if self.random.random() >= self.acceptance:
                token = self.random.randrange(self.texts.vocab_size)
            if self.has_mtp and j < self.k - 1 and row.num_cached + j + 2 < row.max_len:
                self._write(self.mtp, row, row.num_cached + j, -2)
            row.drafts.append(token)
            text = self.texts.append(text, token)

    def _emit(self, row: DeviceRow, tokens: list[int]) -> None:
        for token in tokens:
            row.tokens.append(token)
            row.texts.append(self.texts.append(row.texts[-1], token))

    def _read(self, cache: list[list[int]], row: DeviceRow, expected: list[int], count: int) -> None:
        pages = row.pages[: self.pool.pages_for(count)]
        found = [latent for page in pages for latent in cache[page]]
        which = "trunk" if cache is self.trunk else "MTP layer"
        assert found[:count] == expected[:count], f"the {which} reads what another text has written"

    def _write(self, cache: list[list[int]], row: DeviceRow, position: int, value: int) -> None:
        assert position < row.max_len - 1, "the last position is never run"
        index, offset = divmod(position, self.pool.page_size)
        assert index < len(row.pages), "written past the row's pages"
        page = row.pages[index]
        assert references(self.pool, page) == 1, "written to a shared page"
        assert not is_registered(self.pool, page), "written to a page that others may find"
        cache[page][offset] = value


@dataclass
class Outcome:
    """What a trace has exercised."""

    num_steps: int = 0
    num_mixed_steps: int = 0
    num_preemptions: int = 0
    num_reused_tokens: int = 0
    num_late_reports: int = 0
    num_aborted: int = 0
    tokens: list[list[int]] = field(default_factory=list)


class ToyEngine:
    """The engine's loop, with a check of everything that a plan promises."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        q_len = 1 + trace.k
        self.scheduler = scheduler_of(
            trace.num_pages(),
            trace.page_size,
            lookahead=int(trace.has_mtp),
            num_speculative_tokens=trace.k,
            max_rows=trace.max_rows,
            max_tokens_per_step=trace.max_rows * q_len + trace.spare_tokens,
            batch_invariant=trace.batch_invariant,
        )
        self.pool = self.scheduler.pool
        self.texts = Texts(trace.vocab_size)
        self.device = ToyDevice(trace, self.pool, self.texts)
        self.outcome = Outcome()
        self.reports: deque[tuple[Plan, list[RowReport]]] = deque()
        self.arrived: dict[Request, int] = {}
        self.admitted: dict[Request, int] = {}  # when first

    def run(self) -> Outcome:
        """Run the trace to its end, and check what came of it."""
        return self.serve(self.trace.arrivals)

    def serve(self, given: tuple[Arrival, ...]) -> Outcome:
        """Run these requests to their end, and check what came of them."""
        self.trace = replace(self.trace, arrivals=given)
        self.arrived, self.admitted, self.outcome.tokens = {}, {}, []
        arrivals = list(enumerate(given))
        requests: dict[int, Request] = {}
        stopped: set[int] = set()
        clock, idle_until = 0, max(a.step for a in self.trace.arrivals)
        # Every step gives the first in rank a chunk or a token; preempted ones prefill again.
        limit = (
            idle_until
            + 50
            + 20 * sum(a.num_shared + a.num_own + a.max_new_tokens for a in self.trace.arrivals)
        )
        while clock <= idle_until or self.scheduler.has_work() or self.reports:
            assert clock < limit, "no end"
            for number, arrival in arrivals:
                if arrival.step == clock:
                    prompt = arrival.prompt()
                    max_len = len(prompt) + arrival.max_new_tokens
                    requests[number] = Request(prompt, max_len, arrival.priority, client=arrival.client)
                    self.arrived[requests[number]] = len(self.arrived)
                    self.scheduler.add(requests[number])
                if arrival.abort_step is not None and number in requests and arrival.abort_step == clock:
                    self._abort(requests[number], stopped, number)
            self._step()
            for number, arrival in arrivals:
                request = requests.get(number)
                if request is None or arrival.num_until_stop is None or request.has_ended:
                    continue
                if len(request.completion.token_ids) >= arrival.num_until_stop:
                    self._abort(request, stopped, number)
            clock += 1
        self._check_end(requests, stopped)
        return self.outcome

    def _abort(self, request: Request, stopped: set[int], number: int) -> None:
        if not request.has_ended:
            stopped.add(number)
            self.outcome.num_aborted += 1
        self.scheduler.abort(request)
        self.scheduler.abort(request)  # again: nothing happens
        assert request.has_ended and not request.is_running and not request.pages

    def _step(self) -> None:
        waiting = [r for r in self.scheduler.requests() if not r.is_running]
        running = list(self.scheduler._running)
        for request in running:
            row = self.device.rows[request]
            excess = request.num_cached - row.num_cached
            assert not row.active or 0 <= excess <= self.trace.k * request.num_steps, "a wrong bound"
        plan = self.scheduler.plan()
        self._check_plan(plan, waiting, running)
        if plan:
            self.reports.append((plan, self.device.launch(plan)))
            self.outcome.num_steps += 1
            self.outcome.num_mixed_steps += bool(plan.decodes and plan.chunks)
        elif self.scheduler.num_running or self.scheduler.num_waiting:
            assert self.reports, "deadlock: nothing runs and nothing is awaited"
        if self.reports and (not plan or len(self.reports) > self.trace.lag):
            launched, reports = self.reports.popleft()
            ended = [request.has_ended for request in launched.sampled]
            self.outcome.num_late_reports += sum(ended)
            before = [request.num_tokens for request in launched.sampled]
            self.scheduler.update(launched, reports)
            for request, report, late, count in zip(launched.sampled, reports, ended, before):
                grown = request.num_tokens - count
                assert grown == (0 if late else len(report.tokens)), "a late token was kept, or one was lost"

    def _check_plan(self, plan: Plan, waiting: list[Request], running: list[Request]) -> None:
        q_len = self.scheduler.q_len
        num_tokens = q_len * len(plan.decodes) + sum(chunk.length for chunk in plan.chunks)
        assert num_tokens <= self.scheduler.max_tokens_per_step
        rows = [*plan.decodes, *(chunk.request for chunk in plan.chunks)]
        assert len(set(rows)) == len(rows) <= self.trace.max_rows
        assert all(request.is_running for request in rows), "a request runs without its row"
        assert all(chunk.length >= 1 for chunk in plan.chunks)
        ranks = [request.rank for request in self.scheduler._running]
        assert ranks == sorted(ranks)
        preempted = [request for request in running if not request.is_running]
        self.outcome.num_preemptions += len(preempted)
        for request in preempted:
            assert all(rank < request.rank for rank in ranks), "a lower-ranking row kept its pages"
            assert not plan.admitted
        admitted = plan.admitted
        self._check_admitted(admitted, waiting, running)
        assert all(request.num_steps == 1 for request in admitted), "admitted while its reports are awaited"
        self.outcome.num_reused_tokens += sum(request.num_reused_tokens for request in admitted)
        # Every decode row that may go on does, whatever prompts there are.
        decoding = [r for r in running if r.is_running and r.num_steps and r.is_decoding]
        for request in decoding if plan else []:
            assert request in rows, "a decode row waits"

    def _check_admitted(
        self, admitted: list[Request], waiting: list[Request], running: list[Request]
    ) -> None:
        """Each row goes to the highest priority, then to a client with the fewest rows, then by arrival."""
        running, waiting = list(running), list(waiting)
        for request in admitted:
            rows = Counter(r.client for r in running)
            turns = {
                r: (r.priority, rows[r.client], r not in self.admitted, self.admitted.get(r, self.arrived[r]))
                for r in waiting
            }
            assert request is min(waiting, key=turns.__getitem__), "out of turn"
            if request not in self.admitted:
                self.admitted[request] = len(self.admitted)
                assert request.rank is not None
                for other in running:
                    assert other.priority > request.priority or other.rank < request.rank, (
                        "a request that has waited outranks one that runs"
                    )
            waiting.remove(request)
            running.append(request)

    def _check_end(self, requests: dict[int, Request], stopped: set[int]) -> None:
        for number, arrival in enumerate(self.trace.arrivals):
            request = requests[number]
            assert request.has_ended
            alone = self.alone(arrival)
            emitted = request.completion.token_ids
            expected = alone[: len(emitted)] if number in stopped else alone
            assert emitted == expected, f"request {number}: {emitted} instead of {expected}"
            self.outcome.tokens.append(emitted)
        assert self.pool.num_free == self.pool.num_pages - 1, "pages leaked"
        assert self.scheduler.num_running == 0 and not self.device.rows.keys() - self.scheduler._removed
        assert not any(references(self.pool, page) for page in range(self.pool.num_pages))

    def alone(self, arrival: Arrival) -> list[int]:
        """The toy model's tokens, generated one at a time."""
        text, emitted = self.texts.of(arrival.prompt())[-1], []
        while len(emitted) < arrival.max_new_tokens and EOS not in emitted:
            emitted.append(self.texts.tokens_after[text])
            text = self.texts.append(text, emitted[-1])
        return emitted


def run(trace: Trace) -> Outcome:
    return ToyEngine(trace).run()


def check_traces(
    run: Callable[[Trace], object], count: int, drawn: st.SearchStrategy[Trace] | None = None
) -> Counter[str]:
    """Run random traces; returns in how many of them each number of an outcome was positive."""
    met: Counter[str] = Counter()

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(traces() if drawn is None else drawn)
    def check(trace: Trace) -> None:
        outcome = run(trace)
        met["traces"] += 1
        for name, value in vars(outcome).items():
            if isinstance(value, int):
                met[name] += value > 0

    check()
    print(dict(met))
    return met
