"""Continuous batching: how evenly decode rows get their tokens while long prompts arrive.

    python -m benchmarks.serving --output benchmarks/results/serving.json

`--models v3`: 12 layers of DeepSeek-V3's architecture with random weights in bfloat16 (`random_model` of
`benchmarks.transformers_generate`). `--models shipped`: the shipped model in bfloat16, whose drafts are accepted. Both
run the same trace, for each number of drafts: `--rows` requests decode; after a while long prompts arrive, one every
eight steps. For the time before they arrive and the time while they prefill: tokens/s of the rows that decode, and the
median and 99th percentile of the time between two of a request's tokens, for several limits of a step's tokens. Tokens
that one step gives arrive together: the time between them is then 0, so percentiles are of the gaps between steps that
gave a request something.

Then, on any machine, the scheduler alone: host time of `plan` and `update` for 256 rows that decode.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.transformers_generate import random_model
from mla_compile.engine import Engine
from mla_compile.engine.generation import Generation
from mla_compile.engine.pages import PagePool
from mla_compile.engine.reports import RowReport
from mla_compile.engine.scheduler import Scheduler
from mla_compile.engine.text import SHIPPED_MODEL
from mla_compile.integrations.transformers.mtp import mtp_layer
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.models import load_model

LONG_PROMPTS, GAP = 8, 8
"""How many long prompts arrive, one every so many steps."""
PROMPT_LENGTHS = {"v3": 4096, "shipped": 1024}


def scheduler_us(rows: int = 256, k: int = 3, steps: int = 300) -> float:
    """Median host time of a step's `plan` and `update`, all rows decoding, two tokens each."""
    pool = PagePool(1 + rows * 64, 16, has_drafter=True, keeps_prefixes=True)
    scheduler = Scheduler(pool, num_speculative_tokens=k, max_rows=rows, max_tokens_per_step=rows * (2 + k))
    for i in range(rows):
        scheduler.add([i] * 4, max_len=1000)
    times = []
    while len(times) < steps:
        before = time.perf_counter()
        plan = scheduler.plan()
        if len(plan.decodes) == rows:
            middle = time.perf_counter()
        reports = [RowReport([1] * (1 + (len(plan.decodes) == rows)), active=True) for _ in plan.sampled]
        after = time.perf_counter()
        scheduler.update(reports)
        if len(plan.decodes) == rows:
            times.append((middle - before + time.perf_counter() - after) * 1e6)
    return statistics.median(times)


class Clock:
    """When requests got tokens."""

    def __init__(self, generations: list[Generation]) -> None:
        self.generations = generations
        self.last = {id(g): (time.perf_counter(), len(g.completion.token_ids)) for g in generations}
        self.gaps: list[float] = []
        self.tokens = 0
        self.started = time.perf_counter()

    def look(self) -> None:
        now = time.perf_counter()
        for generation in self.generations:
            then, known = self.last[id(generation)]
            count = len(generation.completion.token_ids)
            if count > known:
                self.gaps.append(now - then)
                self.tokens += count - known
                self.last[id(generation)] = now, count

    def figures(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.started
        gaps = sorted(self.gaps)
        return {
            "tokens_per_s": round(self.tokens / seconds),
            "p50_ms": round(gaps[len(gaps) // 2] * 1e3, 2),
            "p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 2),
        }


def trace(engine: Engine, rows: int, prompt_length: int) -> dict[str, Any]:
    """Decode alone, then beside long prompts; each request's tokens are random, its text never ends by itself."""
    random = torch.Generator().manual_seed(0)

    def prompt(length: int) -> list[int]:
        return torch.randint(1, engine.model.vocab_size, (length,), generator=random).tolist()

    room = engine.max_model_len
    decoding = [engine.add(prompt(32), max_new_tokens=room) for _ in range(rows)]
    while not all(generation.has_begun for generation in decoding):
        engine.step()
    for _ in range(20):
        engine.step()
    alone = Clock(decoding)
    for _ in range(100):
        engine.step()
        alone.look()
    result = {"decode_only": alone.figures()}

    before, beside, long = engine.stats, Clock(decoding), []
    steps = 0
    while len(long) < LONG_PROMPTS or not all(generation.has_begun for generation in long):
        if steps % GAP == 0 and len(long) < LONG_PROMPTS:
            long.append(engine.add(prompt(prompt_length), max_new_tokens=8))
        engine.step()
        beside.look()
        steps += 1
    after = engine.stats
    result["with_long_prompts"] = beside.figures() | {
        "steps": steps,
        "mixed_steps": after.num_mixed_steps - before.num_mixed_steps,
    }
    result["acceptance_length"] = round(after.acceptance_length or 1, 3)
    for generation in (*decoding, *long):
        generation.abort()
    while engine.has_work():
        engine.step()
    return result


def measure(
    name: str, rows: int, prompt_length: int, drafts: list[int], budgets: list[int]
) -> Iterator[dict[str, Any]]:
    for k in drafts:
        with served(name, k, prompt_length + 1024) as model:
            for budget in budgets:
                torch.compiler.reset()
                engine = Engine(
                    model,
                    num_speculative_tokens=k,
                    max_rows=2 * rows,
                    max_model_len=prompt_length + 1024,
                    max_tokens_per_step=2 * rows * (1 + k) + budget,
                    page_size=64,
                )
                trace(engine, rows, prompt_length)  # compiles and captures
                row = {
                    "model": name,
                    "k": k,
                    "rows": rows,
                    "prompt": prompt_length,
                    "prompt_tokens_a_step": budget,
                }
                yield row | trace(engine, rows, prompt_length)


@contextmanager
def served(name: str, k: int, longest: int) -> Iterator[Any]:
    """A model on the GPU."""
    if name == "shipped":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        yield load_model(SHIPPED_MODEL, dtype=torch.bfloat16, device=device)
        return
    model, mtp = random_model("v3")
    target = TransformersTarget(model, mtp_layer(model, mtp) if k else None)
    with target.installed(longest):
        yield target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--models", nargs="*", choices=["v3", "shipped"], default=["v3", "shipped"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048])
    args = parser.parse_args()
    report: dict[str, Any] = {"torch": torch.__version__, "scheduler_us_256_rows": round(scheduler_us())}
    if torch.cuda.is_available():
        report |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    print(json.dumps(report), flush=True)
    report["rows"] = []
    for name in args.models:
        for row in measure(name, args.rows, PROMPT_LENGTHS[name], args.k, args.budgets):
            print(json.dumps(row), flush=True)
            report["rows"].append(row)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
