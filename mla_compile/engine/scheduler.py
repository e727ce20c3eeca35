"""Plans each step: the rows that decode, the chunks of prompts, and the requests that get pages.

Pure bookkeeping: no clock, no device, and the same calls give the same plans. The engine's loop:

    while scheduler.has_work() or a launched step is unreported:
        plan = scheduler.plan()
        if plan:
            launch(plan)
        if reports of an earlier step are in, or nothing was launched:
            scheduler.update(the oldest plan that has not been reported, its reports)

Steps run in the order of their plans, so each step finds in a page what the step before left there: pages are handed on
while a launched step still uses them. The scheduler knows only bounds of unreported steps. A row that has ended or was
aborted may be in one of them: its late reports are dropped.
"""

import itertools
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mla_compile.engine.config import FittedConfig
from mla_compile.engine.pages import PagePool
from mla_compile.engine.reports import RowReport
from mla_compile.engine.request import Request
from mla_compile.errors import MLAError
from mla_compile.packing import fitting_prompt_tokens


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `start + length` of a request, to prefill; after the last chunk a token is sampled."""

    request: Request
    start: int
    length: int
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Grant:
    """Pages for a request's block table, from entry `first` on."""

    request: Request
    first: int
    pages: list[int]


@dataclass(frozen=True)
class Plan:
    """One step. True if there is anything to run.

    Applied before the step, in this order:

    removed: requests that no longer run: they ended, were aborted or preempted.
    admitted: requests that begin to run, for the first time or again, with this step or a later one. Their tokens
        before their first chunk are in the cache already.
    grants: pages.

    Run in the step:

    decodes: requests that verify k drafts, 1 + k query tokens each.
    chunks: parts of prompts, packed in this order.
    """

    removed: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def first_sampled(self) -> list[Request]:
        """The requests whose prompts are completed, which sample their first token."""
        return [chunk.request for chunk in self.chunks if chunk.is_last]

    @property
    def sampled(self) -> list[Request]:
        """All requests that sample, in the order of their reports: `decodes`, then `first_sampled`."""
        return [*self.decodes, *self.first_sampled]


class Scheduler:
    """Shares rows, pages and the tokens of a step among requests: by priority, then among clients, then by arrival.

    - A free row goes to the waiting request of the highest priority; among equals to a client with the fewest rows,
      then to the first to arrive. That request waits for pages for its whole prompt and the step after it, and no other
      is admitted meanwhile. So no later request of its priority is admitted before the first one of a client without a
      row; and requests of one client, or of no named one, are admitted in the order of their arrival.
    - Requests rank by priority, then by first admission. So a request that fair sharing admits early takes no page and
      no place in a step from running requests.
    - Decode rows come first in every step; prompts share the rest of its tokens in the order of their ranks. A prompt
      that does not fit is cut to a size that CUDA graphs are recorded for.
    - When a decode row needs a page and none is free, the lowest-ranking running request releases all of its pages
      and waits again at its rank, to prefill its prompt and what it has emitted. The highest-ranking one is never
      preempted, so there is always progress. A waiting request takes nothing from running ones.
    - In `batch_invariant` engines a request waits for pages for its longest text, so none is preempted; and pages with
      emitted tokens are never shared: a latent from decode is not bitwise equal to prefill's of the same text, and must
      not replace it.

    Args:
        config: of the engine. `max_keys_per_step`: number of keys of a prompt that a step reads in one piece, and where
            prompts are cut (see `prefill_segment`); None for prompts that run in one piece.
        lookahead: see `PagePool`.
    """

    def __init__(self, config: FittedConfig, lookahead: int) -> None:
        k, grant = config.num_speculative_tokens, config.pages_per_grant
        self.pool = PagePool(
            1 + (config.num_pages - 1) // grant,
            config.page_size * grant,
            lookahead=lookahead,
            keeps_prefixes=config.prefix_caching,
        )
        self.q_len, self.max_rows = 1 + k, config.max_rows
        self.max_tokens_per_step = config.max_tokens_per_step
        self._max_keys, self._longest_captured = config.max_keys_per_step, config.captured_prompt_tokens
        self._batch_invariant = config.batch_invariant
        # Verification writes k + 1 positions; drafting after the accepted ones writes up to the 2k-th.
        self._reach = max(1 + k, 2 * k)
        self._numbers = itertools.count()  # of arrivals and admissions
        self._waiting: dict[str | None, list[Request]] = {}  # by client; each list by rank, none empty
        self._running: list[Request] = []  # by rank
        self._moving: Request | None = None  # it may be in no queue where an interrupt ends a method early
        self._removed: list[Request] = []  # since the last plan
        self._misfit: tuple[Request, int] | None = None  # a request that did not fit, and the free pages then

    @property
    def num_pages_in_use(self) -> int:
        """Pages of the pool that requests hold."""
        return self.pool.num_pages - 1 - self.pool.num_free

    @property
    def num_waiting(self) -> int:
        # A copy: other threads may call this during a step.
        return sum(map(len, list(self._waiting.values())))

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._running or self._waiting)

    def requests(self) -> list[Request]:
        """All requests that have not ended, running ones first."""
        queued = [*self._running, *itertools.chain(*self._waiting.values())]
        return queued if self._moving is None or self._moving in queued else [*queued, self._moving]

    def check_size(self, request: Request) -> None:
        """Raises `MLAError` for more tokens than all pages hold."""
        capacity = (self.pool.num_pages - 1) * self.pool.page_size
        if request.max_len - 1 > capacity:
            hint = "lower max_len or allocate more pages"
            raise MLAError("max_len", f"at most {capacity + 1}, which fill all pages", request.max_len, hint)

    def add(self, request: Request) -> None:
        """Queue a request, whose prompt is shorter than `max_len`; raises as `check_size`."""
        self.check_size(request)
        self._moving = request
        request.rank = request.priority, True, next(self._numbers)
        self._wait(request)
        self._moving = None

    def abort(self, request: Request) -> None:
        """End a request now, and free its pages at once. A request that has ended stays as it is."""
        if not request.has_ended:
            request.end("abort")
            if request.rank is not None:
                self._stop(request)

    def forget_prefixes(self) -> None:
        """Stop sharing what is cached now, and never share what the running requests cache."""
        self.pool.forget()
        for request in self._running:
            request.is_outdated = True

    def plan(self) -> Plan:
        """The plan of the next step; the caller must launch it if it is not empty."""
        plan = Plan(removed=self._removed)  # the list itself: preemptions add to it
        ending: list[Request] = []
        may_admit = self._plan_decodes(plan, ending)
        self._plan_chunks(plan, self.q_len * (len(plan.decodes) + len(ending)), may_admit=may_admit)
        if plan:  # an empty plan is dropped, and the next one removes these
            self._removed = []
            # A step whose logits are not finite emits no token, so these rows may not have ended: they run in this one.
            for request in ending:
                if request.is_running:
                    self._decode(plan, request)
        return plan

    def update(self, plan: Plan, reports: Sequence[RowReport]) -> None:
        """Apply the reports of the oldest launched plan: requests grow and end. Reports of ended requests are dropped.

        reports: one for each of the plan's `sampled`, in that order.
        """
        for request in (*plan.decodes, *(chunk.request for chunk in plan.chunks)):
            request.num_steps -= 1
        ends = [None] * len(plan.decodes) + [chunk.end for chunk in plan.chunks if chunk.is_last]
        for request, prompt_end, report in zip(plan.sampled, ends, reports, strict=True):
            request.num_samples -= 1
            if not request.has_ended:
                self._grow(request, prompt_end, report)

    def _grow(self, request: Request, prompt_end: int | None, report: RowReport) -> None:
        """prompt_end: the end of the chunk that the report is of; None for a decode step's report."""
        if prompt_end is None:
            request.num_cached -= self.q_len - len(report.tokens)
        # A prompt is registered once a token was sampled after it: finite logits prove that the latents they attended
        # to are finite. Without that token: the MTP layer has read it only if the row goes on.
        if prompt_end is not None and report.error is None:
            self._commit(request, prompt_end)
        request.take(report, is_step=prompt_end is None)
        num_cached = request.num_tokens - 1
        # The MTP layer does not run for a row that has ended on the device, so its last tokens are not registered.
        if report.active and num_cached % self.pool.page_size < len(report.tokens):
            self._commit(request, num_cached)  # else no page has become full
        if request.has_ended:
            self._stop(request)

    def _commit(self, request: Request, num_cached: int) -> None:
        # A preempted request has lost its pages. A running one still has them, as readmission waits for reports.
        if request.is_running and not request.is_outdated:
            if self._batch_invariant:
                num_cached = min(num_cached, len(request.prompt))
            self.pool.commit(request.pages, request.tokens, num_cached)

    def _plan_decodes(self, plan: Plan, ending: list[Request]) -> bool:
        """Returns whether all requests that needed pages got them without a preemption.

        ending: this method appends the requests that the launched steps will end at the latest.
        """
        reach, page_size = self._reach, self.pool.page_size
        num_running = len(self._running)
        for request in self._running:  # preemptions may shorten it at its end
            if not request.is_decoding:
                continue
            if request.will_have_ended:
                ending.append(request)
                continue
            has_room = request.num_cached + reach <= len(request.pages) * page_size
            if not has_room and not self._extend(plan, request):
                continue
            self._decode(plan, request)
        return len(self._running) == num_running

    def _decode(self, plan: Plan, request: Request) -> None:
        plan.decodes.append(request)
        request.num_cached += self.q_len
        request.num_steps += 1
        request.num_samples += 1

    def _plan_chunks(self, plan: Plan, num_decode_tokens: int, *, may_admit: bool) -> None:
        room = self.max_tokens_per_step - num_decode_tokens
        # A cut prompt fills a padded size exactly.
        fitting = fitting_prompt_tokens(room, self._longest_captured)
        full = max(fitting, self.max_tokens_per_step - self.q_len * self.max_rows)
        tokens, keys = 0, self._max_keys
        prefilling = deque(request for request in self._running if not request.is_decoding)
        while tokens < full:
            head = self._next_waiting() if may_admit and len(self._running) < self.max_rows else None
            if head is not None and (not prefilling or _rank(head) < _rank(prefilling[0])):
                may_admit = self._admit(plan, head)
                if not may_admit:
                    continue
                request = head
            elif prefilling:
                request = prefilling.popleft()
            else:
                break
            start, left = request.num_cached, request.num_tokens - request.num_cached
            length = left if left <= room - tokens else full - tokens
            if keys is not None and self._max_keys is not None:
                cached = start % self._max_keys
                length = min(length, keys - cached)
                if length <= 0:
                    break  # the first one always finds room
                keys -= cached + length
            chunk = Chunk(request, start, length, length == left)
            plan.chunks.append(chunk)
            tokens += length
            request.num_cached = chunk.end
            request.is_decoding = chunk.is_last
            request.num_steps += 1
            request.num_samples += chunk.is_last

    def _next_waiting(self) -> Request | None:
        """The request that the next free row is for."""
        firsts = [queue[0] for queue in self._waiting.values()]
        if len(firsts) < 2:
            return firsts[0] if firsts else None
        rows = Counter(request.client for request in self._running)
        return min(firsts, key=lambda first: (first.priority, rows[first.client], _rank(first)))

    def _admit(self, plan: Plan, request: Request) -> bool:
        """Admit a waiting request if there are pages for it."""
        if request.num_steps:  # it was preempted, and unreported steps may still add tokens
            return False
        if self._misfit is not None and self._misfit[0] is request and self.pool.num_free <= self._misfit[1]:
            return False  # saves matching a long prompt again in every step
        num_free = self.pool.num_free
        pages = self.pool.match(request.tokens)
        num_cached = request.max_len if self._batch_invariant else request.num_tokens
        more = self.pool.allocate(self._pages_needed(request, num_cached) - len(pages))
        if more is None:
            self.pool.release(pages)
            self._misfit = request, num_free
            return False
        self._misfit, self._moving = None, request
        self._leave_queue(request)
        priority, is_new, _ = _rank(request)
        if is_new:
            request.rank = priority, False, next(self._numbers)
        insort(self._running, request, key=_rank)
        self._moving = None
        request.is_running, request.is_outdated = True, False
        request.num_cached = request.num_reused_tokens = len(pages) * self.pool.page_size
        plan.admitted.append(request)
        self._grant(plan, request, [*pages, *more])
        return True

    def _extend(self, plan: Plan, request: Request) -> bool:
        """Allocate pages to a decode row for one more step; False if the row itself was preempted."""
        missing = self._pages_needed(request, request.num_cached) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self.pool.allocate(missing)) is None:
            self._moving = victim = self._running[-1]
            self._stop(victim)
            self._wait(victim)
            self._moving = None
            if victim is request:
                return False
        self._grant(plan, request, pages)
        return True

    def _pages_needed(self, request: Request, num_cached: int) -> int:
        """Pages for a decode step after `num_cached` tokens."""
        # The token at the last position is never an input.
        return self.pool.pages_for(min(num_cached + self._reach, request.max_len - 1))

    def _grant(self, plan: Plan, request: Request, pages: list[int]) -> None:
        plan.grants.append(Grant(request, len(request.pages), pages))
        request.pages += pages

    def _stop(self, request: Request) -> None:
        """Remove a request from its queue, and release its pages."""
        self._leave_queue(request)
        if request.is_running:
            self._removed.append(request)
        self.pool.release(request.pages)
        request.is_running, request.pages, request.is_decoding = False, [], False

    def _wait(self, request: Request) -> None:
        insort(self._waiting.setdefault(request.client, []), request, key=_rank)

    def _leave_queue(self, request: Request) -> None:
        queue = self._running if request.is_running else self._waiting[request.client]
        del queue[bisect_left(queue, _rank(request), key=_rank)]
        if not queue and not request.is_running:
            del self._waiting[request.client]


def _rank(request: Request) -> tuple[int, bool, int]:
    assert request.rank is not None, "every request in a queue has one"
    return request.rank
