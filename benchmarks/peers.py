"""An installed vLLM and this package in turn: the same shape, prompts and checks, on the same card.

    python -m benchmarks.peers --parts steps prompts --rows 1 8 32 --output benchmarks/results/peers.json
    python -m benchmarks.peers --parts steps --drafts 3 --rows 1 8 32 --output benchmarks/results/peers.json
    python -m benchmarks.peers --parts servers --weights fp8 --drafts 0 3 --rows 8 32 128 \
        --checkpoint /dev/shm/glm --output benchmarks/results/peers.json
    python -m benchmarks.peers --merge benchmarks/results/peers.json card0.json card1.json --plot docs/peers.svg

GLM-4.7-Flash's shape, 47 layers and the MTP layer, random weights with variance 1 / fan-in. Each system, kind of
weights and number of drafts runs in a process of its own, one after the other, and the output has one row for each of
these, each number of rows and each kind of card: a run replaces the rows that it measures. With drafts vLLM runs with
each of `--runners`; the row is of the faster one ("0" for its V1 model runner, "1" for V2) and has the other's figure.

`steps`: about 1,000 tokens a row. Beside `prompts` our prompts run compiled, else eagerly. `ms_per_step` is the median
time between the results of two steps in which all rows decode; the floor is that of `benchmarks.fp8_step`. `prompts`:
984 tokens a row, at most 16,384 tokens a step. `ms` is the time until all rows have their first token, the median of
all repetitions after `first_ms`; our engine runs after `warm_up`. Checks: `tokens_per_step`, of a row (steps) or of all
prompts, and `experts`, how many experts of a layer the tokens of a step choose (mean over layers). They are counted
after the timed steps, for the last tokens of the texts that these wrote, one a row and one for each draft, or for the
prompts of one step.

`servers`: vLLM's OpenAI server and `mla-compile serve`. Each of `--rows` streams begins at random and sends its next
request after the answer to the last one: 200 to 4,000 token ids, 256 new tokens. Tokens/s, and p50 and p99 of the time
between tokens and to the first one. Our server loads a checkpoint of 62 GB, which is written to `--checkpoint` if it is
not there, and writes text; vLLM's has no tokenizer.

vLLM has to be installed (0.26 is the newest for torch 2.11). Nothing needs a network.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from torch import Tensor

import mla_compile
from benchmarks import vllm_engine
from benchmarks.fp8_step import CONTEXT, PAGE_SIZE, prompts_of
from benchmarks.http_client import Connection, connected
from benchmarks.measuring import DEVICE, figures, floor_bytes, read_bandwidth
from benchmarks.processes import ProcessFailed, meet, module_command, run, send_row
from benchmarks.random_weights import TINY, Weights, meta_model_of, random_model, settings_of
from benchmarks.reporting import add_row, card_name, command_parser, drop_rows, with_known_rows
from benchmarks.server import server, started
from mla_compile import Engine, MLABatch, SamplingParams, prefill_segment

FIGURES = {"steps": "ms_per_step", "prompts": "ms", "servers": "tokens_per_s"}
"""The figure of each part that tells the faster runner."""
KEYS = ("part", "system", "weights", "drafts", "rows", "device")
"""They identify a row of the output."""
FP8_ACTIVATIONS = "fp8_activations"
"""FP8 weights with the engine's option of this name."""
STEP_TOKENS, PROMPT_LEN = 16_384, 984
WARM_UP, NEW_TOKENS, LEAST_STEPS = 8, 72, 8
TINY_LEN, TINY_NEW_TOKENS = 40, 24
PROMPT_NEW_TOKENS = 24
REPETITIONS = 6


@dataclass(frozen=True)
class Job:
    """What one process measures. runner: of vLLM's model, see `benchmarks.vllm_engine`."""

    parts: list[str]
    system: str
    weights: str
    drafts: int
    rows: list[int]
    layers: int | None
    tiny: bool
    runner: str | None

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of("glm", self.layers, tiny=self.tiny)

    @property
    def stored(self) -> Weights:
        """The kind of weights in memory."""
        return "bf16" if self.weights == "bf16" else "fp8"

    def row(self, part: str, rows: int, found: dict[str, Any]) -> dict[str, Any]:
        """A row of the output, with the machine."""
        machine: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
            "torch": torch.__version__,
            "version": vllm_engine.version() if self.system == "vllm" else mla_compile.__version__,
        }
        if self.system == "ours":
            machine |= {"packages": packages()}
        runner = {} if self.runner is None else {"runner": self.runner}
        case = {"part": part, "system": self.system, "weights": self.weights, "drafts": self.drafts}
        return case | {"rows": rows} | runner | found | machine


def packages() -> list[str]:
    """Those whose attention this package uses here."""
    found = []
    for name, module in (("flash-attn-4", "flash_attn.cute.interface"), ("sgl-flash-mla", "flash_mla")):
        with suppress(ImportError):
            import_module(module)
            found.append(f"{name} {version(name)}")
    return found


class OurEngine:
    """This package's engine. Prompts that are not timed run eagerly."""

    def __init__(self, job: Job, max_len: int) -> None:
        self._model = random_model(job.settings, job.stored, mtp=job.drafts > 0, device=DEVICE)
        eager = patch("mla_compile.engine.steps._compiles_mixed", lambda *_: False)
        with nullcontext() if "prompts" in job.parts else eager:
            self._engine = Engine(
                self._model,
                num_speculative_tokens=job.drafts,
                max_rows=max(job.rows),
                max_model_len=max_len,
                max_tokens_per_step=STEP_TOKENS,
                page_size=PAGE_SIZE,
                prefix_caching=False,
                fp8_activations=job.weights == FP8_ACTIVATIONS,
            )
        if "prompts" in job.parts:
            self._engine.warm_up(sampling=SamplingParams(temperature=0))

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> Iterator[list[list[int]]]:
        """As `VllmEngine.run`."""
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        requests = [self._engine.add(prompt, params) for prompt in prompts]
        while self._engine.has_work():
            self._engine.step()
            yield [request.completion.token_ids for request in requests]

    def routed(self, text: list[int]) -> list[Tensor]:
        """As `VllmEngine.routed`; it runs eagerly, in pages of the idle engine."""
        found: list[Tensor] = []
        gates = [layer.mlp.gate for layer in self._model.layers if hasattr(layer.mlp, "gate")]
        hooks = [gate.register_forward_hook(lambda *args: found.append(args[-1][1].cpu())) for gate in gates]
        pages = torch.arange(1, 1 + -(-len(text) // PAGE_SIZE), dtype=torch.int32, device=DEVICE)
        segment, positions = prefill_segment([len(text)], [0], pages[None], page_size=PAGE_SIZE)
        with torch.no_grad():
            self._model(torch.tensor(text, device=DEVICE), positions, MLABatch(prefill=segment))
        for hook in hooks:
            hook.remove()
        return found


System = OurEngine | vllm_engine.VllmEngine


def steps(system: System, prompts: list[list[int]], drafts: int, new_tokens: int) -> dict[str, float]:
    """Figures of the steps in which all rows decode."""
    for _ in range(2):  # compiles and captures
        list(system.run(prompts, WARM_UP))
    known, texts, results = [0] * len(prompts), list[list[int]](), list[tuple[float, int]]()
    for texts in system.run(prompts, new_tokens):
        now, lengths = time.perf_counter(), [len(text) for text in texts]
        if all(new > old for new, old in zip(lengths, known, strict=True)):
            results.append((now, sum(lengths)))
        known = lengths
    if len(results) < LEAST_STEPS:
        raise RuntimeError(f"all of {len(prompts)} rows decoded in {len(results)} steps: too little memory?")
    times = [after - before for (before, _), (after, _) in itertools.pairwise(results)]
    tokens = (results[-1][1] - results[0][1]) / len(times) / len(prompts)
    whole = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    return {
        "ms_per_step": round(statistics.median(times) * 1e3, 3),
        "tokens_per_step": round(tokens, 2),
        "experts": experts(system, whole, 1 + drafts),
    }


def first_tokens(system: System, prompts: list[list[int]]) -> dict[str, float]:
    """Figures of the time until all rows have their first token; the first rows decode meanwhile."""
    times, length, num_steps = [], len(prompts[0]), 0
    for _ in range(REPETITIONS):
        began, elapsed, counts = time.perf_counter(), 0.0, set[int]()
        for texts in system.run(prompts, PROMPT_NEW_TOKENS):
            if not elapsed:
                counts.add(sum(map(len, texts)))
                elapsed = all(texts) * (time.perf_counter() - began)
        times.append(elapsed * 1e3)
        num_steps = len(counts - {0})
    return {
        "first_ms": round(times[0], 1),
        "ms": round(statistics.median(times[1:]), 1),
        "tokens_per_step": round(len(prompts) * length / num_steps),
        "experts": experts(system, prompts[: STEP_TOKENS // length], length),
    }


def experts(system: System, texts: Sequence[list[int]], last: int) -> float:
    """How many experts of a layer the `last` tokens of the texts choose, the mean over layers."""
    layers = zip(*(system.routed(text) for text in texts), strict=True)
    chosen = [{expert for ids in layer for expert in ids[-last:].flatten().tolist()} for layer in layers]
    return round(statistics.mean(map(len, chosen)), 1)


def process(job: Job, take: Callable[[dict[str, Any]], None]) -> None:
    """Measure in this process. take: is called with each row."""
    model = meta_model_of(job.settings, job.stored, mtp=job.drafts > 0)
    bandwidth = read_bandwidth(2**32 if DEVICE == "cuda" else 2**24)
    torch.cuda.empty_cache()
    lengths = dict.fromkeys(FIGURES, TINY_LEN) if job.tiny else {"steps": CONTEXT, "prompts": PROMPT_LEN}
    new_tokens = TINY_NEW_TOKENS if job.tiny else NEW_TOKENS
    max_len = max(lengths.values()) + new_tokens + 8
    with tempfile.TemporaryDirectory() as folder:
        if job.system == "vllm":
            vllm_engine.write_config(Path(folder), job.settings, job.stored)
            sizes = job.drafts, job.runner, job.rows, max_len, STEP_TOKENS
            system: System = vllm_engine.VllmEngine(Path(folder), *sizes)
        else:
            system = OurEngine(job, max_len)
        for rows, part in itertools.product(job.rows, job.parts):
            length = lengths[part]
            prompts = [prompt[:length] for prompt in prompts_of(model, rows)]
            if part == "steps":
                floor = floor_bytes(model, rows, length, drafts=job.drafts) / bandwidth
                found = {"floor_ms": round(floor * 1e3, 3)} | steps(system, prompts, job.drafts, new_tokens)
            else:
                found = first_tokens(system, prompts)
            take(job.row(part, rows, found))


# --- servers


@dataclass(frozen=True)
class Load:
    """The requests of a stream, which begins within `delay_s`, and the least and most tokens of their prompts."""

    lengths: tuple[int, int]
    new_tokens: int
    delay_s: float

    def streams(self, rows: int, requests: int, vocab_size: int) -> list[tuple[float, list[list[int]]]]:
        """The delay of each stream, and its prompts."""
        draw = random.Random(rows)
        ids = range(1, vocab_size)
        prompts = [draw.choices(ids, k=draw.randint(*self.lengths)) for _ in range(rows * requests)]
        return [(draw.uniform(0, self.delay_s), prompts[i::rows]) for i in range(rows)]


LOAD, TINY_LOAD = Load((200, 4000), 256, 4.0), Load((8, 40), 8, 0.2)


def serve(
    job: Job, checkpoint: Path, step_tokens: int | None, requests: int, take: Callable[[dict[str, Any]], None]
) -> None:
    """Measure a server. take: is called with each row."""
    load = TINY_LOAD if job.tiny else LOAD
    most, max_len = max(job.rows), load.lengths[1] + load.new_tokens + 16
    body = {"model": "served", "temperature": 0, "max_tokens": load.new_tokens, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        if job.system == "vllm":
            vllm_engine.write_config(Path(folder), job.settings, job.stored)
            sizes = job.drafts, job.runner, most, max_len, step_tokens
            command, environment = vllm_engine.server(Path(folder), *sizes)
            running = started(command, "/health", environment)
            body["return_token_ids"] = True  # or an event without text would not tell its tokens
        else:
            write_checkpoint(checkpoint, job)
            settings = {"device": DEVICE, "dtype": "bfloat16", "k": job.drafts, "compile": not job.tiny}
            flags = ["--quantize", "fp8"] if job.stored == "fp8" else []
            flags += ["--fp8-activations"] if job.weights == FP8_ACTIVATIONS else []
            flags += ["--max-tokens-per-step", str(step_tokens)] if step_tokens else []
            running = server(argparse.Namespace(model=checkpoint, streams=[most], **settings), max_len, flags)
            body["draft_positions"] = True  # as above
        with running as url:
            for rows in job.rows:
                streams = load.streams(rows, requests, job.settings["vocab_size"])
                first = [(0.0, prompts[:1]) for _, prompts in streams]
                asyncio.run(under_load(url, first, body | {"max_tokens": min(32, load.new_tokens)}))
                found = asyncio.run(under_load(url, streams, body))
                take(job.row("servers", rows, found | {"requests": requests}))


def write_checkpoint(directory: Path, job: Job) -> None:
    """Unless it is there."""
    if not (directory / "model.safetensors.index.json").exists():  # the last one written
        options = [str(directory), "--layers", str(job.settings["num_hidden_layers"])]
        if job.tiny:
            options += ["--set", *(f"{name}={TINY[name]}" for name in TINY.keys() - {"num_hidden_layers"})]
        subprocess.run(module_command("benchmarks.random_checkpoint", *options), check=True)


async def under_load(
    url: str, streams: Sequence[tuple[float, list[list[int]]]], body: dict[str, Any]
) -> dict[str, float]:
    """Figures of streams that send their prompts one after another."""

    async def answered(connection: Connection, prompt: list[int]) -> list[float]:
        """The times of the request, and of each event with tokens."""
        asked_at, times, events = time.perf_counter(), list[float](), list[bytes]()
        async for event in connection.stream(body | {"prompt": prompt}):
            times.append(time.perf_counter())
            events.append(event)
        counts = list(map(num_tokens, events))
        if sum(counts) != body["max_tokens"]:
            raise RuntimeError(f"an answer of {sum(counts)} tokens, which ends with {events[-2:]}")
        return [asked_at, *itertools.compress(times, counts)]

    async def stream(delay: float, prompts: list[list[int]]) -> list[list[float]]:
        await asyncio.sleep(delay)
        async with connected(url) as connection:
            return [await answered(connection, prompt) for prompt in prompts]

    of_streams = await asyncio.gather(*(stream(*each) for each in streams))
    answers = list(itertools.chain.from_iterable(of_streams))
    seconds = max(times[-1] for times in answers) - min(times[0] for times in answers)
    gaps = [after - before for times in answers for before, after in itertools.pairwise(times[1:])]
    first = figures([times[1] - times[0] for times in answers], len(answers), seconds)
    return figures(gaps, len(answers) * body["max_tokens"], seconds) | {
        "first_token_p50_ms": first["p50_ms"],
        "first_token_p99_ms": first["p99_ms"],
    }


def num_tokens(event: bytes) -> int:
    choices = [] if event == b"[DONE]" else json.loads(event).get("choices", [])
    return sum(len(choice.get("token_ids") or ()) for choice in choices)


# --- the command


def keep(
    report: dict[str, Any], output: Path | None, row: dict[str, Any], other: dict[str, Any] | None
) -> dict[str, Any]:
    """Replace a row by the faster one of two, which gets the figure of the other; returns it."""
    figure = FIGURES[row["part"]]
    if other is not None:
        is_faster = (row[figure] > other[figure]) == (figure == "tokens_per_s")
        row, other = (row, other) if is_faster else (other, row)
        row |= {"other_runner": {figure: other[figure], "runner": other["runner"]}}
    drop_rows(report, {key: row[key] for key in KEYS})
    add_row(report, row, output)
    return row


def merge(output: Path, *files: Path) -> dict[str, Any]:
    """Put the rows of files into the output, each in the place of the one of the same case; returns the report."""
    if not files:
        return dict(json.loads(output.read_text()))
    report = with_known_rows(json.loads(files[0].read_text()) | {"rows": []}, output)
    for row in itertools.chain.from_iterable(json.loads(file.read_text())["rows"] for file in files):
        keep(report, output, row, None)
    return report


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of both systems for each case; a stroke is the floor of a step."""
    import matplotlib.pyplot as plt

    def case_of(row: dict[str, Any]) -> tuple[str, int, int, str]:
        return row["weights"], row["drafts"], row["rows"], card_name(row["device"])

    parts = [part for part in FIGURES if any(row["part"] == part for row in report["rows"])]
    figure, panels = plt.subplots(1, len(parts), figsize=(5.5 * len(parts), 5), squeeze=False)
    for part, axes in zip(parts, panels[0], strict=True):
        rows = [row for row in report["rows"] if row["part"] == part]
        cases = sorted({case_of(row) for row in rows})
        for offset, system, name in ((-0.2, "vllm", "vLLM"), (0.2, "ours", "mla-compile")):
            own = [row for row in rows if row["system"] == system]
            places = [cases.index(case_of(row)) + offset for row in own]
            axes.barh(places, [row[FIGURES[part]] for row in own], 0.4, label=name)
            floors = [row.get("floor_ms", float("nan")) for row in own]
            axes.scatter(floors, places, marker="|", color="black", s=40)
        labels = [
            f"{weights}, {drafts} drafts, {count} rows, {card}" for weights, drafts, count, card in cases
        ]
        axes.set_yticks(range(len(cases)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(f"{part}: {FIGURES[part].replace('_', ' ')}")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def arguments() -> argparse.Namespace:
    parser = command_parser(__doc__)
    add, systems, kinds = parser.add_argument, ["vllm", "ours"], [*get_args(Weights), FP8_ACTIVATIONS]
    add(
        "--parts",
        nargs="+",
        choices=list(FIGURES),
        default=["steps"],
        help="servers alone, not beside others",
    )
    add("--systems", nargs="+", choices=systems, default=systems)
    add(
        "--weights",
        nargs="+",
        choices=kinds,
        default=kinds[:-1],
        help="vLLM's FP8 has FP8 activations always",
    )
    add("--drafts", type=int, nargs="+", default=[0])
    add("--runners", nargs="+", choices=["0", "1"], default=["0", "1"], help="of vLLM with drafts")
    add("--rows", type=int, nargs="+", default=[1, 8, 32])
    add("--layers", type=int, help="instead of the shape's 47")
    add("--tiny", action="store_true", help="a small shape and short texts, for our side on a CPU")
    add("--checkpoint", type=Path, help="of our server; by default a temporary directory")
    add("--tokens-per-step", type=int, help="of both servers, instead of their own defaults")
    add("--requests", type=int, default=4, help="of each stream of a server")
    add("--output", type=Path, help="its other rows are kept")
    add("--merge", type=Path, nargs="+", help="only put the rows of the other files into the first")
    add("--plot", type=Path, help="a picture of what --merge has")
    add("--process", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "servers" in args.parts and len(args.parts) > 1:
        parser.error(f"--parts: expected servers alone, got {' '.join(args.parts)}; run the others apart")
    if args.merge is None and "vllm" in args.systems and find_spec("vllm") is None:
        hint = "install it in this environment, or use --systems ours"
        parser.error(f"--systems: expected an installed vllm, got none; {hint}")
    return args


def main() -> None:
    args = arguments()
    if args.merge is not None:
        report = merge(*args.merge)
        if args.plot is not None:
            plot(report, args.plot)
        return
    if args.process is not None:
        store = meet(args.process[1])
        process(Job(**json.loads(args.process[0])), lambda row: send_row(store, row))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # vLLM's threads may not end
    os.environ |= vllm_engine.ENVIRONMENT
    report = {"layers": args.layers or 47, "context": CONTEXT, "tiny": args.tiny, "rows": []}
    report, failed = with_known_rows(report, args.output), []
    with tempfile.TemporaryDirectory() as folder:
        for system, weights, drafts in itertools.product(args.systems, args.weights, args.drafts):
            if (system, weights) == ("vllm", FP8_ACTIVATIONS):
                continue  # its row of "fp8"
            best: dict[tuple[str, int], dict[str, Any]] = {}

            def take(row: dict[str, Any], best: dict[tuple[str, int], dict[str, Any]] = best) -> None:
                case = row["part"], row["rows"]
                best[case] = keep(report, args.output, row, best.get(case))

            for runner in args.runners if system == "vllm" and drafts else (None,):
                job = Job(args.parts, system, weights, drafts, args.rows, args.layers, args.tiny, runner)
                try:
                    if args.parts == ["servers"]:
                        checkpoint = args.checkpoint or Path(folder)
                        serve(job, checkpoint, args.tokens_per_step, args.requests, take)
                    else:
                        command = module_command("benchmarks.peers", "--systems", system, "--process")
                        run([[*command, json.dumps(asdict(job))]], take)
                except (ProcessFailed, SystemExit) as error:
                    failed.append(f"{job}: {error}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
