"""The expert kernels beside the torch code that they replace, and beside what the memory allows.

    python -m benchmarks.kernels

Each line is checked in the same run before it is timed. Times are of replayed CUDA graphs, in microseconds, over
several copies of the inputs in turn, so that nothing is found in the cache that a model's other layers would evict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_compile.ops.moe import moe_torch

BYTES_PER_US = 4.3e6
"""What an H200 reads, measured."""

FLOPS_PER_US = 800e6
"""What its tensor cores do in bfloat16 in large products."""


def graph_us(calls: Sequence[Callable[[], Any]], seconds: float = 0.2) -> float:
    """Microseconds of a call, as the calls follow one another in a replayed graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / times

    replay(3)
    repeats = max(5, int(seconds * 1e6 / replay(5)))
    return min(replay(repeats) for _ in range(3)) / len(calls)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model's layer."""

    name: str
    experts: int
    topk: int
    hidden: int
    intermediate: int


GLM = Experts("GLM-4.7-Flash", experts=64, topk=4, hidden=2048, intermediate=1536)
V3_12 = Experts("12-layer V3", experts=64, topk=8, hidden=2048, intermediate=1408)


def randn(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()


def moe_lines(model: Experts, all_tokens: Sequence[int], copies: int = 4) -> None:
    """A line for each number of tokens, over as many layers as `copies`."""
    from mla_compile.ops.kernels.moe import moe_triton

    n, hidden, intermediate = model.experts, model.hidden, model.intermediate
    layers = [(randn(n, 2 * intermediate, hidden), randn(n, hidden, intermediate)) for _ in range(copies)]
    for tokens in all_tokens:
        x = randn(tokens, hidden) * hidden**0.5
        weights = torch.rand(tokens, model.topk, device="cuda")
        inputs = []
        for layer in layers:
            ids = torch.rand(tokens, n, device="cuda").topk(model.topk).indices
            inputs.append((x, weights, ids, *layer))
        active = sum(args[2].unique().numel() for args in inputs) / len(inputs)
        elements = 3 * hidden * intermediate  # of an expert
        read = active * elements * 2 / BYTES_PER_US
        multiplied = tokens * model.topk * elements * 2 / FLOPS_PER_US
        for args in inputs:
            error = relative_error(moe_triton(*args), moe_torch(*args))
            assert error < 2e-2, error
        triton_us = graph_us([lambda args=args: moe_triton(*args) for args in inputs])
        torch_us = graph_us([lambda args=args: moe_torch(*args) for args in inputs])
        print(
            f"moe {model.name}, {tokens:4} tokens: floor {max(read, multiplied):7.1f}"
            f"  triton {triton_us:7.1f}  torch {torch_us:8.1f}",
            flush=True,
        )


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    moe_lines(GLM, (1, 4, 8, 32, 100, 128, 136, 512, 1024, 2048, 4096))
    moe_lines(V3_12, (8, 32, 64, 72, 128, 256, 544, 672, 1024, 2048, 4096))


if __name__ == "__main__":
    main()
