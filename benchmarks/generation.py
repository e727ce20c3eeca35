"""Speculation on this machine with the shipped model: compile times, tokens per second, share of the ideal.

    python -m benchmarks.generation --output benchmarks/results/generation.json

For each number of drafts k, one process compiles the step with empty caches (cold), a second one with filled ones
(warm); both then generate the same greedy text. With acceptance length AL and L trunk layers, k drafts cost k more
layers, so the speed-up over k = 0 is at most AL * L / (L + k) when verifying k + 1 tokens costs as much as one.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.reporting import command_parser, write_report

PROMPT = "And it came to pass, that"
TOKENS = 200


def measure(k: int, device: str, dtype: str) -> dict[str, Any]:
    """In this process: compile the step on first use, then time whole generations of the same text."""
    import torch

    from mla_compile import Engine, load_model, load_tokenizer
    from mla_compile.defaults import SHIPPED_MODEL

    model = load_model(SHIPPED_MODEL, dtype=getattr(torch, dtype), device=device)
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    assert tokenizer is not None
    prompt = tokenizer(PROMPT)["input_ids"]
    engine = Engine(model, num_speculative_tokens=k, max_rows=1, max_model_len=512, compile=True)
    start = time.perf_counter()
    engine.generate([prompt], max_new_tokens=2 + k)
    compile_s = time.perf_counter() - start
    seconds = []
    completions = []
    for _ in range(5):
        start = time.perf_counter()
        completions += engine.generate([prompt], max_new_tokens=TOKENS, stop_ids=())
        seconds.append(time.perf_counter() - start)
    completion = completions[0]
    return {
        "k": k,
        "compile_s": round(compile_s, 1),
        "tokens_per_s": round(len(completion.token_ids) / statistics.median(seconds), 1),
        "acceptance_length": round(completion.acceptance_length or 1.0, 3),
        "token_ids": completion.token_ids,
        "layers": len(model.layers),
    }


def in_new_process(k: int, args: argparse.Namespace, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.generation", "--measure", str(k)]
    command += ["--device", args.device, "--dtype", args.dtype]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for k in args.k:
        with tempfile.TemporaryDirectory() as cache:
            cold, row = (in_new_process(k, args, cache) for _ in ("cold", "warm"))
        plain = rows[0] if rows else row
        ideal = row["acceptance_length"] * row["layers"] / (row["layers"] + k)
        speed_up = row["tokens_per_s"] / plain["tokens_per_s"]
        rows.append(
            {
                "k": k,
                "cold_compile_s": cold["compile_s"],
                "warm_compile_s": row["compile_s"],
                "tokens_per_s": row["tokens_per_s"],
                "acceptance_length": row["acceptance_length"],
                "speed_up": round(speed_up, 2),
                "of_ideal": round(speed_up / ideal, 2),
                "same_tokens": row["token_ids"] == plain.get("token_ids", row["token_ids"]),
                "token_ids": row["token_ids"],
            }
        )
        print(
            json.dumps({name: value for name, value in rows[-1].items() if name != "token_ids"}), flush=True
        )
    return [{name: value for name, value in row.items() if name != "token_ids"} for row in rows]


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--k", type=int, nargs="*", default=[0, 1, 3, 5])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args.device, args.dtype)))
        return
    rows = compare(args)
    if args.output:
        import torch

        machine = {"cpus": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
        if args.device == "cuda":
            machine["gpu"] = torch.cuda.get_device_name()
        result = {"machine": machine, "dtype": args.dtype, "prompt": PROMPT, "tokens": TOKENS, "rows": rows}
        write_report(result, args.output)


if __name__ == "__main__":
    main()
