"""One engine and one scheduler that live as long as the command.

A case is at least 500 steps of the engine and 5,000 of the scheduler, in which requests arrive, share prompts, are
cancelled, preempted and cut short. What `stress.engines` checks holds after each step. Whenever both are idle, no page
and no row is in use, and after the first cases neither the package's objects nor the memory of the process grow. With
`--device cuda` the engine's steps are captured.
"""

import argparse
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mla_compile.engine.reports import Logprob
from stress.engines import maybe
from stress.runner import Case, Draw, command
from tests.engine.engine_traces import EngineRun, model, prepare_texts
from tests.engine.engines import with_new_caches
from tests.engine.toy_engine import Arrival, ToyEngine, Trace

STEPS, SCHEDULER_STEPS = 500, 5000
LOAD = 100
"""Steps in which the requests of a load arrive, until both are idle again."""
WARM_UP = 10
"""Cases after which nothing grows."""
MOST_OBJECTS, MOST_LOGPROBS, MOST_BYTES = 50, 250, 2**24
"""By which objects of the package, log-probabilities and the process may exceed the most of the warm-up: what is freed
later varies."""
OBJECTS_OF_A_SIZE = 8
"""At most, that a size of step keeps: its bucket, and its recording with arguments, results and calls."""
ENGINE = Trace((), k=2, page_size=4, spare_pages=12, max_rows=4, spare_tokens=8, few_drafts=True)
PROMPTS = [
    Arrival(0, num_shared, num_own, 24, seed)
    for num_shared in (0, 4, 9, 16)
    for num_own in (1, 3, 8, 14)
    for seed in range(6)
]
"""Their texts alone are made once, as another engine would take over the model's caches."""


def load(draw: Draw) -> tuple[Arrival, ...]:
    return tuple(
        replace(
            draw.choice(PROMPTS),
            step=(step := draw.randrange(LOAD)),
            max_new_tokens=draw.randint(6, 24),
            priority=draw.choice((0, 0, 1, 2)),
            abort_step=step + draw.randint(0, 30) if draw.random() < 0.2 else None,
            num_until_stop=maybe(draw, 1, 10),
            client=draw.choice((None, "a", "b")),
        )
        for _ in range(LOAD // 2)
    )


def num_objects() -> int:
    """The objects of this package that are alive, without log-probabilities."""
    gc.collect()
    alive = (type(each) for each in gc.get_objects())
    return sum(str(kind.__module__).startswith("mla_compile") and kind is not Logprob for kind in alive)


def num_logprobs() -> int:
    """Those that are alive: of the last request of a load, too."""
    return sum(type(each) is Logprob for each in gc.get_objects())


def num_bytes() -> int:
    """Of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_device_bytes() -> int:
    """In tensors of the GPU."""
    return int(torch.cuda.memory_allocated())


class Flat:
    """Checks that numbers do not grow after the warm-up. numbers: how to read each, and by how much it may grow."""

    def __init__(self, numbers: Mapping[str, tuple[Callable[[], float], float]]) -> None:
        self.numbers = numbers
        self.seen: dict[str, list[float]] = {name: [] for name in numbers}

    def check(self) -> None:
        for name, (read, most) in self.numbers.items():
            seen, value = self.seen[name], read()
            if len(seen) < WARM_UP:
                seen.append(value)
            else:
                assert value <= max(seen) + most, f"{name}: {value} when idle, {max(seen)} at first"


def make(args: argparse.Namespace) -> Case:
    longest = max(PROMPTS, key=lambda arrival: arrival.num_shared + arrival.num_own)
    on_gpu = args.device == "cuda"
    model().to(args.device)
    engine = EngineRun(replace(ENGINE, arrivals=(longest,)), captured=on_gpu)
    prepare_texts(replace(ENGINE, arrivals=tuple(PROMPTS)))
    with_new_caches(engine.engine, engine.engine.config.num_pages)
    toy = ToyEngine(
        replace(ENGINE, arrivals=(longest,), k=1)
    )  # it remembers all texts, also those with drafts

    def others() -> int:
        """Objects that no size of step keeps: a size that is rare may come late."""
        return num_objects() - OBJECTS_OF_A_SIZE * len(engine.engine.capture_report().buckets)

    numbers = {"objects of the package": (others, MOST_OBJECTS), "bytes": (num_bytes, MOST_BYTES)}
    numbers |= {"log-probabilities": (num_logprobs, MOST_LOGPROBS)}
    flat = Flat(numbers | ({"bytes of the GPU": (num_device_bytes, 2**20)} if on_gpu else {}))

    def case(draw: Draw) -> str:
        for run, steps in ((engine, STEPS), (toy, SCHEDULER_STEPS)):
            begin = run.outcome.num_steps
            while run.outcome.num_steps < begin + steps:
                run.serve(load(draw))
        for forgotten in (engine.requests, engine.arrival_of, toy.arrived, toy.admitted):
            forgotten.clear()
        flat.check()
        return f"{STEPS} {'captured ' * on_gpu}steps of the engine, {SCHEDULER_STEPS:,} of the scheduler"

    return case


def main() -> None:
    command("soak", make, devices=("cpu", "cuda"), independent=False)


if __name__ == "__main__":
    main()
