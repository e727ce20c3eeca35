"""The scheduler in single scenes; `test_scheduling_traces.py` has the random ones."""

from collections import deque

import pytest

from mla_compile import MLAError
from mla_compile.engine.detokenizer import Found
from mla_compile.engine.reports import RowReport
from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Plan, Scheduler
from tests.engine.toy_engine import Arrival, Trace, run, scheduler_of


class Driven:
    """A scheduler whose plans are all launched, and reported in their order."""

    def __init__(self, of: Scheduler) -> None:
        self.of, self.abort = of, of.abort
        self.launched: deque[Plan] = deque()

    def add(self, prompt: list[int], max_len: int, priority: int = 0) -> Request:
        request = Request(prompt, max_len, priority)
        self.of.add(request)
        return request

    def plan(self) -> Plan:
        plan = self.of.plan()
        if plan:
            self.launched.append(plan)
        return plan

    def update(self, reports: list[RowReport]) -> list[tuple[Request, list[int]]]:
        """The requests that have grown, and by which tokens."""
        plan = self.launched[0]
        before = [request.num_tokens for request in plan.sampled]
        self.of.update(plan, reports)
        self.launched.popleft()
        grown = [
            (request, request.tokens[count:]) for request, count in zip(plan.sampled, before, strict=True)
        ]
        return [(request, tokens) for request, tokens in grown if tokens]

    def has_work(self) -> bool:
        return self.of.has_work() or bool(self.launched)


def scheduler(
    k: int = 1,
    *,
    num_pages: int = 101,
    page_size: int = 4,
    max_rows: int = 4,
    tokens: int = 64,
    keys: int | None = None,
) -> Driven:
    return Driven(
        scheduler_of(
            num_pages,
            page_size,
            lookahead=int(k > 0),
            num_speculative_tokens=k,
            max_rows=max_rows,
            max_tokens_per_step=tokens,
            max_keys_per_step=keys,
        )
    )


def chunks(plan: Plan) -> list[tuple[int, int, bool]]:
    return [(chunk.start, chunk.length, chunk.is_last) for chunk in plan.chunks]


def decodes(plan: Plan) -> list[Request]:
    return plan.decodes


def goes_on(*tokens: int) -> RowReport:
    return RowReport(list(tokens), active=True)


ENDS = RowReport([7], active=False)


def test_a_prompt_as_long_as_a_decode_row_prefills() -> None:
    of = scheduler(k=3)
    of.add([1, 2, 3, 4], max_len=20)
    plan = of.plan()
    assert (chunks(plan), decodes(plan)) == ([(0, 4, True)], [])


def test_a_row_decodes_from_the_step_after_its_last_chunk_before_its_token_is_known() -> None:
    of = scheduler(max_rows=1, tokens=4)
    request = of.add([1] * 9, max_len=30)
    assert chunks(of.plan()) == [(0, 4, False)]
    assert chunks(of.plan()) == [(4, 4, False)]
    assert of.update([]) == []
    assert chunks(of.plan()) == [(8, 1, True)]
    assert decodes(of.plan()) == [request]
    assert of.update([]) == []
    assert of.update([goes_on(5)]) == [(request, [5])]
    assert request.tokens == [*[1] * 9, 5]


def test_decode_rows_keep_decoding_while_prompts_share_what_is_left() -> None:
    of = scheduler(max_rows=4, tokens=10)
    first = of.add([1, 2], max_len=30)
    of.plan()
    second, third = of.add([3] * 9, max_len=30), of.add([4] * 5, max_len=30)
    plan = of.plan()
    assert (decodes(plan), chunks(plan)) == ([first], [(0, 8, False)])
    plan = of.plan()
    assert decodes(plan) == [first]
    assert [(chunk.request, chunk.length) for chunk in plan.chunks] == [(second, 1), (third, 5)]
    assert plan.sampled == [first, second, third]


def test_a_prompt_that_does_not_fit_is_cut_to_a_size_that_prompts_are_padded_to() -> None:
    of = scheduler(k=1, max_rows=4, tokens=310, num_pages=1001)
    of.add([1] * 900, max_len=1000)
    assert chunks(of.plan()) == [(0, 302, False)], "what is left by as many rows as there may be"
    of = scheduler(k=1, max_rows=100, tokens=310, num_pages=1001)
    of.add([1] * 900, max_len=1000)
    assert chunks(of.plan()) == [(0, 256, False)]
    of = scheduler(k=1, max_rows=100, tokens=310, num_pages=1001)
    of.add([1] * 290, max_len=1000)
    of.add([1] * 290, max_len=1000)
    assert chunks(of.plan()) == [(0, 290, True)], "one that fits is not cut"


def test_texts_are_cut_where_their_keys_are_and_a_step_reads_so_many_at_a_time() -> None:
    of = scheduler(k=0, max_rows=3, tokens=60, num_pages=1001, keys=32)
    first, second = of.add([1] * 50, max_len=90), of.add([2] * 20, max_len=90)
    plan = of.plan()
    assert [(c.request, c.start, c.length) for c in plan.chunks] == [(first, 0, 32)], "a multiple of 32"
    plan = of.plan()
    assert [(c.request, c.start, c.length) for c in plan.chunks] == [(first, 32, 18), (second, 0, 14)]
    plan = of.plan()
    assert [(c.request, c.start, c.length) for c in plan.chunks] == [(second, 14, 6)]


def test_a_higher_priority_goes_before_earlier_ones_and_before_a_prompt_that_has_begun() -> None:
    of = scheduler(k=0, max_rows=3, tokens=4)
    low = of.add([1] * 9, max_len=30, priority=1)
    of.plan()
    other, high = of.add([2] * 3, max_len=30, priority=1), of.add([3] * 3, max_len=30)
    plan = of.plan()
    assert [(chunk.request, chunk.length) for chunk in plan.chunks] == [(high, 3), (low, 1)]
    assert not other.is_running


def test_no_request_passes_the_first_that_waits() -> None:
    of = scheduler(k=0, num_pages=5, page_size=4)
    of.add([1] * 8, max_len=16)  # 3 of 4 pages, with the step after it
    of.plan()
    long, short = of.add([2] * 5, max_len=10), of.add([3], max_len=3)
    plan = of.plan()
    assert not plan.admitted
    assert not long.is_running and not short.is_running
    of.update([ENDS])
    assert not of.plan().chunks[2:]
    assert long.is_running and short.is_running


def test_the_lowest_rank_gives_its_pages_back_and_prefills_all_it_has_when_it_returns() -> None:
    of = scheduler(k=0, num_pages=5, page_size=2, max_rows=2)
    first, second = of.add([1, 2, 3], max_len=8), of.add([4, 5, 6], max_len=8)
    of.plan()  # both have 2 pages, which last for 4 positions
    of.plan()
    of.update([goes_on(7), goes_on(8)])
    plan = of.plan()
    assert decodes(plan) == [first]
    assert plan.removed == [second]
    assert (second.is_running, second.pages) == (False, [])
    # What was under way still counts.
    assert of.update([goes_on(9), goes_on(10)]) == [(first, [9]), (second, [10])]
    of.abort(first)
    plan = of.plan()
    assert (decodes(plan), [chunk.request for chunk in plan.chunks]) == ([], [second])
    # Its first page was not handed on: it is found again.
    assert chunks(plan) == [(second.num_reused_tokens, 5 - second.num_reused_tokens, True)]


def test_tokens_of_a_step_launched_after_the_end_are_dropped() -> None:
    of = scheduler()
    stopped, other = of.add([1], max_len=30), of.add([2], max_len=30)
    of.plan()
    of.plan()
    of.update([goes_on(5), goes_on(6)])
    of.abort(stopped)  # a stop string
    newer = of.add([3], max_len=30)
    plan = of.plan()
    assert plan.removed == [stopped]
    assert plan.admitted == [newer]
    assert of.update([goes_on(8, 9), goes_on(10, 11)]) == [(other, [10, 11])]
    assert of.update([goes_on(12), goes_on(13)]) == [(other, [12]), (newer, [13])]
    assert stopped.tokens == [1, 5]


def test_aborts_of_waiting_prefilling_and_ended_requests() -> None:
    of = scheduler(k=0, max_rows=1, tokens=2)
    running, waiting = of.add([1, 2, 3], max_len=9), of.add([4], max_len=9)
    of.plan()
    for request in (running, waiting, running):
        of.abort(request)
    assert of.has_work()  # a report is awaited
    assert of.update([]) == []
    assert not of.has_work()
    assert not of.plan()
    assert not of.add([1], max_len=2).is_running
    assert of.plan().removed == [running]  # an empty plan removes nothing


def test_no_step_is_launched_for_a_row_that_must_have_ended() -> None:
    of = scheduler(k=2)
    of.add([1, 2, 3], max_len=5)
    assert of.plan().chunks
    assert of.plan().decodes
    assert not of.plan()  # two steps under way give it at least two tokens
    of.update([goes_on(4)])
    assert not of.plan()
    of.update([ENDS])
    assert not of.has_work()


def test_a_prompt_that_fills_the_cache_gets_its_one_token() -> None:
    for k in range(4):
        of = scheduler(k=k, num_pages=3, page_size=4)
        request = of.add([1] * 8, max_len=9)
        plan = of.plan()
        assert chunks(plan) == [(0, 8, True)]
        assert [len(grant.pages) for grant in plan.grants] == [2]
        assert not of.plan()
        of.update([ENDS])
        assert request.has_ended
        assert len(request.tokens) == 9


def test_a_second_turn_finds_the_first_one_s_pages() -> None:
    of = scheduler(k=1, page_size=2)
    request = of.add([1, 2, 3], max_len=30)
    of.plan()
    of.update([goes_on(4)])
    of.plan()
    of.update([goes_on(5, 6)])
    of.abort(request)
    of.add([1, 2, 3, 4, 5, 6, 7], max_len=30)
    assert chunks(of.plan()) == [(4, 3, True)]  # 5 tokens were in the cache


def test_a_text_that_a_stop_string_ends_leaves_its_pages_to_the_next_turn() -> None:
    class StopsAtOnce:
        def feed(self, tokens: list[int], *, is_end: bool) -> Found:
            return Found(1, "")

    of = scheduler(k=1, page_size=2)
    request = of.add([1, 2, 3], max_len=30)
    of.plan()
    of.update([goes_on(4)])
    request.reader = StopsAtOnce()
    of.plan()
    of.update([goes_on(5, 6)])
    assert request.completion.finish_reason == "stop"
    assert request.tokens == [1, 2, 3, 4, 5]
    of.add([1, 2, 3, 4, 5, 6, 7], max_len=30)
    assert chunks(of.plan()) == [(4, 3, True)]


def test_a_request_that_no_pages_could_hold_is_refused() -> None:
    of = scheduler(num_pages=3)  # 8 positions
    with pytest.raises(MLAError, match="max_len"):
        of.add([1], max_len=10)
    assert not of.has_work()


def test_512_requests_wait_and_all_are_served() -> None:
    arrivals = tuple(Arrival(0, num_shared=8, num_own=3, max_new_tokens=9, seed=i) for i in range(512))
    outcome = run(Trace(arrivals, k=2, max_rows=8, spare_tokens=16, spare_pages=40))
    assert len(outcome.tokens) == 512


def test_a_batch_of_one() -> None:
    outcome = run(Trace((Arrival(0, 0, 3, 40),), k=3, spare_pages=0, max_rows=1, spare_tokens=0))
    assert outcome.num_preemptions == 0
    assert outcome.tokens[0]


def test_long_prompts_make_mixed_steps_and_rows_keep_speculating_in_them() -> None:
    arrivals = (
        Arrival(0, 0, 4, 60, seed=1),
        *(Arrival(5 * i, 0, 64, 5, seed=2 + i) for i in range(1, 5)),
    )
    outcome = run(
        Trace(arrivals, k=3, acceptance=1.0, max_rows=4, spare_tokens=0, vocab_size=10**6, spare_pages=99)
    )
    assert outcome.num_mixed_steps >= 10
    assert outcome.num_steps < 60
