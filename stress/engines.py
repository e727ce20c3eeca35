"""Random traces through the real engine, on a tiny model in float64, with every feature at once.

Requests arrive, are cancelled and preempted, share prompts, wait for pages; they are sampled with penalties, biases,
log-probabilities and grammars, with 0 to 3 drafts, in steps with prompts and without, reported late, in any order of
priorities and clients. Each request's tokens are those that it has alone, one token a step. After every step pages,
references, rows and block tables agree. In one of 8 traces a token makes latents, logits or drafts NaN.
"""

import argparse
from dataclasses import fields

from stress.runner import Case, Draw, command
from tests.engine.engine_traces import POISONS, Outcome
from tests.engine.engine_traces import run as run_trace
from tests.engine.test_grammar import KINDS
from tests.engine.toy_engine import Arrival, Trace


def maybe(draw: Draw, low: int, high: int) -> int | None:
    return draw.randint(low, high) if draw.random() < 0.33 else None


def drawn_arrival(draw: Draw, k: int, with_grammars: bool) -> Arrival:
    return Arrival(
        step=draw.randint(0, 12),
        num_shared=draw.choice((0, 4, 8, 9, 16)),
        num_own=draw.choice((1 + k, draw.randint(1, 14))),
        max_new_tokens=draw.randint(1, 24),
        seed=draw.randint(0, 5),
        priority=draw.choice((0, 0, 1, 2)),
        abort_step=maybe(draw, 0, 30),
        num_until_stop=maybe(draw, 1, 10),
        client=draw.choice((None, "a", "b")),
        grammar=draw.choice(KINDS) if with_grammars and draw.random() < 0.4 else None,
    )


def drawn_trace(draw: Draw) -> Trace:
    k = draw.randint(0, 3)
    poison = (draw.choice(POISONS), draw.choice((23, 28, 3))) if draw.random() < 0.125 else None
    with_grammars = draw.random() < 0.4 and poison is None
    batch_invariant = draw.random() < 0.15 and poison is None
    return Trace(
        arrivals=tuple(drawn_arrival(draw, k, with_grammars) for _ in range(draw.randint(1, 8))),
        k=k,
        page_size=draw.choice((1, 2, 4, 8)),
        spare_pages=draw.choice((0, 0, 1, 3, 10, 50)),
        max_rows=draw.randint(1, 4),
        spare_tokens=draw.choice((0, 1, 3, 8, 64)),
        lag=draw.choice((1, 1, 0, 2)),
        acceptance=draw.choice((0.0, 0.5, 0.9, 1.0)),
        vocab_size=draw.choice((4, 20, 1000)),
        few_drafts=draw.random() < 0.5,
        batch_invariant=batch_invariant,
        poison=poison,
        seed=draw.randint(0, 999),
    )


def run(draw: Draw) -> str:
    trace = drawn_trace(draw)
    draw.note(trace)
    outcome = run_trace(trace)
    names = [field.name for field in fields(Outcome) if field.name not in ("tokens", "num_steps")]
    met = [name.removeprefix("num_") for name in names if getattr(outcome, name)]
    kind = "poisoned" if trace.poison else "batch-invariant" if trace.batch_invariant else "plain"
    grammars = " with grammars" if any(arrival.grammar for arrival in trace.arrivals) else ""
    wanted = ("mixed_steps", "preemptions", "reused_tokens", "accepted", "aborted", "failed")
    return f"{kind}{grammars}: {', '.join(name for name in wanted if name in met) or 'none of these'}"


def make(_: argparse.Namespace) -> Case:
    return run


def main() -> None:
    command("engines", make)


if __name__ == "__main__":
    main()
