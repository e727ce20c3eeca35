"""Seconds to the first text of each entrance, with empty compile caches (cold) and with filled ones (warm).

    python -m benchmarks.first_text --output benchmarks/results/first_text.cpu.json

Each number is from a process of its own, from its start to the first characters of text: `mla-compile generate`;
`mla_compile.generate` in a program and an accelerated model of transformers, which print 16 tokens at once; and
`mla-compile serve`, whose `ready_s` is until `/ready` answers 200 and `first_s` until the first chunk of a completion.
`whole_s` is until the end. All run the shipped model in float32.
"""

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reporting import add_row, command_parser

PROMPT = "In the beginning"
LIBRARY = f"""
import mla_compile
completion = mla_compile.generate([{PROMPT!r}], max_new_tokens=16)[0]
print(completion.text, flush=True)
"""
TRANSFORMERS = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from mla_compile.defaults import SHIPPED_MODEL
from mla_compile.integrations.transformers import accelerate
model = accelerate(AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32))
tokens = AutoTokenizer.from_pretrained(SHIPPED_MODEL)({PROMPT!r}, return_tensors="pt")
print(model.generate(**tokens, max_new_tokens=16, do_sample=False), flush=True)
"""
COMMAND = "from mla_compile.cli import main; main()"


def first_output(arguments: list[str], env: dict[str, str]) -> dict[str, float]:
    """A process that prints text: seconds to its first characters, and until it ends."""
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{arguments} failed with {process.returncode}")
    return {"first_s": round(first, 2), "whole_s": round(time.perf_counter() - begin, 2)}


def server(env: dict[str, str]) -> dict[str, float]:
    """`mla-compile serve`, and one streamed completion as soon as it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, begin = f"http://127.0.0.1:{port}", time.perf_counter()
    command = [sys.executable, "-c", COMMAND, "serve", "--port", str(port)]
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            while not is_ready(url):
                if process.poll() is not None:
                    raise RuntimeError("the server ended")
                time.sleep(0.1)
            ready = time.perf_counter() - begin
            body = {"model": "shipped", "prompt": PROMPT, "max_tokens": 64, "stream": True}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                answer.readline()
                first = time.perf_counter() - begin
                answer.read()
            whole = time.perf_counter() - begin
        finally:
            process.terminate()
    return {"ready_s": round(ready, 2), "first_s": round(first, 2), "whole_s": round(whole, 2)}


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


ENTRANCES: dict[str, Callable[[dict[str, str]], dict[str, float]]] = {
    "mla-compile generate": lambda env: first_output(["-c", COMMAND, "generate", "--prompt", PROMPT], env),
    "mla_compile.generate": lambda env: first_output(["-c", LIBRARY], env),
    "accelerate": lambda env: first_output(["-c", TRANSFORMERS], env),
    "mla-compile serve": server,
}


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "torch": importlib.metadata.version("torch"),
        "rows": [],
    }
    for name, entrance in ENTRANCES.items():
        with tempfile.TemporaryDirectory() as cache:
            env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            for caches in ("cold", "warm"):
                add_row(report, {"entrance": name, "caches": caches, **entrance(env)}, args.output)


if __name__ == "__main__":
    main()
