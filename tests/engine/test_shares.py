"""Clients share rows: a client that asks for much keeps no other one waiting, and no request waits for ever."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Plan
from tests.engine.test_scheduling_traces import NUM_TRACES
from tests.engine.toy_engine import Arrival, ToyEngine, Trace


class Watched(ToyEngine):
    """Checks in every step which request passes which, and counts by how many each one was passed."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self.num_passed: Counter[Request] = Counter()
        self.rows: list[Counter[str | None]] = []  # of each client after a step's plan
        self.waiting: list[set[str | None]] = []  # clients then
        self.ended: dict[Request, int] = {}  # at which step

    def _step(self) -> None:
        super()._step()
        for request in self.arrived:
            if request.has_ended:
                self.ended.setdefault(request, len(self.rows))

    def _check_plan(self, plan: Plan, waiting: list[Request], running: list[Request]) -> None:
        before = dict(self.admitted)
        super()._check_plan(plan, waiting, running)
        rows = Counter(request.client for request in running if request.is_running)
        self.rows.append(Counter(r.client for r in self.scheduler.requests() if r.is_running))
        self.waiting.append({r.client for r in waiting if not r.is_running})
        firsts: dict[str | None, Request] = {}
        for request in sorted(waiting, key=lambda r: (r.priority, r not in before, self.arrived[r])):
            firsts.setdefault(request.client, request)
        for admitted in set(plan.admitted) - before.keys():
            for first in firsts.values():
                if not first.is_running and first.priority <= admitted.priority and not rows[first.client]:
                    assert self.arrived[admitted] < self.arrived[first], (
                        "a later one passed a client without a row"
                    )
            for request in waiting:
                is_passed = not request.is_running and self.arrived[request] < self.arrived[admitted]
                self.num_passed[request] += is_passed and request.priority <= admitted.priority


def drawn(draw: random.Random) -> Trace:
    """Heavy clients come with many requests at once, light ones all the time; pages are short in most traces."""
    arrivals = []
    for client in "abcd"[: draw.randint(1, 4)]:
        start, length = draw.randrange(6), draw.randint(1, 20)
        lengths = [draw.choice([length, draw.randint(1, 20)]) for _ in range(draw.randint(1, 16))]
        arrivals += [arrival(draw, client, start, each) for each in lengths]
    for i in range(draw.randint(0, 20)):
        light = f"light {draw.randrange(i + 1)}"
        arrivals += [arrival(draw, light, draw.randrange(60), draw.randint(1, 6))]
    return Trace(
        arrivals=tuple(arrivals),
        k=draw.randint(0, 2),
        page_size=draw.choice([1, 2, 4]),
        spare_pages=draw.choice([0, 1, 5, 20, 200]),
        max_rows=draw.randint(1, 6),
        spare_tokens=draw.choice([0, 2, 8, 64]),
        lag=draw.randrange(3),
        vocab_size=draw.choice([6, 20, 1000]),
        seed=draw.randrange(1000),
    )


def arrival(draw: random.Random, client: str, step: int, num_new: int) -> Arrival:
    return Arrival(
        step,
        num_shared=draw.choice([0, 0, 4]),
        num_own=draw.randint(1, 12),
        max_new_tokens=num_new,
        seed=draw.randrange(9),
        priority=draw.choice([0, 0, 0, 0, 1]),
        abort_step=draw.choice([None] * 5 + [step + draw.randrange(40)]),
        client=client,
    )


def test_a_client_without_a_row_is_passed_by_no_later_request() -> None:
    num_preemptions = 0
    for seed in range(NUM_TRACES // 10):
        engine = Watched(drawn(random.Random(seed)))
        num_preemptions += engine.run().num_preemptions
    assert num_preemptions > NUM_TRACES // 10, "pages are short"


def light_ones(every: int, until: int) -> Iterator[Arrival]:
    """A new client every few steps, with one request each."""
    for i, step in enumerate(range(0, until, every)):
        yield Arrival(step, 0, 3, max_new_tokens=3, seed=i, client=f"light {i}")


@pytest.mark.parametrize("mates", [0, 3])
def test_a_request_for_all_pages_runs_though_small_ones_of_others_never_cease(mates: int) -> None:
    """mates: requests of the same client that come before it."""
    large = Arrival(5, 0, 40, max_new_tokens=20, seed=1, client="heavy")
    before = [Arrival(4, 0, 6, max_new_tokens=12, seed=2 + i, client="heavy") for i in range(mates)]
    arrivals = (*light_ones(every=1, until=400), *before, large)
    engine = Watched(Trace(arrivals, k=0, spare_pages=0, max_rows=4, vocab_size=10**6))
    engine.run()
    (request,) = [each for each in engine.arrived if len(each.prompt) == 40]
    assert engine.num_passed[request] < 12 * (1 + mates)


@pytest.mark.parametrize("shared", [True, False])
def test_a_plain_request_beside_heavy_clients_gets_the_next_row(shared: bool) -> None:
    heavy = [Arrival(0, 4, 2, 12, seed=i, client=client) for client in "abcd" for i in range(64)]
    arrivals = [*heavy, Arrival(40, 0, 5, 4, seed=3, client="plain")]
    if not shared:
        arrivals = [replace(each, client=None) for each in arrivals]
    engine = Watched(Trace(tuple(arrivals), k=0, max_rows=8, spare_pages=500, vocab_size=10**6))
    engine.run()
    (plain,) = [each for each in engine.arrived if len(each.prompt) == 5]
    assert (engine.ended[plain] < 40 + 12 + 4 + 4) == shared, engine.ended[plain]


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_clients_that_wait_differ_by_one_once_earlier_rows_have_ended(seed: int) -> None:
    draw = random.Random(seed)
    clients = "abcde"[: draw.randint(2, 5)]
    arrivals = tuple(
        Arrival(10 * i, 0, draw.randint(1, 6), draw.randint(1, 20), seed=draw.randrange(99), client=client)
        for i, client in enumerate(clients)
        for _ in range(100)
    )
    max_rows = draw.randint(len(clients), 12)
    engine = Watched(
        Trace(arrivals, k=draw.randrange(3), max_rows=max_rows, spare_pages=500, spare_tokens=64)
    )
    engine.run()
    settled = 10 * len(clients) + 25
    steps = [
        rows
        for rows, waiting in zip(engine.rows[settled:], engine.waiting[settled:], strict=True)
        if len(waiting) == len(clients)
    ]
    assert len(steps) > 20
    for rows in steps:
        assert max(rows.values()) - min(rows[client] for client in clients) <= 1, rows
