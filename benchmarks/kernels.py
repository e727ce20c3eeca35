"""The kernels of experts and of products with FP8 weights: each candidate of the ops, and the floor of the memory.

    python -m benchmarks.kernels

Each line is checked in the same run before it is timed. Times are of replayed CUDA graphs, in microseconds, over
several copies of the weights in turn, so that the cache holds no weights that other layers of a model would evict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.reporting import command_parser
from mla_compile.ops.experts.moe import moe_torch
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.library import call_of, tables
from mla_compile.ops.linear.fp8 import quantize
from mla_compile.ops.linear.fp8_linear import linear_torch
from mla_compile.ops.linear.operands import FP8LinearOperands

BYTES_PER_US = 4.3e6
"""Measured bandwidth of an H200."""

FLOPS_PER_US = 800e6
"""Measured rate of its tensor cores in large bfloat16 products."""


def graph_us(calls: Sequence[Callable[[], Any]], seconds: float = 0.2) -> float:
    """Microseconds of a call in a replayed graph of consecutive calls."""
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
    """The experts of a model's layer: routed ones, and shared ones that every token uses."""

    name: str
    experts: int
    topk: int
    shared: int
    hidden: int
    intermediate: int


GLM = Experts("GLM-4.7-Flash", experts=64, topk=4, shared=1, hidden=2048, intermediate=1536)
V3_12 = Experts("12-layer V3", experts=64, topk=8, shared=0, hidden=2048, intermediate=1408)
GLM_PRODUCTS = ((1344, 2048), (5120, 768), (2048, 5120))
"""Columns and k of the products of a layer's attention: q_a with kv_a, q_b, o_proj."""

FEW = (1, 2, 4, 8, 16, 32, 64)
MANY = (100, 128, 136, 512, 1024, 2048, 4096)


def randn(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()


def rows_us(op: str, calls: Sequence[tuple[Any, ...]], expected: Callable[..., torch.Tensor]) -> str:
    """Microseconds of each candidate that may be fastest at these calls, as text; each is checked.

    Plain torch runs only without FP8. Batch-invariant candidates for any device are left out: they run token by token,
    or call another op.
    """
    found = []
    call = call_of(op, (*calls[0], False))
    for row in tables[op]:
        if (row.device_types is None and row.batch_invariant) or row.why_not(call) is not None:
            continue
        run = row.load()
        if row.name == "reference" and any(
            x.dtype == torch.float8_e4m3fn for x in calls[0] if torch.is_tensor(x)
        ):
            continue
        for args in calls:
            error = relative_error(run(args), expected(args))
            assert error < 2e-2, (row.name, error)
        us = graph_us([partial(run, args) for args in calls])
        found.append(f"{row.name} {us:.1f}")
    return ", ".join(found)


def layer(model: Experts, *, fp8: bool) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Weights of routed experts, of shared ones, and the scales of all: None where there is none."""

    def weight(*shape: int, halves: int = 1) -> tuple[Any, Any]:
        *leading, rows, columns = shape
        made = randn(*leading, halves, rows // halves, columns)
        values, scale = quantize(made) if fp8 else (made, None)
        return values.flatten(-3, -2), None if scale is None else scale.flatten(-3, -2)

    n, hidden, inner = model.experts, model.hidden, model.intermediate
    pairs = [weight(n, 2 * inner, hidden, halves=2), weight(n, hidden, inner)]
    if model.shared:
        pairs += [weight(model.shared * inner, hidden) for _ in range(2)]
        pairs += [weight(hidden, model.shared * inner)]
    pairs += [(None, None)] * (5 - len(pairs))
    (*routed, gate, up, down), scales = zip(*pairs, strict=True)
    return tuple(routed), (gate, up, down), scales


def calls_of(model: Experts, tokens: int, layers: Sequence[tuple[Any, ...]]) -> list[ExpertOperands]:
    """A call of each layer for the same random tokens, with random experts for each layer."""
    x = randn(tokens, model.hidden) * model.hidden**0.5
    weights, calls = torch.rand(tokens, model.topk, device="cuda"), []
    for routed, shared, scales in layers:
        ids = torch.rand(tokens, model.experts, device="cuda").topk(model.topk).indices
        calls.append(ExpertOperands(x, weights, ids, *routed, None, 1, *shared, *scales))
    return calls


def moe_lines(model: Experts, all_tokens: Sequence[int], *, fp8: bool = False, copies: int = 4) -> None:
    """A line for each number of tokens, over as many layers as `copies`."""
    layers = [layer(model, fp8=fp8) for _ in range(copies)]
    for tokens in all_tokens:
        calls = calls_of(model, tokens, layers)
        active = sum(args[2].unique().numel() for args in calls) / len(calls) + model.shared
        elements = 3 * model.hidden * model.intermediate  # of an expert
        read = active * elements * (1 if fp8 else 2) / BYTES_PER_US
        multiplied = tokens * (model.topk + model.shared) * elements * 2 / FLOPS_PER_US
        name = f"moe {model.name}, {'FP8' if fp8 else 'bf16'}"
        floor = max(read, multiplied)
        print(
            f"{name}, {tokens:4} tokens: floor {floor:6.1f}; {rows_us('moe_experts', calls, moe_torch)}",
            flush=True,
        )


def fp8_linear_lines(columns: int, k: int, all_tokens: Sequence[int]) -> None:
    """A line for each number of tokens, over as many weights as fill the cache twice."""
    weights = [quantize(randn(columns, k)) for _ in range(max(8, 2**27 // (columns * k)))]
    floor = columns * k / BYTES_PER_US
    for tokens in all_tokens:
        x = randn(tokens, k) * k**0.5
        calls = [FP8LinearOperands(x, weight, scale, None, None) for weight, scale in weights]
        found = rows_us("fp8_linear", calls, linear_torch)
        print(f"fp8_linear {columns:4} x {k:4}, {tokens:4} tokens: floor {floor:6.2f}; {found}", flush=True)


def main() -> None:
    parser = command_parser(__doc__)
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for columns, k in GLM_PRODUCTS:
        fp8_linear_lines(columns, k, FEW)
    moe_lines(GLM, (*FEW, *MANY), fp8=True)
    moe_lines(GLM, (*FEW, *MANY))
    moe_lines(V3_12, (8, 32, 64, 72, 128, 256, 544, 672, 1024, 2048, 4096))


if __name__ == "__main__":
    main()
