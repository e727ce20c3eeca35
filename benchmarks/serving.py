"""Continuous batching: how evenly decode rows get their tokens while long prompts arrive.

    python -m benchmarks.serving --output benchmarks/results/serving.json

`--models v3`: 12 layers of DeepSeek-V3's architecture with random weights in bfloat16 (`random_model` of
`benchmarks.transformers_generate`). `--models shipped`: the shipped model in bfloat16, whose drafts are accepted. Both
run the same trace, for each number of drafts: `--rows` requests decode; after a while long prompts arrive, one every
eight steps. For the time before they arrive and the time while they prefill: tokens/s of the rows that decode, and the
median and 99th percentile of the time between two of a request's tokens, for several limits of a step's tokens. Tokens
of one step arrive together, with 0 time between them, so percentiles are of the gaps between steps that emit tokens of
a request.

transformers' side (`--stock`): its continuous batching runs first. In 5.17 its cache has one width for keys and values,
`config.head_dim`, which for these models is only the rotary part of a key. So their keys do not fit, and each request
ends with "index_copy_(): Source/destination tensor must have same slice shapes", which the output repeats as
`continuous_batching`. The figures are then of `generate` on the same prompts, padded to the longest, in one batch from
the start: no row waits for an arrival, but all wait for the prefill of all, the first of their times between tokens.

Host time of a step: median over launches that compile and record nothing, of steps whose prompt goes on and of steps
without prompts.

Then the time from `add` to the first token of one prompt, alone and prefilled in one step, and the busy time of the GPU
meanwhile, by the profiler. Last, on any machine, the scheduler alone: host time of `plan` and `update` for 256 decode
rows.
"""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

from benchmarks.measuring import DEVICE, Marks, figures
from benchmarks.reporting import add_row, command_parser
from benchmarks.transformers_generate import random_model
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine import Engine
from mla_compile.engine.config import FittedConfig
from mla_compile.engine.launch import Launcher
from mla_compile.engine.reports import RowReport
from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Scheduler
from mla_compile.integrations.transformers.mtp import mtp_layer
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.models import load_model

LONG_PROMPTS, GAP = 8, 8
"""The number of long prompts, and the steps between two of them."""
PROMPT_LENGTHS = {"v3": 4096, "shipped": 1024}
SHORT_PROMPT = 32
"""Tokens of the requests that decode from the beginning."""
WARM_UP, STEPS = 20, 100
"""Decode steps before the timed ones; timed ones."""


def scheduler_us(rows: int = 256, k: int = 3, steps: int = 300) -> float:
    """Median host time of a step's `plan` and `update` with two new tokens for each request; all rows decode."""
    settings = SimpleNamespace(
        num_speculative_tokens=k,
        max_rows=rows,
        max_tokens_per_step=rows * (2 + k),
        max_keys_per_step=None,
        captured_prompt_tokens=0,
        page_size=16,
        num_pages=1 + rows * 64,
        pages_per_grant=1,
        prefix_caching=True,
        batch_invariant=False,
    )
    scheduler = Scheduler(cast("FittedConfig", settings), lookahead=1)
    for i in range(rows):
        scheduler.add(Request([i] * 4, max_len=1000))
    times = []
    while len(times) < steps:
        before = time.perf_counter()
        plan = scheduler.plan()
        if len(plan.decodes) == rows:
            middle = time.perf_counter()
        reports = [RowReport([1] * (1 + (len(plan.decodes) == rows)), active=True) for _ in plan.sampled]
        after = time.perf_counter()
        scheduler.update(plan, reports)
        if len(plan.decodes) == rows:
            times.append((middle - before + time.perf_counter() - after) * 1e6)
    return statistics.median(times)


class Clock:
    """The times at which requests got tokens."""

    def __init__(self, generations: list[Request]) -> None:
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
        return figures(self.gaps, self.tokens, time.perf_counter() - self.started)


def random_prompts(rows: int, prompt_length: int, vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Of the rows that decode from the beginning, and those that arrive."""
    random = torch.Generator().manual_seed(0)
    short = torch.randint(1, vocab_size, (rows, SHORT_PROMPT), generator=random)
    long = torch.randint(1, vocab_size, (LONG_PROMPTS, prompt_length), generator=random)
    return short.tolist(), long.tolist()


def trace(engine: Engine, rows: int, prompt_length: int) -> dict[str, Any]:
    """Decode alone, then beside long prompts; prompts are random, and no stop id ends a text."""
    short_prompts, long_prompts = random_prompts(rows, prompt_length, engine.model.vocab_size)
    room = engine.config.max_model_len
    decoding = [engine.add(prompt, max_new_tokens=room, stop_ids=()) for prompt in short_prompts]
    while not all(generation.has_begun for generation in decoding):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    alone = Clock(decoding)
    for _ in range(STEPS):
        engine.step()
        alone.look()
    result = {"decode_only": alone.figures()}

    before, beside = engine.stats, Clock(decoding)
    long: list[Request] = []
    steps = 0
    while len(long) < LONG_PROMPTS or not all(generation.has_begun for generation in long):
        if steps % GAP == 0 and len(long) < LONG_PROMPTS:
            long.append(engine.add(long_prompts[len(long)], max_new_tokens=8, stop_ids=()))
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


@contextmanager
def timed_launches() -> Iterator[dict[bool, list[float]]]:
    """Meanwhile, host microseconds of each launch that admits no request, of steps with prompts and without."""
    times: dict[bool, list[float]] = {True: [], False: []}
    launch, unusual = Launcher.launch, 0.0

    def timed(self: Launcher, plan: Any) -> Any:
        nonlocal unusual
        before = time.perf_counter()
        launched = launch(self, plan)
        taken, known, report = time.perf_counter() - before, unusual, self.steps.report()
        unusual = report.compile_seconds + report.capture_seconds
        if plan.decodes and not plan.admitted and unusual == known:  # it neither compiled nor recorded
            times[bool(plan.chunks)].append(taken * 1e6)
        return launched

    Launcher.launch = timed  # type: ignore[method-assign]
    try:
        yield times
    finally:
        Launcher.launch = launch  # type: ignore[method-assign]


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
                    max_rows=rows + LONG_PROMPTS,
                    max_model_len=prompt_length + 1024,
                    max_tokens_per_step=(rows + LONG_PROMPTS) * (1 + k) + budget,
                    page_size=64,
                    prefix_caching=False,  # or the prompts of the first trace would be there in the second
                )
                engine.warm_up()  # as a server does; without it the first steps with prompts run eagerly
                for _ in range(2):
                    trace(engine, rows, prompt_length)  # captures
                row = {
                    "model": name,
                    "k": k,
                    "rows": rows,
                    "prompt": prompt_length,
                    "prompt_tokens_a_step": budget,
                }
                with timed_launches() as launches:
                    row |= trace(engine, rows, prompt_length)
                report = engine.capture_report()
                for step, times in (("mixed", launches[True]), ("decode", launches[False])):
                    if times:  # else no two steps were alike, so each was recorded
                        row[f"host_us_of_a_{step}_step"] = round(statistics.median(times))
                row["graphs"] = sum(bucket.is_captured for bucket in report.buckets)
                row["graph_mib"] = round(report.num_bytes / 2**20)
                row["compile_s"] = round(report.compile_seconds, 1)
                yield row


def first_token(name: str, prompt_length: int) -> dict[str, Any]:
    """One prompt in one step, alone."""
    with served(name, 0, prompt_length + 64) as model:
        torch.compiler.reset()
        engine = Engine(
            model,
            num_speculative_tokens=0,
            max_rows=1,
            max_model_len=prompt_length + 64,
            max_tokens_per_step=prompt_length + 1,
            page_size=64,
            prefix_caching=False,
        )
        _, (prompt, *_) = random_prompts(1, prompt_length, model.vocab_size)
        engine.warm_up()

        def ms() -> float:
            torch.cuda.synchronize()
            before = time.perf_counter()
            request = engine.add(prompt, max_new_tokens=2, stop_ids=())
            while not request.has_begun:
                engine.step()
            elapsed = (time.perf_counter() - before) * 1e3
            while engine.has_work():
                engine.step()
            return elapsed

        for _ in range(3):
            ms()
        times = [ms() for _ in range(10)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            request = engine.add(prompt, max_new_tokens=1)
            while not request.has_ended:
                engine.step()
            torch.cuda.synchronize()
        busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e3
        return {
            "model": name,
            "prompt": prompt_length,
            "first_token_ms": round(statistics.median(times), 2),
            "kernels_ms": round(busy, 2),
        }


def measure_stock(name: str, rows: int, prompt_length: int, caches: list[str]) -> Iterator[dict[str, Any]]:
    model: Any
    if name == "shipped":
        model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.bfloat16).to(DEVICE).eval()
        model.generation_config.eos_token_id = None
    else:
        model, _ = random_model(name)
    refused = continuous_batching_error(model)
    short, long = random_prompts(rows, prompt_length, model.config.vocab_size)
    for cache in caches:
        torch.compiler.reset()
        row = {
            "model": name,
            "stock": f"generate, {cache} cache",
            "continuous_batching": refused,
            "rows": rows,
            "prompt": prompt_length,
        }
        try:
            alone = stock_gaps(model, short, WARM_UP + STEPS, cache)[WARM_UP:]
            row["decode_only"] = figures(alone, rows * len(alone), sum(alone))
            beside = stock_gaps(model, short + long, STEPS, cache)
            row["with_long_prompts"] = figures(beside, rows * len(beside), sum(beside))
        except torch.cuda.OutOfMemoryError:
            row["failed"] = "out of memory"
        yield row


def continuous_batching_error(model: PreTrainedModel) -> str | None:
    """The error of transformers' continuous batching with the model; None if it runs."""
    model.set_attn_implementation("paged|sdpa")
    # Its own guess at sizes takes most of the GPU's memory.
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256, block_size=64)
    try:
        outputs = model.generate_batch(
            [[1, 2, 3]], GenerationConfig(max_new_tokens=2, do_sample=False), continuous_batching_config=sizes
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        model.set_attn_implementation("sdpa")
    return next((output.error for output in outputs.values() if output.error), None)


def stock_gaps(model: Any, prompts: list[list[int]], new_tokens: int, cache: str) -> list[float]:
    """Seconds of `generate` for each token of a batch; the first one includes prefill."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=DEVICE)
    mask: Tensor = (ids != 0).long()
    kwargs: dict[str, Any] = {}
    if cache == "static":
        compiled = CompileConfig(mode="reduce-overhead", fullgraph=True)
        kwargs = {
            "cache_implementation": "static",
            "compile_config": compiled,
            "max_cache_len": width + new_tokens,
        }
    for count in (8, new_tokens):  # the first time it compiles
        marks = Marks()
        marks.mark()
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[marks],
            **kwargs,
        )
    return [ms / 1e3 for ms in marks.intervals_ms()]


@contextmanager
def served(name: str, k: int, longest: int) -> Iterator[Any]:
    """A model on the GPU."""
    if name == "shipped":
        yield load_model(SHIPPED_MODEL, dtype=torch.bfloat16, device=DEVICE)
        return
    model, mtp = random_model("v3")
    target = TransformersTarget(model, mtp_layer(model, mtp) if k else None)
    with target.installed(longest):
        yield target


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--models", nargs="*", choices=["v3", "shipped"], default=["v3", "shipped"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--k", type=int, nargs="*", default=[0, 3])
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument(
        "--stock", nargs="*", choices=["dynamic", "static"], default=["dynamic", "static"], help="its caches"
    )
    args = parser.parse_args()
    report: dict[str, Any] = {"torch": torch.__version__, "scheduler_us_256_rows": round(scheduler_us())}
    if torch.cuda.is_available():
        report |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    print(json.dumps(report), flush=True)
    report["rows"] = []
    for name in args.models:
        length = PROMPT_LENGTHS[name]
        stock = measure_stock(name, args.rows, length, args.stock) if args.stock else []
        for row in chain(stock, measure(name, args.rows, length, args.k, args.budgets)):
            add_row(report, row, args.output)
        if torch.cuda.is_available():
            add_row(report, first_token(name, length), args.output)


if __name__ == "__main__":
    main()
