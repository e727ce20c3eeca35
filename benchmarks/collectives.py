"""Sums over two GPUs: this package's, with and without the addition and norm after them, and NCCL's.

    python -m benchmarks.collectives --output benchmarks/results/collectives.json

The command starts a process for each of two GPUs. Times are microseconds of a call in a replayed CUDA graph, in which
each call reads the result of the last one, as in a model's step. Each line is checked in the same run: against float64,
and bit by bit between the GPUs.
"""

import json
import os
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.reporting import add_row, command_parser
from mla_compile.ops.collectives.kernels.collectives import all_reduce_add_rms_norm_triton, all_reduce_triton
from mla_compile.ops.collectives.peers import connect
from mla_compile.ops.norm.kernels.rms_norm import add_rms_norm_triton

TOKENS = (1, 4, 32, 128, 512)
COLUMNS = (2048, 7168)
GPUS = 2
CALLS = 48
"""Calls in a graph: those of a model of 24 layers."""
REPLAYS = 20
ROUNDS = 7
Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From a message, the residual and the norm's weight to the next message and residual."""


def _ours(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return all_reduce_triton(x), residual


def _ours_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm_triton(all_reduce_triton(x), residual, weight, 1e-6)


def _fused(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return all_reduce_add_rms_norm_triton(x, residual, weight, 1e-6)


def _nccl(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dist.all_reduce(x)  # in place: nothing is copied for it
    return x, residual


def _nccl_and_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dist.all_reduce(x)
    return add_rms_norm_triton(x, residual, weight, 1e-6)


CALLED: dict[str, Call] = {
    "ours": _ours,
    "nccl": _nccl,
    "ours, then norm": _ours_and_norm,
    "ours, fused": _fused,
    "nccl, then norm": _nccl_and_norm,
}


def chain_us(call: Call, x: Tensor, residual: Tensor, weight: Tensor) -> float:
    """Microseconds of a call in a chain. All GPUs replay equally often, whatever each one measures."""

    def chain() -> None:
        message, held = x, residual
        for _ in range(CALLS):
            message, held = call(message, held, weight)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread asks on
        chain()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        x.zero_()  # or sums of sums would not be finite
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (REPLAYS * CALLS))
    return min(times)


def check(call: Call, parts: Tensor, residual: Tensor, weight: Tensor, rank: int) -> float:
    """The largest error against float64, relative to the largest number; bits are the same on both GPUs."""
    x, held = call(parts[rank].clone(), residual, weight)
    total = parts.double().sum(0)
    added = total + residual.double()
    normed = added * torch.rsqrt(added.square().mean(1, keepdim=True) + 1e-6) * weight.double()
    expected = total if held is residual else normed
    error = float((x.double() - expected).abs().max() / expected.abs().max())
    assert error < 2e-2, error
    bits = torch.cat([tensor.view(torch.uint8).flatten() for tensor in (x, held)])
    every = [torch.empty_like(bits) for _ in range(GPUS)]
    dist.all_gather(every, bits)
    assert torch.equal(*every), "the GPUs have other bits"
    return error


def measure(tokens: int, columns: int, rank: int) -> dict[str, Any]:
    """One row of the report."""
    generator = torch.Generator("cuda").manual_seed(tokens + columns)
    drawn = torch.randn(GPUS + 2, tokens, columns, device="cuda", generator=generator).bfloat16()
    parts, residual, weight = drawn[:GPUS], drawn[GPUS], drawn[GPUS + 1, 0].contiguous()
    row: dict[str, Any] = {"tokens": tokens, "columns": columns}
    errors = [check(call, parts, residual, weight, rank) for call in CALLED.values()]
    for name, call in CALLED.items():
        row[name] = round(chain_us(call, parts[rank].clone(), residual, weight), 2)
    return row | {"largest_error": round(max(errors), 5)}


def run(rank: int, meeting: str, output: Path | None) -> None:
    """The work of each process; rank 0 reports."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=meeting, rank=rank, world_size=GPUS)
    assert connect(torch.device("cuda")) is not None, "these GPUs do not reach one another's memory"
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    report: dict[str, Any] = {"machine": machine | {"nccl": nccl}, "gpus": GPUS, "rows": []}
    if rank == 0:
        print(json.dumps(report), flush=True)
    for columns, tokens in product(COLUMNS, TOKENS):
        row = measure(tokens, columns, rank)
        if rank == 0:
            add_row(report, row, output)
    if rank == 0:
        _print_table(report["rows"])
    torch.cuda.synchronize()
    dist.destroy_process_group()


def _print_table(rows: list[dict[str, Any]]) -> None:
    print("tokens columns " + "".join(f"{name:>17}" for name in CALLED))
    for row in rows:
        print(f"{row['tokens']:6} {row['columns']:7} " + "".join(f"{row[name]:17.2f}" for name in CALLED))


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    # No multicast: it may put GPUs that others share out of service.
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"file://{folder}/meeting", output), nprocs=GPUS)


if __name__ == "__main__":
    main()
