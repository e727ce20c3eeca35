"""The server, and the engine called directly: tokens/s and the time to the first token of 1, 8, 32 streams.

    python -m benchmarks.server --output benchmarks/results/server.json
    python -m benchmarks.random_checkpoint build/glm --layers 4
    python -m benchmarks.server --model build/glm --output benchmarks/results/server.glm.json

Both run the same requests with the same engine settings, one after the other: `mla-compile serve` in a process of its
own, over HTTP; then the engine in this process, by `Engine.step`. A stream sends its next request after the answer to
the last one, `--requests` times; all streams begin at once. A completion has half to one and a
half times `--tokens` tokens, drawn by seed. `--model` names a checkpoint with a tokenizer, whose ids of held-out texts
are the prompts. Prefixes are not shared, or a round would find the last one's prompts.

Of `--rounds` rounds, the best one's tokens/s counts, and its times from a request to its first token: the median of
the streams' first requests, which arrive at once, and of the others. `ratio`: the server's tokens/s by the
engine's.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.http_client import Connection, ask, connected, metrics, quantile
from benchmarks.reporting import add_row, command_parser
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.engine import Checkpoint, Engine
from mla_compile.engine.request import Request
from mla_compile.models import load_tokenizer
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate.drafter import loads_mtp

TEXTS = Path(__file__).parent / "held_out_prompts.json"

Asked = tuple[list[int], int]
"""A prompt, and the number of new tokens."""
Round = tuple[float, list[list[float]]]
"""Seconds from the first request to the last token; of each stream's requests, from the request to the first token."""


def requests_of(args: argparse.Namespace) -> list[list[Asked]]:
    """The requests of each stream, in order."""
    draw = random.Random(0)
    prompts = iter(prompts_of(args.model, max(args.streams) * args.requests, args.prompt_tokens))
    least, most = args.tokens // 2, args.tokens * 3 // 2
    return [
        [(next(prompts), draw.randint(least, most)) for _ in range(args.requests)]
        for _ in range(max(args.streams))
    ]


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
def server(args: argparse.Namespace, max_model_len: int, extra: Sequence[str] = ()) -> Iterator[str]:
    """The URL of `mla-compile serve`, once it is ready. extra: more of its flags."""
    flags = {
        "--model": args.model,
        "--served-model-name": "served",
        "--device": args.device,
        "--dtype": args.dtype,
        "--num-speculative-tokens": args.k,
        "--max-rows": max(args.streams),
        "--max-model-len": max_model_len,
    }
    command = [
        sys.executable,
        "-c",
        "from mla_compile.cli import main; main()",
        "serve",
        "--no-prefix-caching",
        *extra,
    ]
    command += [] if args.compile else ["--no-compile"]
    command += [str(part) for flag in flags.items() for part in flag]
    with started(command, "/ready") as url:
        yield url


@contextmanager
def started(command: Sequence[str], ready: str, environment: dict[str, str] | None = None) -> Iterator[str]:
    """The URL of a server that a command starts, which gets a `--port`. ready: a path that answers once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url, ready):
            if process.poll() is not None:
                sys.exit(f"the server has ended with status {process.returncode}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str, path: str) -> bool:
    try:
        return asyncio.run(ask(url, "GET", path)).status == 200
    except OSError:
        return False


async def through_server(url: str, streams: Sequence[Sequence[Asked]]) -> Round:
    """Each stream on a connection of its own, as clients keep them."""

    async def first_token(connection: Connection, prompt: list[int], num_tokens: int) -> float:
        begin, first = time.perf_counter(), 0.0
        body = {"model": "served", "prompt": prompt, "temperature": 0, "max_tokens": num_tokens}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        before, last = b"", b""
        async for event in connection.stream(body):
            first = first or time.perf_counter() - begin
            before, last = last, event
        if last != b"[DONE]" or json.loads(before)["usage"]["completion_tokens"] != num_tokens:
            raise RuntimeError(f"an answer that is not whole: {before.decode()}")
        return first

    async def one(asked: Sequence[Asked]) -> list[float]:
        async with connected(url) as connection:
            return [await first_token(connection, *each) for each in asked]

    begin = time.perf_counter()
    firsts = await asyncio.gather(*map(one, streams))
    return time.perf_counter() - begin, firsts


def directly(engine: Engine, streams: Sequence[Sequence[Asked]]) -> Round:
    """The same requests by `Engine.step`."""
    firsts: list[list[float]] = [[] for _ in streams]
    running: dict[int, tuple[Request, int, float]] = {}

    def ask(stream: int, nth: int) -> None:
        if nth < len(streams[stream]):
            prompt, num_tokens = streams[stream][nth]
            request = engine.add(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
            running[stream] = request, nth, time.perf_counter()

    begin = time.perf_counter()
    for i in range(len(streams)):
        ask(i, 0)
    while running:
        engine.step()
        now = time.perf_counter()
        for i, (request, nth, asked_at) in list(running.items()):
            if request.completion.token_ids and len(firsts[i]) == nth:
                firsts[i].append(now - asked_at)
            if request.has_ended:
                del running[i]
                ask(i, nth + 1)
    return time.perf_counter() - begin, firsts


def best(rounds: Sequence[Round], num_tokens: int) -> dict[str, float]:
    """Figures of the fastest, in all `num_tokens`."""
    seconds, firsts = min(rounds)
    later = [first for of_stream in firsts for first in of_stream[1:]]
    figures = {
        "tokens_per_s": round(num_tokens / seconds, 1),
        "at_once_first_token_ms": round(1e3 * statistics.median(of_stream[0] for of_stream in firsts), 1),
    }
    return figures | ({"first_token_ms": round(1e3 * statistics.median(later), 1)} if later else {})


def measure(
    args: argparse.Namespace,
    run: Callable[[Sequence[Sequence[Asked]]], Round],
    streams: Sequence[Sequence[Asked]],
) -> dict[int, dict[str, float]]:
    """Figures by number of streams, after an unmeasured round of each."""
    found = {}
    for count in args.streams:
        run(streams[:count])
        num_tokens = sum(n for asked in streams[:count] for _, n in asked)
        found[count] = best([run(streams[:count]) for _ in range(args.rounds)], num_tokens)
    return found


def measure_server(
    args: argparse.Namespace, streams: Sequence[Sequence[Asked]], max_model_len: int
) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """The figures of the server, and its own metrics of late bytes, over all rounds."""
    with server(args, max_model_len) as url:
        before = asyncio.run(metrics(url))
        found = measure(args, lambda some: asyncio.run(through_server(url, some)), streams)
        after = asyncio.run(metrics(url))
    parts = {"p50": 0.5, "p99": 0.99}
    late = {
        name: round(1e3 * quantile(before, after, "mla_delivery_seconds", part), 3)
        for name, part in parts.items()
    }
    return found, late


def load_engine(args: argparse.Namespace, max_model_len: int) -> Engine:
    """Set as the server's."""
    dtype, mtp = getattr(torch, args.dtype), loads_mtp({"num_speculative_tokens": args.k})
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
    parser = command_parser(__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="bfloat16" if on_gpu else "float32"
    )
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--requests", type=int, default=8, help="of each stream, one after another")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    streams = requests_of(args)
    max_model_len = args.prompt_tokens + args.tokens * 3 // 2 + 16
    served, late = measure_server(args, streams, max_model_len)
    engine = load_engine(args, max_model_len)
    direct = measure(args, lambda some: directly(engine, some), streams)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
        "model": args.model.name,
        "k": args.k,
        "prompt_tokens": args.prompt_tokens,
        "tokens": args.tokens,
        "requests": args.requests,
        "delivery_ms": late,
        "rows": [],
    }
    for count in args.streams:
        ratio = round(served[count]["tokens_per_s"] / direct[count]["tokens_per_s"], 3)
        row = {"streams": count, "server": served[count], "engine": direct[count], "ratio": ratio}
        add_row(report, row, args.output)


if __name__ == "__main__":
    main()
