"""Random traces through the scheduler and the page pool, around a toy model (`toy_engine.py`).

A failure prints its smallest trace, to be pasted into `run(...)`. `MLA_TRACES=10000` sets how many there are.
The tests that break a rule on purpose patch private methods: a rule has no public switch.
"""

import os
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Plan
from tests.engine.toy_engine import ToyEngine, Trace, batch_invariant_traces, check_traces, run, traces

NUM_TRACES = int(os.environ.get("MLA_TRACES", "300"))


def test_random_traces() -> None:
    met = check_traces(run, NUM_TRACES)
    # The traces exercise what they are for, each in a share of them.
    for name in ("mixed_steps", "preemptions", "reused_tokens", "late_reports", "aborted"):
        assert met[f"num_{name}"] > met["traces"] / 20, f"hardly any trace has {name}"


@pytest.mark.long
def test_random_batch_invariant_traces() -> None:
    met = check_traces(run, NUM_TRACES // 2, batch_invariant_traces())
    assert met["num_preemptions"] == 0
    assert met["num_reused_tokens"] > met["traces"] / 20


def pages_too_few(engine: ToyEngine) -> None:
    engine.scheduler._reach = engine.scheduler.q_len - 1


def keys_without_the_next_token(engine: ToyEngine) -> None:
    engine.pool.lookahead = 0


def commits_one_token_early(engine: ToyEngine) -> None:
    pool, commit = engine.pool, engine.pool.commit

    def early(pages: Sequence[int], token_ids: Sequence[int], num_cached: int) -> None:
        commit(pages, token_ids, min(num_cached + 1, len(pages) * pool.page_size))

    pool.commit = early  # type: ignore[method-assign]


def commits_rows_that_end(engine: ToyEngine) -> None:
    scheduler, stop = engine.scheduler, engine.scheduler._stop

    def commit_and_stop(request: Request) -> None:
        if request.has_ended:
            scheduler._commit(request, request.num_tokens - 1)
        stop(request)

    scheduler._stop = commit_and_stop  # type: ignore[method-assign]


def leaks_a_page(engine: ToyEngine) -> None:
    release = engine.pool.release
    engine.pool.release = lambda pages: release(pages[1:])  # type: ignore[method-assign]


def shares_what_decode_wrote(engine: ToyEngine) -> None:
    scheduler = engine.scheduler
    scheduler._commit = lambda request, num_cached: (  # type: ignore[method-assign]
        engine.pool.commit(request.pages, request.tokens, num_cached) if request.is_running else None
    )


def lets_a_request_in_early(engine: ToyEngine) -> None:
    scheduler, admit = engine.scheduler, engine.scheduler._admit

    def again(plan: Plan, request: Request) -> bool:
        scheduler._batch_invariant = False
        admitted = admit(plan, request)
        scheduler._batch_invariant = engine.trace.batch_invariant
        return admitted

    scheduler._admit = again  # type: ignore[method-assign]


def serves_the_last_first(engine: ToyEngine) -> None:
    scheduler = engine.scheduler

    def last() -> Request | None:
        return max((queue[-1] for queue in scheduler._waiting.values()), key=lambda r: r.rank, default=None)

    scheduler._next_waiting = last  # type: ignore[method-assign]


def forgets_shares(engine: ToyEngine) -> None:
    scheduler = engine.scheduler

    def first() -> Request | None:
        return min((queue[0] for queue in scheduler._waiting.values()), key=lambda r: r.rank, default=None)

    scheduler._next_waiting = first  # type: ignore[method-assign]


def ranks_by_arrival(engine: ToyEngine) -> None:
    scheduler, admit = engine.scheduler, engine.scheduler._admit

    def admitted(plan: Plan, request: Request) -> bool:
        rank = request.rank
        done = admit(plan, request)
        if done:
            request.rank = rank
            scheduler._running.sort(key=lambda r: r.rank)
        return done

    scheduler._admit = admitted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "mistake",
    [
        pages_too_few,
        keys_without_the_next_token,
        commits_one_token_early,
        commits_rows_that_end,
        leaks_a_page,
        serves_the_last_first,
        forgets_shares,
        ranks_by_arrival,
    ],
)
def test_the_toy_engine_notices(mistake: Callable[[ToyEngine], None]) -> None:
    check_that_it_is_noticed(mistake, traces())


@pytest.mark.long
@pytest.mark.parametrize("mistake", [shares_what_decode_wrote, lets_a_request_in_early])
def test_the_toy_engine_notices_who_wrote_a_latent(mistake: Callable[[ToyEngine], None]) -> None:
    check_that_it_is_noticed(mistake, batch_invariant_traces())


def check_that_it_is_noticed(mistake: Callable[[ToyEngine], None], drawn: st.SearchStrategy[Trace]) -> None:
    def fails(trace: Trace) -> bool:
        engine = ToyEngine(trace)
        mistake(engine)
        try:
            engine.run()
        except (AssertionError, ValueError):
            return True
        return False

    quick = settings(max_examples=3000, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    assert find(drawn, fails, settings=quick)
