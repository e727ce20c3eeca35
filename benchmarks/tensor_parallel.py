"""Models that two GPUs share, beside one GPU if they fit there: steps, memory, compiling and correctness.

    python -m benchmarks.tensor_parallel --output benchmarks/results/tensor_parallel.json

`--parts glm`: GLM-4.7-Flash's shape on one GPU and on two, in bfloat16 and in block FP8, without drafts and with one.
`v2`: DeepSeek-V2 as published, in FP8, which no single GPU holds. `v3`: DeepSeek-V3's shape with its MTP layer and as
many layers as two GPUs hold, in FP8. The package's own model, random weights made on the GPUs, about 1,000 tokens a
row. Random weights accept no drafts, so a step with one has its full cost and emits one token.

Each GPU has a process. The configurations of a part compile in parallel, and one at a time is measured while the others
leave their GPUs idle. Rows of the output, each written as soon as it is measured, by their "what":

step: for each batch size `ms_per_step`, the median between two steps in which all rows decode; `floor_ms`, the bytes of
weights and latents that a GPU must read over the bandwidth of a plain read in the same run; from a trace of some steps
the time of kernels, and the part of collectives, found by name. Collectives wait for the other GPU inside their
kernels, so their time includes the wait, and those of the package may include fused ops.

engine: lists have an entry for each process. `weights_gb`, by `plan`, by the tensors and by the allocator; `peak_gb` of
the allocator and `planned_gb`; seconds of compiling and capturing the decode step (steps with prompts run eagerly here,
which halves the wait); whether all processes have the same tokens (null if only one of them has any) and the same
latents, bit by bit, which only the same tokens can give.

tokens: the same with `--judged-layers` of the shape, few, because many random layers turn any rounding into noise, and
with steps with prompts compiled too. One process with the whole bfloat16 model, run eagerly, scores the tokens as in
`benchmarks.fp8_step`.
"""

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.distributed import PrefixStore, Store
from torch.profiler import ProfilerActivity, profile

from benchmarks.fp8_step import PAGE_SIZE, judged
from benchmarks.measuring import DEVICE, Marks, floor_bytes, read_bandwidth
from benchmarks.processes import Group, ProcessFailed, meet, module_command, run, send_row
from benchmarks.random_weights import Weights, meta_model_of, random_model, settings_of
from benchmarks.reporting import add_row, command_parser, write_report
from mla_compile import Engine, Parallel, follow
from mla_compile.engine import CaptureReport
from mla_compile.engine.config import EngineConfig
from mla_compile.engine.memory import plan_memory
from mla_compile.models import MLAForCausalLM

CONTEXT, PROMPT = 1000, 960
"""Tokens of a row halfway through the timed steps, about, and of its prompt."""
WARM_UP, TIMED, TRACED = 12, 64, 4
"""Steps in which all rows decode."""
JUDGED_ROWS, JUDGED_TOKENS = 4, 64
TINY_PROMPT, TINY_TIMED, TINY_JUDGED_TOKENS = 100, 8, 16
COLLECTIVE = re.compile(r"(?!triton_).*(nccl|all_?reduce|all_?gather|collective)", re.IGNORECASE)
"""Names of collective kernels. Inductor's kernels are named after their ops, and are not collectives."""
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Measurements of one shape.

    gpus, drafts: numbers of them. layers: None for all published ones.
    """

    weights: tuple[Weights, ...]
    gpus: tuple[int, ...]
    layers: int | None
    drafts: tuple[int, ...]
    is_judged: bool


PARTS = {
    "glm": Part(("bf16", "fp8"), (1, 2), None, (0, 1), is_judged=True),
    "v2": Part(("fp8",), (2,), None, (0,), is_judged=False),
    "v3": Part(("fp8",), (2,), 22, (0, 1), is_judged=False),
}


@dataclass(frozen=True)
class Job:
    """One configuration of a part: a model on `gpus` GPUs.

    first_gpu: of its processes. place, count: its index, and the number of configurations of the part.
    """

    shape: str
    weights: Weights
    gpus: int
    layers: int | None
    judged_layers: int | None
    drafts: list[int]
    batches: list[int]
    tiny: bool
    first_gpu: int
    place: int
    count: int

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.shape, self.layers, tiny=self.tiny)

    @property
    def has_mtp(self) -> bool:
        return max(self.drafts) > 0

    def config(self, k: int) -> EngineConfig:
        return EngineConfig(
            num_speculative_tokens=k,
            max_rows=max(self.batches),
            max_model_len=self.prompt_len + self.new_tokens(max(self.batches), k),
            page_size=PAGE_SIZE,
            prefix_caching=False,
        )

    @property
    def prompt_len(self) -> int:
        return TINY_PROMPT if self.tiny else PROMPT

    @property
    def steps(self) -> int:
        """Steps until the last of those that are timed."""
        return WARM_UP + (TINY_TIMED if self.tiny else TIMED)

    def new_tokens(self, rows: int, k: int) -> int:
        """Room for all steps and for those in which the first rows decode while others prefill."""
        return (self.steps + TRACED + 4 + 2 * rows * self.prompt_len // 2048) * (1 + k)

    def row(self, what: str, k: int, **more: object) -> dict[str, Any]:
        return {
            "what": what,
            "shape": self.shape,
            "weights": self.weights,
            "layers": self.settings["num_hidden_layers"],
            "gpus": self.gpus,
            "k": k,
            **more,
        }


def led(
    model: MLAForCausalLM, config: EngineConfig, group: Group, work: Callable[[Engine], T]
) -> tuple[T | None, CaptureReport]:
    """Do work that calls an engine: what it gives, None where rank 0's calls are followed, and what was compiled."""
    if group.rank > 0:
        report = follow(model)
        assert report is not None, "rank 0 has made an engine"
        return None, report
    engine = Engine(model, config)
    found = work(engine), engine.capture_report()
    engine.close()
    return found


# --- in a process


def process(job: Job, rank: int, store: Store) -> None:
    """All that one process does."""
    torch.manual_seed(0)
    group = Group(store, rank, job.gpus, job.place, job.count)
    if DEVICE == "cuda":
        torch.cuda.set_device(job.first_gpu + rank)
    parallel = joined(group)
    if job.judged_layers is not None:
        judge(job, group, parallel, store)
    measure(job, group, parallel, store)
    if parallel is not None and parallel.ranks is not None:
        parallel.ranks.leave()


def joined(group: Group) -> Parallel | None:
    """The process's place in its configuration; None where it is alone."""
    if group.size == 1:
        return None
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else None
    dist.init_process_group(
        "gloo" if device is None else "nccl",
        store=PrefixStore("collectives", group.store),
        rank=group.rank,
        world_size=group.size,
        device_id=device,
    )
    return Parallel.of_processes()


def prompts_of(job: Job, count: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(
        1, vocab_size, (count, job.prompt_len), generator=generator
    ).tolist()
    return found


def judge(job: Job, group: Group, parallel: Parallel | None, store: Store) -> None:
    """Send rows that score the tokens of all processes by one process with the whole model."""
    settings = settings_of(job.shape, job.judged_layers, tiny=job.tiny)
    model = random_model(settings, job.weights, mtp=job.has_mtp, device=DEVICE, parallel=parallel)
    prompts = prompts_of(job, JUDGED_ROWS, model.vocab_size)
    num_tokens = TINY_JUDGED_TOKENS if job.tiny else JUDGED_TOKENS

    def generated(engine: Engine) -> list[list[int]]:
        for count in (4, 4):  # a size of prompts is recorded when it comes again
            engine.generate(prompts, max_new_tokens=count)
        return [one.token_ids for one in engine.generate(prompts, max_new_tokens=num_tokens)]

    generations = []
    for k in job.drafts:
        texts, _ = led(model, job.config(k), group, generated)
        generations.append([each for each in group.gathered(f"judged text {k}", texts) if each is not None])
    del model
    if group.rank == 0:
        free()
        whole = random_model(settings, "bf16", mtp=False, device=DEVICE)
        for k, every in zip(job.drafts, generations, strict=True):
            row = job.row(
                "tokens", k, judged_layers=job.judged_layers, same_tokens=equal_texts(every, job.gpus)
            )
            send_row(store, row | judged(whole, prompts[0], every[0][0]))


def measure(job: Job, group: Group, parallel: Parallel | None, store: Store) -> None:
    """Send rows of steps, memory and compiling."""
    free()
    before = allocated()
    model = random_model(job.settings, job.weights, mtp=job.has_mtp, device=DEVICE, parallel=parallel)
    memory = {
        "weights_gb": gb(sum(x.nbytes for x in (*model.parameters(), *model.buffers()))),
        "allocated_weights_gb": gb(allocated() - before),
    }
    for k in job.drafts:
        free()
        # Steps with prompts are not timed: eager, they need not be compiled.
        with patch("mla_compile.engine.steps._compiles_mixed", lambda *_: False):
            found, report = led(model, job.config(k), group, partial(timed, job, group, store, k))
        own = memory | {
            "peak_gb": gb(torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0),
            "compile_s": round(report.compile_seconds, 1),
            "capture_s": round(report.capture_seconds, 1),
        }
        every = group.gathered(f"process {k}", own | {"latents": latents(model)} | (found or {}))
        if group.rank == 0:
            send_row(store, engine_row(job, k, every, list(own)))


def engine_row(job: Job, k: int, every: list[dict[str, Any]], listed: list[str]) -> dict[str, Any]:
    """every: the values of each process; listed: the names that the row has as lists."""
    model = meta_model_of(job.settings, job.weights, mtp=job.has_mtp)
    plan = plan_memory(model, job.config(k), job.gpus)
    return job.row(
        "engine",
        k,
        read_tb_per_s=every[0]["read_tb_per_s"],
        ready_s=every[0]["ready_s"],
        planned_weights_gb=gb(plan.weights),
        planned_gb=gb(plan.total),
        **{name: [one[name] for one in every] for name in listed},
        same_tokens=equal_texts([one["texts"] for one in every if "texts" in one], job.gpus),
        same_latents=all_same([one["latents"] for one in every]),
    )


def timed(job: Job, group: Group, store: Store, k: int, engine: Engine) -> dict[str, Any]:
    """Send a row for each batch size; returns the texts and the other figures of the engine."""
    began, model = time.perf_counter(), engine.model
    prompts = prompts_of(job, max(job.batches), model.vocab_size)
    for batch in sorted(job.batches, reverse=True):
        rehearse(engine, prompts[:batch], k)
    ready, generations = time.perf_counter() - began, []
    with group.turn(f"drafts: {k}"):
        bandwidth = read_bandwidth(2**32 if DEVICE == "cuda" else 2**24)
        free()
        for batch in job.batches:
            texts, figures = decoded(job, engine, prompts[:batch], k)
            generations.append(texts)
            floor = floor_bytes(model, batch, CONTEXT, drafts=k) / bandwidth * 1e3
            if group.rank == 0:
                send_row(store, job.row("step", k, batch=batch, floor_ms=round(floor, 3), **figures))
    return {"texts": generations, "read_tb_per_s": round(bandwidth / 1e12, 2), "ready_s": round(ready, 1)}


def rehearse(engine: Engine, prompts: list[list[int]], k: int) -> None:
    """Compile and record the steps of a batch: prompts of several steps, and some steps in which all rows decode."""
    short = [prompt if row < 3 else prompt[:8] for row, prompt in enumerate(prompts)]
    engine.generate(short, max_new_tokens=8 * (1 + k))


def decoded(
    job: Job, engine: Engine, prompts: list[list[int]], k: int
) -> tuple[list[list[int]], dict[str, float]]:
    """The new tokens of the prompts, and times of steps in which all rows decode."""
    marks = Marks()
    requests = [engine.add(prompt, max_new_tokens=job.new_tokens(len(prompts), k)) for prompt in prompts]

    def step() -> None:
        engine.step()
        ended = [request.completion for request in requests if request.has_ended]
        if ended:
            raise RuntimeError(f"a request has ended before its time: {ended[0]}")

    with marks.after_launches(len(prompts)):
        while len(marks) <= job.steps:
            step()
    wait()
    on_gpu = DEVICE == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        for _ in range(TRACED):
            step()
        wait()
    for request in requests:
        engine.abort(request)
    while engine.has_work():
        engine.step()
    times = [
        (event.name, event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        for event in trace.events()
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU)
    ]
    collectives = [us for name, us in times if COLLECTIVE.match(name)]
    return [request.completion.token_ids for request in requests], {
        "ms_per_step": round(statistics.median(marks.intervals_ms()[WARM_UP:]), 3),
        "tokens_per_step": round(statistics.mean(r.completion.acceptance_length or 1 for r in requests), 3),
        "kernels_ms": round(sum(us for _, us in times) / 1e3 / TRACED, 3),
        "collectives_ms": round(sum(collectives) / 1e3 / TRACED, 3),
        "num_collectives": round(len(collectives) / TRACED),
    }


def latents(model: MLAForCausalLM) -> int:
    """A sum of the bits of all pages but the dummy page, to which any row may write."""
    caches = (spec.layer.kv_cache for spec in model.cache_specs())
    # Without drafts the MTP layer has none.
    return sum(int(x[1:].view(torch.int16).sum(dtype=torch.int64)) for x in caches if x is not None)


def all_same(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)


def equal_texts(values: list[Any], size: int) -> bool | None:
    """Whether all processes have the same texts; None if some have none."""
    return all_same(values) if len(values) == size else None


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Free unused memory, and reset the peak."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def gb(num_bytes: int) -> float:
    return round(num_bytes / 1e9, 2)


# --- the starter


def jobs(name: str, args: argparse.Namespace) -> Iterator[Job]:
    """The configurations of a part that are asked for."""
    part = PARTS[name]
    chosen = [(gpus, weights) for gpus in part.gpus for weights in part.weights if weights in args.weights]
    drafts = [k for k in part.drafts if k in args.drafts]
    if not drafts:
        return
    layers = args.layers if args.layers is not None or args.tiny else part.layers
    alone = 0
    for place, (gpus, weights) in enumerate(chosen):
        first_gpu = alone % args.gpus if gpus == 1 else 0
        alone += gpus == 1
        judged_layers = args.judged_layers if part.is_judged else None
        yield Job(
            *(name, weights, gpus, layers, judged_layers, drafts, args.batches, args.tiny),
            *(first_gpu, place, len(chosen)),
        )


def known_rows(output: Path | None, report: dict[str, Any]) -> list[dict[str, Any]]:
    """What an earlier run has measured.

    Raises:
        SystemExit: elsewhere.
    """
    if output is None or not output.exists():
        return []
    known = json.loads(output.read_text())
    rows: list[dict[str, Any]] = known.pop("rows")
    if known != report:
        raise SystemExit(f"{output} has rows of {known}, not of {report}")
    return rows


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (of_steps, of_weights) = plt.subplots(1, 2, figsize=(11, 4))
    rows = [row for row in report["rows"] if row["what"] == "step" and row["k"] == 0]
    names = {1: "one GPU", 2: "two GPUs"}
    titles = list(dict.fromkeys((row["shape"], row["weights"], row["batch"]) for row in rows))
    for gpus, name in names.items():
        has = {(row["shape"], row["weights"], row["batch"]): row for row in rows if row["gpus"] == gpus}
        places = [i + 0.4 * (gpus - 1) - 0.2 for i, title in enumerate(titles) if title in has]
        own = [has[title] for title in titles if title in has]
        of_steps.barh(places, [row["ms_per_step"] for row in own], 0.4, label=name)
        of_steps.scatter([row["floor_ms"] for row in own], places, marker="|", color="black", s=60)
    of_steps.set_yticks(range(len(titles)), [f"{s} {w}, batch {b}" for s, w, b in titles], fontsize=7)
    of_steps.set_xlabel("ms a step without drafts; a stroke is the floor")
    engines = {
        (row["shape"], row["weights"], row["gpus"]): max(row["weights_gb"])
        for row in report["rows"]
        if row["what"] == "engine"
    }
    models = list(dict.fromkeys((shape, weights) for shape, weights, _ in engines))
    for gpus, name in names.items():
        places = [i + 0.4 * (gpus - 1) - 0.2 for i, model in enumerate(models) if (*model, gpus) in engines]
        heights = [engines[*model, gpus] for model in models if (*model, gpus) in engines]
        of_weights.barh(places, heights, 0.4, label=name)
    of_weights.set_yticks(range(len(models)), [" ".join(model) for model in models], fontsize=7)
    of_weights.set_xlabel("GB of weights a GPU")
    for axes in (of_steps, of_weights):
        axes.invert_yaxis()
    of_weights.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def arguments() -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, help="its other rows are kept")
    parser.add_argument("--plot", type=Path, help="of all rows of the output")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--weights", nargs="+", choices=["bf16", "fp8"], default=["bf16", "fp8"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", choices=[0, 1], default=[0, 1])
    parser.add_argument("--layers", type=int, help="instead of the part's own number")
    parser.add_argument("--judged-layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="narrow layers and few, for CPUs")
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.gpus = torch.cuda.device_count() if DEVICE == "cuda" else 2
    if args.gpus < 2:
        parser.error("it takes two GPUs")
    return args


def main() -> None:
    args = arguments()
    if args.process is not None:
        job, rank, port = args.process
        process(Job(**json.loads(job)), int(rank), meet(port))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # NCCL's own end may wait for recorded graphs
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "context": CONTEXT,
        "tiny": args.tiny,
    }
    report["rows"] = known_rows(args.output, report)
    failed = []

    def take(row: dict[str, Any]) -> None:
        own = {key: row[key] for key in ("what", "shape", "weights", "gpus", "k", "batch") if key in row}
        report["rows"] = [other for other in report["rows"] if not own.items() <= other.items()]
        add_row(report, row, args.output)
        if row.get("same_tokens") is False:
            failed.append(f"{own}: processes say different tokens")

    for part in args.parts:
        commands = [
            module_command("benchmarks.tensor_parallel", "--process", json.dumps(asdict(job)), str(rank))
            for job in jobs(part, args)
            for rank in range(job.gpus)
        ]
        if not commands:
            continue
        began = time.perf_counter()
        try:
            run(commands, take)
        except ProcessFailed as error:
            failed.append(f"{part}: {error}")
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
    write_report(report, args.output)
    if args.plot is not None:
        plot(report, args.plot)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
