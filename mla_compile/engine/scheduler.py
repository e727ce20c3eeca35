"""What each step runs: which rows decode, which parts of which prompts, and who gets the pages for it.

Pure bookkeeping: no clock, no device, and the same calls give the same plans. The engine's loop:

    while scheduler.has_work():
        plan = scheduler.plan()
        if plan:
            launch(plan)
        if reports of an earlier step are in, or nothing was launched:
            scheduler.update(reports of the oldest step that has not been reported)

Steps run in the order of their plans, so what one step leaves in a page is there for the next: pages are handed on
while a step that uses them is still under way. Of steps under way only bounds are known. A row that turns out to have
ended, or was aborted, may be in one of them: its late reports are dropped.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mla_compile.engine.pages import PagePool
from mla_compile.engine.reports import RowReport
from mla_compile.errors import MLAError


@dataclass(eq=False)
class Request:
    """One prompt and what has become of it. Only its scheduler changes it.

    tokens: the prompt and what is known to follow it.
    num_prompt_tokens: of them.
    max_len: tokens, prompt included, at which it ends.
    rank: priority, lower first, then arrival.
    row: it and its slot, the row of the engine's state that it has while it runs; else None.
    pages: that it holds, in order.
    has_ended: nothing follows any more.
    num_reused_tokens: that were found in the cache when it last began to run.
    num_preemptions: how often it lost its pages to others.
    num_cached: once all launched steps have run, at most so many of its tokens are in the cache; while it prefills,
        exactly so many.
    is_decoding: it has sampled since its cache was last built, or will have once all launched steps have run.
    num_steps: launched ones that it is in and that were not reported yet.
    num_samples: of these, the ones that give it at least one token, if it has not ended and its logits are finite.
    """

    tokens: list[int]
    max_len: int
    rank: tuple[int, int]
    num_prompt_tokens: int = field(init=False)
    row: "Row | None" = None
    pages: list[int] = field(default_factory=list)
    has_ended: bool = False
    num_reused_tokens: int = 0
    num_preemptions: int = 0
    num_cached: int = 0
    is_decoding: bool = False
    num_steps: int = 0
    num_samples: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def slot(self) -> int | None:
        return None if self.row is None else self.row.slot

    @property
    def will_have_ended(self) -> bool:
        """Whether it ends with the launched steps at the latest."""
        return len(self.tokens) + self.num_samples >= self.max_len


@dataclass(frozen=True)
class Row:
    """A request and the slot that it had when this was planned."""

    slot: int
    request: Request


@dataclass(frozen=True)
class Chunk(Row):
    """Tokens `start` to `start + length` of a request, to be prefilled; after the last ones a token is sampled."""

    start: int
    length: int
    is_last: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Grant:
    """Pages for a slot's block table, from entry `first` on."""

    slot: int
    first: int
    pages: list[int]


@dataclass(frozen=True)
class Plan:
    """One step. True where there is anything to run.

    What changes first, in this order:

    freed_slots: slots whose requests ended, were aborted or preempted.
    admitted: requests that begin to run, again perhaps, in a slot that may just have been freed. Their tokens before
        their first chunk are in the cache already.
    grants: pages.

    What runs:

    decodes: rows that verify k drafts, 1 + k query tokens each.
    chunks: parts of prompts, packed in this order.
    """

    freed_slots: list[int] = field(default_factory=list)
    admitted: list[Row] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    decodes: list[Row] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def sampled(self) -> list[Row]:
        """The rows that sample, in the order of their reports: decode rows, then prompts that are completed."""
        return [*self.decodes, *(chunk for chunk in self.chunks if chunk.is_last)]


class Scheduler:
    """Shares slots, pages and the tokens of a step among requests, first come first served within a priority.

    - Nobody is admitted before those who rank higher, and only with pages for the whole prompt and the step after it.
    - Decode rows come first in every step; prompts share what is left of its tokens in the order of their ranks.
    - When a decode row needs a page and none is free, the lowest-ranking running request gives all of its pages back
      and waits again at its rank, to prefill its prompt and what it has emitted. The highest-ranking one never does,
      so there is always progress. A waiting request takes nothing from running ones.

    Args:
        pages: what its requests' pages come from; nobody else takes any.
        num_speculative_tokens: drafts per step, k >= 0.
        max_rows: requests that run at once, each in a slot from 0 to `max_rows - 1`.
        max_tokens_per_step: query tokens of a step, at least `max_rows * (1 + k)`.

    Raises:
        MLAError: a bad argument, named.
    """

    def __init__(
        self, pages: PagePool, *, num_speculative_tokens: int, max_rows: int, max_tokens_per_step: int
    ) -> None:
        k = num_speculative_tokens
        if k < 0:
            raise MLAError("num_speculative_tokens", "at least 0", k)
        if max_rows < 1:
            raise MLAError("max_rows", "at least 1", max_rows)
        if max_tokens_per_step < max_rows * (1 + k):
            expected = f"at least max_rows * (1 + num_speculative_tokens) = {max_rows * (1 + k)}"
            raise MLAError("max_tokens_per_step", expected, max_tokens_per_step)
        self.q_len = 1 + k
        self.max_tokens_per_step = max_tokens_per_step
        self._pool = pages
        # Verification writes k + 1 positions, drafting behind what it accepts up to the 2k-th.
        self._reach = max(1 + k, 2 * k)
        self.num_preemptions = 0
        self._num_arrived = 0
        self._waiting: list[Request] = []  # both by rank
        self._running: list[Request] = []
        self._free_slots = list(range(max_rows))  # a heap: low slots first
        self._freed: list[int] = []  # since the last plan
        self._launched: deque[Plan] = deque()
        self._misfit: tuple[Request, int] | None = None  # that was too long for so many free pages

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        """Whether a request has not ended, or a launched step was not reported."""
        return bool(self._running or self._waiting or self._launched)

    def add(self, token_ids: Sequence[int], *, max_len: int, priority: int = 0) -> Request:
        """Take on a prompt.

        max_len: tokens, prompt included, at which it ends, > those of the prompt.
        priority: lower ones first.

        Raises:
            MLAError: an empty prompt, one that leaves no token to generate, or more tokens than all pages hold.
        """
        if not token_ids:
            raise MLAError("token_ids", "at least one token", "an empty prompt")
        if len(token_ids) >= max_len:
            raise MLAError("token_ids", f"fewer than max_len = {max_len} tokens", len(token_ids))
        capacity = (self._pool.num_pages - 1) * self._pool.page_size
        if max_len - 1 > capacity:
            mend = "lower max_len or allocate more pages"
            raise MLAError("max_len", f"at most {capacity + 1}, which fill all pages", max_len, mend)
        request = Request(list(token_ids), max_len, (priority, self._num_arrived))
        self._num_arrived += 1
        insort(self._waiting, request, key=_rank)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, whatever it is doing; also where the host has found its end, at a stop string say.

        Its pages are free at once. One that has ended stays as it is.
        """
        if not request.has_ended:
            self._end(request)

    def plan(self) -> Plan:
        """What the next step runs; to be launched if it is not empty."""
        plan = Plan(freed_slots=self._freed)  # the list itself: preemptions add to it
        may_admit = self._plan_decodes(plan)
        self._plan_chunks(plan, may_admit=may_admit)
        if plan:  # else nothing is done with it, and the next one frees these slots
            self._launched.append(plan)
            self._freed = []
        return plan

    def update(self, reports: Sequence[RowReport]) -> list[tuple[Request, list[int]]]:
        """Take in what came of the oldest launched step.

        reports: one for each of its plan's `sampled`, in that order.

        Returns:
            The requests that have grown, and by which tokens; late reports of ended ones are left out.

        Raises:
            MLAError: no step was launched, or a number of reports that is not its; nothing has changed.
        """
        if not self._launched:
            raise MLAError("reports", "those of a launched step", "no step launched")
        sampled = self._launched[0].sampled
        if len(reports) != len(sampled):
            raise MLAError("reports", f"one for each of the {len(sampled)} rows that sampled", len(reports))
        plan = self._launched.popleft()
        for row in (*plan.decodes, *plan.chunks):
            row.request.num_steps -= 1
        grown = []
        q_len, page_size = self.q_len, self._pool.page_size
        for row, report in zip(sampled, reports, strict=True):
            request, tokens = row.request, report.tokens
            request.num_samples -= 1
            if request.has_ended:
                continue
            # Not before a token was chosen behind them: finite logits vouch for all latents that they were made of.
            if isinstance(row, Chunk) and report.error is None:
                self._commit(request, row.end)
            request.tokens += tokens
            grown.append((request, tokens))
            if not isinstance(row, Chunk):
                request.num_cached -= q_len - len(tokens)
            if report.active:
                num_cached = len(request.tokens) - 1
                if num_cached % page_size < len(tokens):  # else no page has become full
                    self._commit(request, num_cached)
            else:
                # Its last tokens are not registered: the MTP layer does not run for a row that has ended.
                self._end(request)
        return grown

    def _commit(self, request: Request, num_cached: int) -> None:
        # One without a slot has lost its pages. One that has a slot has not lost any since, as it waits for reports.
        if request.row is not None:
            self._pool.commit(request.pages, request.tokens, num_cached)

    def _plan_decodes(self, plan: Plan) -> bool:
        """Returns whether all who wanted pages got them without a preemption."""
        q_len, reach, page_size = self.q_len, self._reach, self._pool.page_size
        num_running = len(self._running)
        for request in self._running:  # it may lose rows at its end
            if not request.is_decoding or request.will_have_ended:
                continue
            has_room = request.num_cached + reach <= len(request.pages) * page_size
            if not has_room and not self._grow(plan, request):
                continue
            assert request.row is not None
            plan.decodes.append(request.row)
            request.num_cached += q_len
            request.num_steps += 1
            request.num_samples += 1
        return len(self._running) == num_running

    def _plan_chunks(self, plan: Plan, *, may_admit: bool) -> None:
        budget = self.max_tokens_per_step - self.q_len * len(plan.decodes)
        prefilling = deque(request for request in self._running if not request.is_decoding)
        while budget > 0:
            head = self._waiting[0] if may_admit and self._waiting else None
            if head is not None and (not prefilling or head.rank < prefilling[0].rank):
                may_admit = self._admit(plan, head)
                if not may_admit:
                    continue
                request = head
            elif prefilling:
                request = prefilling.popleft()
            else:
                break
            assert request.row is not None
            start, left = request.num_cached, len(request.tokens) - request.num_cached
            chunk = Chunk(request.row.slot, request, start, min(budget, left), left <= budget)
            plan.chunks.append(chunk)
            budget -= chunk.length
            request.num_cached = chunk.end
            request.is_decoding = chunk.is_last
            request.num_steps += 1
            request.num_samples += chunk.is_last

    def _admit(self, plan: Plan, request: Request) -> bool:
        """Give the first one that waits a slot and pages, if they are there."""
        # One that was preempted may still grow by steps under way.
        if not self._free_slots or request.num_steps:
            return False
        if self._misfit is not None and self._misfit[0] is request and self._pool.num_free <= self._misfit[1]:
            return False  # without reading a long prompt again in every step
        num_free = self._pool.num_free
        pages = self._pool.match(request.tokens)
        more = self._pool.allocate(self._pages_needed(request, len(request.tokens)) - len(pages))
        if more is None:
            self._pool.release(pages)
            self._misfit = request, num_free
            return False
        self._misfit = None
        del self._waiting[0]
        insort(self._running, request, key=_rank)
        request.row = Row(heapq.heappop(self._free_slots), request)
        request.num_cached = request.num_reused_tokens = len(pages) * self._pool.page_size
        plan.admitted.append(request.row)
        self._grant(plan, request, [*pages, *more])
        return True

    def _grow(self, plan: Plan, request: Request) -> bool:
        """Give a decode row pages for one more step; False if it had to give back its own."""
        missing = self._pages_needed(request, request.num_cached) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self._pool.allocate(missing)) is None:
            victim = self._running[-1]
            self._stop(self._running, victim)
            victim.num_preemptions += 1
            self.num_preemptions += 1
            insort(self._waiting, victim, key=_rank)
            if victim is request:
                return False
        self._grant(plan, request, pages)
        return True

    def _pages_needed(self, request: Request, num_cached: int) -> int:
        """For a decode step after `num_cached` tokens."""
        # The last position is never run.
        return self._pool.pages_for(min(num_cached + self._reach, request.max_len - 1))

    def _grant(self, plan: Plan, request: Request, pages: list[int]) -> None:
        assert request.row is not None
        plan.grants.append(Grant(request.row.slot, len(request.pages), pages))
        request.pages += pages

    def _end(self, request: Request) -> None:
        self._stop(self._waiting if request.row is None else self._running, request)
        request.has_ended = True

    def _stop(self, queue: list[Request], request: Request) -> None:
        """Take a request out of the queue that it is in, and its slot and pages from it."""
        del queue[bisect_left(queue, request.rank, key=_rank)]
        if request.row is not None:
            self._freed.append(request.row.slot)
            heapq.heappush(self._free_slots, request.row.slot)
        self._pool.release(request.pages)
        request.row, request.pages, request.is_decoding = None, [], False


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
