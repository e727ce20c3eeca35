"""Counts completions that depend on the rest of the batch, with and without `batch_invariant=True`.

    python -m benchmarks.batch_invariance --output benchmarks/results/batch_invariance.json

`again`: the shipped model in bfloat16 continues 32 held-out prompts greedily, by 384 tokens, in 32 rows with 3 drafts,
in the default mode: by `--repeats` new engines, one after another, in each of three processes that run at once. Each
process starts with an empty compile cache. Counts the completions that differ from the first engine's.

`differing`: the same prompts. Counts the completions with any token that differs from those of the prompt alone,
without drafts: in a batch of 32 rows; with 3 drafts; with both. Off, then on. Runs of 32 rows are repeated `--repeats`
times.

`compared`: `check_batch_invariance` of each of `--models`, on at least `--compare` tokens: the shipped model; `v3`, 12
layers of DeepSeek-V3's architecture, and `glm`, 8 layers of GLM-4.7-Flash's, of transformers with
random weights. All in bfloat16, with 0 and 3 drafts, greedy and sampled.

The output has one row for each part, mode, run and model. A run replaces those that it measures.
"""

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.acceptance import PROMPTS
from benchmarks.reporting import add_row, command_parser, with_known_rows
from benchmarks.transformers_generate import random_model
from mla_compile import Engine, SamplingParams, load_model, load_tokenizer
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.integrations.transformers.mtp import mtp_layer
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.testing import check_batch_invariance

PROCESSES = 3
RUNS = {"32 rows": (32, 0), "3 drafts": (1, 3), "32 rows, 3 drafts": (32, 3)}
"""Rows and drafts."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONGEST = 1024


def held_out_prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    assert tokenizer is not None
    texts: dict[str, list[str]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    return [tokenizer(text)["input_ids"] for of_domain in texts.values() for text in of_domain]


def shipped() -> Any:
    return load_model(SHIPPED_MODEL, dtype=torch.bfloat16, device=DEVICE)


def engine_of(model: Any, rows: int, k: int, invariant: bool) -> Engine:
    return Engine(
        model,
        max_rows=rows,
        num_speculative_tokens=k,
        max_model_len=LONGEST,
        batch_invariant=invariant,
        prefix_caching=False,
    )


def completions(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    found = engine.generate(prompts, max_new_tokens=tokens, stop_ids=())
    return [completion.token_ids for completion in found]


def repeated(prompts: list[list[int]], tokens: int, repeats: int) -> list[list[list[int]]]:
    """The completions of `repeats` engines in this process, with an empty compile cache."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        model = shipped()
        return [completions(engine_of(model, 32, 3, False), prompts, tokens) for _ in range(repeats)]


def again(prompts: list[list[int]], tokens: int, repeats: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        found = pool.starmap(repeated, [(prompts, tokens, repeats)] * PROCESSES)
    first = found[0][0]
    different = [[sum(a != b for a, b in zip(run, first, strict=True)) for run in runs] for runs in found]
    return {"part": "again", "prompts": len(prompts), "tokens": tokens, "different": different}


def differing(
    prompts: list[list[int]], tokens: int, repeats: int, invariant: bool, runs: list[str]
) -> Iterator[dict[str, Any]]:
    """A row for each kind of run: how many completions differ, in each repetition."""
    model = shipped()
    alone = completions(engine_of(model, 1, 0, invariant), prompts, tokens)
    for name in runs:
        rows, k = RUNS[name]
        engine, counts = engine_of(model, rows, k, invariant), []
        for _ in range(repeats if rows > 1 else 1):
            found = completions(engine, prompts, tokens)
            counts.append(sum(mine != theirs for mine, theirs in zip(found, alone, strict=True)))
        yield {
            "part": "differing",
            "batch_invariant": invariant,
            "run": name,
            "prompts": len(prompts),
            "tokens": tokens,
            "different": counts,
        }


def compared(name: str, prompts: list[list[int]], tokens: int, new_tokens: int, rows: int) -> dict[str, Any]:
    """tokens: the least number to compare."""
    sampling = [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, seed=7)]
    texts = len(prompts) + (len(prompts) + 1) // 2
    rounds = -(-tokens // (2 * texts * new_tokens))
    arguments: dict[str, Any] = {"max_new_tokens": new_tokens, "max_rows": rows, "rounds": rounds}
    began = time.perf_counter()
    if name == "shipped":
        report = check_batch_invariance(shipped(), prompts, sampling, **arguments)
    else:
        model, mtp = random_model(name, layers={"v3": 12, "glm": 8}[name])
        target = TransformersTarget(model, mtp_layer(model, mtp))
        with target.installed(LONGEST):
            report = check_batch_invariance(target, prompts, sampling, **arguments)
    return {
        "part": "compared",
        "model": name,
        "requests": report.num_requests,
        "tokens": report.num_tokens,
        "positions_with_latents": report.num_latents,
        "different": report.num_different,
        "first": report.differences[:1],
        "seconds": round(time.perf_counter() - began),
    }


def what(row: dict[str, Any]) -> tuple[Any, ...]:
    """The measurement of a row."""
    return tuple(row.get(name) for name in ("part", "batch_invariant", "run", "model"))


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=["again", "differing", "compared"],
        default=["again", "differing", "compared"],
    )
    parser.add_argument(
        "--models", nargs="*", choices=["shipped", "v3", "glm"], default=["shipped", "v3", "glm"]
    )
    parser.add_argument("--modes", nargs="*", choices=["off", "on"], default=["off", "on"])
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument(
        "--tokens", type=int, default=384, help="new ones of each prompt, where they are counted"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compare", type=int, default=350_000, help="tokens of each model")
    args = parser.parse_args()
    prompts = held_out_prompts()[:: 32 // args.prompts]
    report: dict[str, Any] = {"torch": torch.__version__, "device": DEVICE, "rows": []}
    if DEVICE == "cuda":
        report |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    report = with_known_rows(report, args.output)

    def add(row: dict[str, Any]) -> None:
        report["rows"] = [other for other in report["rows"] if what(other) != what(row)]
        add_row(report, row, args.output)

    if "again" in args.parts:
        add(again(prompts, args.tokens, args.repeats))
    for mode in args.modes if "differing" in args.parts else ():
        torch.compiler.reset()
        for row in differing(prompts, args.tokens, args.repeats, mode == "on", args.runs):
            add(row)
    for name in args.models if "compared" in args.parts else ():
        torch.compiler.reset()
        add(compared(name, prompts, args.compare, args.tokens, len(prompts)))


if __name__ == "__main__":
    main()
