"""The MTP iteration as a CUDA graph: capture, correctness, and use of the GPU.

    python -m benchmarks.mtp_iteration --output benchmarks/results/mtp_iteration.json

Prints, and writes as JSON, for the shipped model and each number of drafts k: graphs compiled over several row buckets,
the buckets recorded, the first of 500+ greedy tokens that differs from one-token eager decoding in float32 (null if
none does), wall time and kernel time of an iteration. Then for 12 layers
of DeepSeek-V3's architecture with random weights (`random_model` of `benchmarks.transformers_generate`), 32 rows of
about 4,096 tokens: the time of each bucket to compile and capture, with Inductor's cache empty and filled, and the same
times. In the timed steps a wait of the host for the device is an error.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.counters import compile_counters
from benchmarks.reporting import write_report
from benchmarks.start import start
from benchmarks.transformers_generate import random_model
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine import Engine
from mla_compile.integrations.transformers.mtp import mtp_layer
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.models import load_model, load_tokenizer
from mla_compile.speculate import DecodeState, SamplingParams

BUCKETS = (4, 1, 2, 8, 3, 4)
TOKENS = 512
LARGE_ROWS, LARGE_CONTEXT = 32, 4096


TEXTS = (
    "And it came to pass, that",
    "Psalms 23\n\n",
    "def parse(self, text):\n",
    "And Jesus said unto them,",
    "class Queue:\n    def put(self, item):\n",
    "In those days",
    "import os\n",
    "Now the sons of",
)


def prompts(count: int) -> list[list[int]]:
    """Texts of different lengths and kinds, so that rows accept differently."""
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    assert tokenizer is not None
    return [tokenizer(text)["input_ids"] for text in TEXTS[:count]]


def first_difference(a: list[list[int]], b: list[list[int]]) -> str | None:
    for row, (x, y) in enumerate(zip(a, b, strict=True)):
        for i, (s, t) in enumerate(zip(x, y, strict=True)):
            if s != t:
                return f"row {row}, token {i}: {s} and {t}"
    return None


def iteration_times(step: Any, state: DecodeState, iterations: int = 60) -> dict[str, float]:
    """Per iteration, in us: wall time back to back, kernel time, and the host's time to launch one on an idle GPU."""
    for _ in range(5):
        step(state)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(iterations):
        step(state)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) / iterations
    launch = []
    for _ in range(iterations):
        before = time.perf_counter()
        step(state)
        launch.append(time.perf_counter() - before)
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for _ in range(10):
            step(state)
        torch.cuda.synchronize()
    kernels = sum(e.self_device_time_total for e in trace.events() if e.device_type == DeviceType.CUDA) / 10
    return {"wall_us": wall * 1e6, "kernel_us": kernels, "launch_us": statistics.median(launch) * 1e6}


def measure(
    k: int, dtype: torch.dtype, expected: list[list[int]] | None
) -> tuple[dict[str, Any], list[list[int]]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = load_model(SHIPPED_MODEL, dtype=dtype, device="cuda")
    engine = Engine(model, num_speculative_tokens=k, max_rows=8, max_model_len=1024)
    tokens: list[list[int]] = []
    started = time.perf_counter()
    engine.generate(prompts(4), max_new_tokens=8)
    compile_s = time.perf_counter() - started
    for rows in BUCKETS:
        completions = engine.generate(prompts(rows), max_new_tokens=TOKENS, stop_ids=())
        if rows == max(BUCKETS):
            tokens = [c.token_ids for c in completions]
            acceptance = statistics.mean(c.acceptance_length or 1 for c in completions)
    # Never-ending rows in the middle of their pages: every iteration of the timing is a whole one.
    step, state = start(engine, prompts(max(BUCKETS)), TOKENS, [SamplingParams()] * max(BUCKETS), [])
    state.num_cached.fill_(256)
    state.max_len.fill_(2**30)
    row = {
        "k": k,
        "dtype": str(dtype).removeprefix("torch."),
        "rows": max(BUCKETS),
        "acceptance_length": round(acceptance, 3),
        "first_compile_s": round(compile_s, 1),
        **compile_counters(),
        "buckets": [vars(bucket) for bucket in engine.capture_report().buckets],
        **{name: round(value, 1) for name, value in iteration_times(step, state).items()},
    }
    if expected is not None:
        row["first_difference"] = first_difference(tokens, expected)
    return row, tokens


def warm_up(target: TransformersTarget, k: int) -> tuple[Engine, dict[str, Any]]:
    torch.compiler.reset()
    engine = Engine(
        target,
        num_speculative_tokens=k,
        max_rows=LARGE_ROWS,
        max_model_len=LARGE_CONTEXT + 1024,
        page_size=64,
    )
    started = time.perf_counter()
    report = engine.warm_up(sampling=SamplingParams())
    seconds = time.perf_counter() - started
    return engine, {
        "seconds": round(seconds, 1),
        "compile_s": round(report.compile_seconds, 1),
        "capture_s": {bucket.rows: round(bucket.capture_seconds, 2) for bucket in report.buckets},
        "MiB": {bucket.rows: round(bucket.num_bytes / 2**20) for bucket in report.buckets},
    }


def measure_large(k: int) -> dict[str, Any]:
    model, mtp = random_model("v3")
    target = TransformersTarget(model, mtp_layer(model, mtp))
    with (
        tempfile.TemporaryDirectory() as empty,
        target.installed(LARGE_CONTEXT + 1024),
    ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        _, cold = warm_up(target, k)
        engine, warm = warm_up(target, k)
        torch.manual_seed(0)
        size = LARGE_ROWS, LARGE_CONTEXT - 128
        tokens = torch.randint(1, target.vocab_size, size).tolist()
        step, state = start(engine, tokens, 1024, [SamplingParams()] * LARGE_ROWS, [])
        times = iteration_times(step, state)
    return {
        "k": k,
        "rows": LARGE_ROWS,
        "context": LARGE_CONTEXT,
        "cold": cold,
        "warm": warm,
        **{name: round(value, 1) for name, value in times.items()},
        "wall_over_kernels": round(times["wall_us"] / times["kernel_us"], 3),
    }


def measure_shipped(drafts: list[int]) -> list[dict[str, Any]]:
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, device="cuda")
    plain = Engine(model, num_speculative_tokens=0, max_rows=8, max_model_len=1024, compile=False)
    completions = plain.generate(prompts(max(BUCKETS)), max_new_tokens=TOKENS, stop_ids=())
    expected = [completion.token_ids for completion in completions]
    rows = []
    for k in drafts:
        row, _ = measure(k, torch.float32, expected)
        print(json.dumps(row), flush=True)
        rows.append(row)
    row, _ = measure(3, torch.bfloat16, None)
    print(json.dumps(row), flush=True)
    return [*rows, row]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--k", type=int, nargs="*", default=[0, 1, 3, 5])
    parser.add_argument("--models", nargs="+", choices=["shipped", "v3"], default=["shipped", "v3"])
    args = parser.parse_args()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    report: dict[str, Any] = {"machine": machine}
    if "shipped" in args.models:
        report |= {"tokens": TOKENS, "rows": measure_shipped(args.k)}
    if "v3" in args.models:
        report["v3"] = measure_large(3)
        print(json.dumps(report["v3"]), flush=True)
    write_report(report, args.output)


if __name__ == "__main__":
    main()
