"""The server beside the engine called directly: tokens/s and the time to the first token of 1, 8, 32 streams.

    python -m benchmarks.server --output benchmarks/results/server.json

Both run the same engine settings on the same prompts, one after the other: `mla-compile serve` in a process of its own,
which this one asks over HTTP, all streams at once; then the engine in this process, all requests added before the first
step. `--model` names a checkpoint with a tokenizer, whose ids of held-out texts are the prompts. Nothing ends before
`--tokens` tokens. Prefixes are not shared, or a round would find the last one's prompts.

Of `--rounds` rounds, the best one's tokens/s counts, and its median and longest time to a first token. `ratio`: the
server's tokens/s by the engine's.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.http_client import ask, metrics, quantile, stream
from benchmarks.reporting import add_row
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine import Checkpoint, Engine
from mla_compile.models import load_tokenizer
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate.drafter import loads_mtp

TEXTS = Path(__file__).parent / "held_out_prompts.json"

Round = tuple[float, list[float]]
"""Seconds from the first request to the last token; from the first request to each one's first token."""


def prompts_of(model: Path, count: int, length: int) -> list[list[int]]:
    """Token ids of held-out texts, one after another, cut to a length."""
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None, "a server needs a tokenizer"
    texts = [text for kind in json.loads(TEXTS.read_text()).values() for text in kind]
    ids: list[int] = tokenizer(" ".join(texts), verbose=False)["input_ids"]
    while len(ids) < count * length:
        ids += ids
    return [ids[i * length : (i + 1) * length] for i in range(count)]


@contextmanager
def server(args: argparse.Namespace, max_model_len: int) -> Iterator[str]:
    """Its URL, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = {
        "--model": args.model,
        "--served-model-name": "served",
        "--device": args.device,
        "--dtype": args.dtype,
        "--num-speculative-tokens": args.k,
        "--max-rows": max(args.streams),
        "--max-model-len": max_model_len,
        "--port": port,
    }
    command = [
        sys.executable,
        "-c",
        "from mla_compile.cli import main; main()",
        "serve",
        "--no-prefix-caching",
    ]
    command += [] if args.compile else ["--no-compile"]
    command += [str(part) for flag in flags.items() for part in flag]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                sys.exit(f"the server has ended with status {process.returncode}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return asyncio.run(ask(url, "GET", "/ready")).status == 200
    except OSError:
        return False


async def through_server(url: str, prompts: Sequence[list[int]], num_tokens: int) -> Round:
    """All prompts at once, each a stream of its own."""
    begin = time.perf_counter()

    async def one(prompt: list[int]) -> float:
        body = {"model": "served", "prompt": prompt, "temperature": 0, "max_tokens": num_tokens}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        first, before, last = 0.0, b"", b""
        async with aclosing(stream(url, body)) as events:
            async for event in events:
                first = first or time.perf_counter() - begin
                before, last = last, event
        if last != b"[DONE]" or json.loads(before)["usage"]["completion_tokens"] != num_tokens:
            raise RuntimeError(f"an answer that is not whole: {before.decode()}")
        return first

    firsts = await asyncio.gather(*map(one, prompts))
    return time.perf_counter() - begin, firsts


def directly(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> Round:
    """The same by `Engine.step`."""
    begin = time.perf_counter()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts]
    firsts = [0.0] * len(requests)
    while engine.has_work():
        engine.step()
        now = time.perf_counter() - begin
        for i, request in enumerate(requests):
            if request.completion.token_ids and not firsts[i]:
                firsts[i] = now
    return time.perf_counter() - begin, firsts


def best(rounds: Sequence[Round], num_tokens: int) -> dict[str, float]:
    """Figures of the fastest."""
    seconds, firsts = min(rounds)
    return {
        "tokens_per_s": round(len(firsts) * num_tokens / seconds, 1),
        "first_token_ms": round(1e3 * statistics.median(firsts), 1),
        "last_first_token_ms": round(1e3 * max(firsts), 1),
    }


def measure(
    args: argparse.Namespace, run: Callable[[Sequence[list[int]]], Round], prompts: Sequence[list[int]]
) -> dict[int, dict[str, float]]:
    """By number of streams. A round of each goes before, unmeasured."""
    found = {}
    for count in args.streams:
        run(prompts[:count])
        found[count] = best([run(prompts[:count]) for _ in range(args.rounds)], args.tokens)
    return found


def measure_server(
    args: argparse.Namespace, prompts: Sequence[list[int]], max_model_len: int
) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """Its figures, and the server's own of how late bytes are, over all rounds."""
    with server(args, max_model_len) as url:
        before = asyncio.run(metrics(url))
        found = measure(args, lambda some: asyncio.run(through_server(url, some, args.tokens)), prompts)
        after = asyncio.run(metrics(url))
    parts = {"p50": 0.5, "p99": 0.99}
    late = {
        name: round(1e3 * quantile(before, after, "mla_delivery_seconds", part), 3)
        for name, part in parts.items()
    }
    return found, late


def load_engine(args: argparse.Namespace, max_model_len: int) -> Engine:
    """Set as the server's."""
    dtype, mtp = getattr(torch, args.dtype), loads_mtp(args.k, None)
    checkpoint = Checkpoint.load(args.model, dtype=dtype, device=args.device, mtp=mtp)
    engine = Engine(
        checkpoint.model,
        num_speculative_tokens=args.k,
        max_rows=max(args.streams),
        max_model_len=max_model_len,
        prefix_caching=False,
        compile=args.compile,
    )
    if args.compile:
        engine.warm_up()
    return engine


def main() -> None:
    """The command."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="bfloat16" if on_gpu else "float32"
    )
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    prompts = prompts_of(args.model, max(args.streams), args.prompt_tokens)
    max_model_len = args.prompt_tokens + args.tokens + 16
    served, late = measure_server(args, prompts, max_model_len)
    engine = load_engine(args, max_model_len)
    direct = measure(args, lambda some: directly(engine, some, args.tokens), prompts)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
        "model": args.model.name,
        "k": args.k,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "delivery_ms": late,
        "rows": [],
    }
    for count in args.streams:
        ratio = round(served[count]["tokens_per_s"] / direct[count]["tokens_per_s"], 3)
        row = {"streams": count, "server": served[count], "engine": direct[count], "ratio": ratio}
        add_row(report, row, args.output)


if __name__ == "__main__":
    main()
