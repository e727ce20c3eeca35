"""Time to compile a decode step, stage by stage, with empty caches (cold) and with filled ones (warm).

    python -m benchmarks.compile_time --output benchmarks/results/compile_time.cpu.json
    python -m benchmarks.compile_time --model glm --device cuda --output benchmarks/results/compile_time.glm.json

`--model shipped`, the default: the step of `mla-compile demo`. `--model glm`: GLM-4.7-Flash's published shape with
random bfloat16 weights, 47 layers, through transformers (`random_model` of `benchmarks.transformers_generate`);
`--layers` and `--tiny` make it smaller. Each number is from a process of its own, which compiles and captures the
steps that the first batch waits for, `Engine.warm_up(prompts=False)`; `--prompts` adds steps with prompts, as a server
does. `seconds` are wall time, and `stages` parts of it; `cpu_s` is CPU time of all cores, compilers included, which
other processes of the machine disturb less.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.reporting import add_row, command_parser

MAX_LEN = 512
WHOLE, BACKEND = "_compile.compile_inner", "OutputGraph.call_user_compiler"
AOT, INDUCTOR = "create_aot_dispatcher_function", "compile_fx.<locals>.fw_compiler_base"
GRAPH_PASSES = ("_recursive_joint_graph_passes", "_recursive_post_grad_passes", "additional_fake_tensor_prop")


def stages(seconds: dict[str, float], passes: float) -> dict[str, float]:
    """The parts of `_compile.compile_inner` from torch's own timers, which overlap."""

    def of(*names: str) -> float:
        return sum(seconds.get(name, 0.0) for name in names)

    parts = {
        "dynamo": of(WHOLE) - of(BACKEND),
        "our_passes": passes,
        "aot_autograd": of(AOT) - of(INDUCTOR),
        "inductor_graph_passes": of(*GRAPH_PASSES),
        "inductor_lowering": of("GraphLowering.run"),
        "inductor_scheduling": of("Scheduler.__init__"),
        "inductor_codegen": of("GraphLowering.codegen") - of("Scheduler.__init__"),
        "waiting_for_compilers": of("PyCodeCache.load_by_key_path") - of("AOTAutogradCache.inductor_load"),
        "loading_from_caches": of("AOTAutogradCache.inductor_load"),
    }
    parts["waiting_for_compilers"] = max(0.0, parts["waiting_for_compilers"])
    parts["other"] = of(WHOLE) - sum(parts.values())
    return {name: round(value, 2) for name, value in parts.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """In this process: compile the step on first use."""
    import torch
    from torch._dynamo.utils import compilation_time_metrics, counters

    from mla_compile import Engine, SamplingParams, load_model
    from mla_compile.defaults import SHIPPED_MODEL
    from mla_compile.passes import pipeline

    seconds_of_pass: dict[str, float] = {}
    with ExitStack() as stack:
        if args.model == "shipped":
            torch.set_num_threads(1)  # as the demo
            model: Any = load_model(SHIPPED_MODEL, dtype=torch.float32, device=args.device)
        else:
            from benchmarks.transformers_generate import random_model
            from mla_compile.integrations.transformers.mtp import mtp_layer
            from mla_compile.integrations.transformers.target import TransformersTarget

            stock, mtp = random_model("glm", tiny=args.tiny, layers=args.layers)
            model = TransformersTarget(stock, mtp_layer(stock, mtp))
            stack.enter_context(model.installed(MAX_LEN))
        engine = Engine(model, num_speculative_tokens=args.k, max_rows=1, max_model_len=MAX_LEN, compile=True)
        steps = pipeline.steps

        def timed_steps(*given: Any) -> Any:
            for applied, gm in steps(*given):
                seconds_of_pass[applied.name] = seconds_of_pass.get(applied.name, 0.0) + applied.seconds
                yield applied, gm

        stack.enter_context(patch.object(pipeline, "steps", timed_steps))
        before, started = _cpu_seconds(), time.perf_counter()
        engine.warm_up(sampling=None if args.prompts else SamplingParams(), prompts=args.prompts)
        wall = time.perf_counter() - started
    seconds = {name: sum(times) for name, times in compilation_time_metrics.items()}
    return {
        "seconds": round(wall, 1),
        "cpu_s": round(_cpu_seconds() - before, 1),
        "stages": stages(seconds, sum(seconds_of_pass.values())),
        "passes": {name: round(value, 2) for name, value in seconds_of_pass.items()},
        "graphs": counters["stats"]["unique_graphs"],
        "operations": counters["stats"]["calls_captured"],
    }


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its ended children, compilers included."""
    used = [resource.getrusage(process) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def in_new_process(cache: str) -> dict[str, Any]:
    """`measure` with this command's arguments, and caches in a folder."""
    command = [sys.executable, "-m", "benchmarks.compile_time", *sys.argv[1:], "--measure"]
    folders = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    folders["TMPDIR"] = cache  # where Inductor has the compiled header of its C++ kernels
    done = subprocess.run(command, env=os.environ | folders, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """The command."""
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", choices=["shipped", "glm"], default="shipped")
    parser.add_argument("--layers", type=int, help="of glm; 47 by default")
    parser.add_argument("--tiny", action="store_true", help="narrow layers, for a look on a CPU")
    parser.add_argument("--prompts", action="store_true", help="compile steps with prompts too")
    parser.add_argument("--k", type=int, default=3, help="drafts")
    parser.add_argument(
        "--device", default="cpu", help="of the shipped model; glm is on the GPU if there is one"
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args)))
        return
    import torch

    machine = {"cpus": os.cpu_count(), "processor": platform.machine(), "torch": torch.__version__}
    if args.device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    report: dict[str, Any] = {"machine": machine, "model": args.model, "k": args.k, "prompts": args.prompts}
    report["rows"] = []
    with tempfile.TemporaryDirectory() as cache:
        for caches in ("cold", "warm"):
            add_row(report, {"caches": caches, **in_new_process(cache)}, args.output)


if __name__ == "__main__":
    main()
