"""Tokens a second by the number of drafts, on texts with many and with few accepted drafts.

    python -m benchmarks.draft_length --output benchmarks/results/draft_length.cpu.json  # without a GPU

The shipped model continues held-out texts: Python at temperature 0.1, whose drafts are mostly accepted ("high"), prose
at temperature 0.7, with half of its drafts accepted ("low"), and the same with noise for the MTP layer's weights and no
draft accepted ("none"). All rows are sampled, so that one kind of step is compiled.

Engines with different numbers of drafts take turns, so that other work on the machine slows all of them down. A first
round compiles and is not counted. Tokens/s are medians of the rounds, prompts included; on a CPU seconds are CPU time
of the process, with one thread.
"""

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.acceptance import PROMPTS
from benchmarks.reporting import add_row, command_parser
from mla_compile import Engine, SamplingParams, load_model, load_tokenizer
from mla_compile.defaults import SHIPPED_MODEL

TEXTS = {"high": ("python", 0.1), "low": ("bible", 0.7), "none": ("bible", 0.7)}
"""The prompts' domain and the temperature."""


def engines_of(longest: int, rows: int, device: str) -> dict[str, Engine]:
    """Engines by the number of drafts, each with a model of its own, since a model has one set of caches."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {
        str(k): Engine(
            load_model(SHIPPED_MODEL, dtype=dtype, device=device),
            num_speculative_tokens=k,
            max_rows=rows,
            max_model_len=1024,
        )
        for k in range(longest + 1)
    }


def spoil(engine: Engine) -> None:
    """Noise for the MTP layer's weights."""
    with torch.no_grad():
        for weight in engine.model.mtp.parameters():
            weight.normal_(std=0.02)
    engine.reset_prefix_cache()


def generate(engine: Engine, prompts: list[list[int]], temperature: float, tokens: int) -> dict[str, float]:
    """Figures of completing all prompts."""
    sampling = [SamplingParams(temperature=temperature, seed=seed) for seed in range(len(prompts))]
    clock = time.perf_counter if engine.device.type == "cuda" else time.process_time
    before, start = engine.stats, clock()
    engine.generate(prompts, sampling, max_new_tokens=tokens, stop_ids=())
    seconds, after = clock() - start, engine.stats
    num_verified = after.num_verified - before.num_verified
    return {
        "tokens_per_s": (after.num_tokens - before.num_tokens) / seconds,
        "acceptance_length": (after.num_verified_tokens - before.num_verified_tokens) / num_verified,
    }


def measure(
    engines: dict[str, Engine], text: str, prompts: list[list[int]], tokens: int, rounds: int
) -> dict[str, Any]:
    """A row of the result: one text, one batch."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(1 + rounds):
        for name, engine in engines.items():
            runs[name].append(generate(engine, prompts, TEXTS[text][1], tokens))
    counted = {name: of_engine[1:] for name, of_engine in runs.items()}

    def medians(key: str, digits: int) -> dict[str, float]:
        return {
            name: round(statistics.median(run[key] for run in of_engine), digits)
            for name, of_engine in counted.items()
        }

    return {
        "text": text,
        "rows": len(prompts),
        "tokens_per_s": medians("tokens_per_s", 1),
        "acceptance_length": medians("acceptance_length", 2),
    }


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--texts", nargs="*", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--longest", type=int, default=3, help="drafts a step, at most")
    parser.add_argument("--tokens", type=int, default=256, help="new ones of each prompt")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # so that no thread waits for other work on the machine
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    assert tokenizer is not None
    held_out = json.loads(PROMPTS.read_text(encoding="utf-8"))
    engines = engines_of(args.longest, max(args.rows), device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "tokens_per_prompt": args.tokens,
        "rounds": args.rounds,
        "rows": [],
    }
    for text in TEXTS:
        if text not in args.texts:
            continue
        if text == "none":  # the last one, as it spoils the models
            for engine in engines.values():
                spoil(engine)
        for rows in args.rows:
            prompts = [tokenizer(prompt)["input_ids"] for prompt in held_out[TEXTS[text][0]][:rows]]
            add_row(report, measure(engines, text, prompts, args.tokens, args.rounds), args.output)


if __name__ == "__main__":
    main()
