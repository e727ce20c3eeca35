"""The decode and expert kernels beside the torch code that they replace, and beside what the memory allows.

    python -m benchmarks.kernels [--only decode|moe]

Each line is checked in the same run before it is timed. Times are of replayed CUDA graphs, in microseconds, over
several copies of the inputs in turn, so that nothing is found in the cache that a model's other layers would evict.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mla_compile.ops.decode import decode_torch
from mla_compile.ops.kernels.plan import decode_tiles, device_of, num_splits
from mla_compile.ops.moe import moe_torch

BYTES_PER_US = 4.3e6
"""What an H200 reads, measured."""
FLOPS_PER_US = 790e6
PAGE = 64


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


def decode_inputs(
    rows: int, heads: int, context: int, q_len: int, max_len: int, copies: int
) -> Iterator[tuple]:
    columns, used = max_len // PAGE, context // PAGE
    for _ in range(copies):
        cache = torch.randn(rows * used, PAGE, 576, device="cuda", dtype=torch.bfloat16)
        table = torch.zeros(rows, columns, dtype=torch.int32, device="cuda")
        table[:, :used] = torch.randperm(rows * used, device="cuda").view(rows, used)
        q_latent = torch.randn(rows * q_len, heads, 512, device="cuda", dtype=torch.bfloat16)
        q_pe = torch.randn(rows * q_len, heads, 64, device="cuda", dtype=torch.bfloat16)
        lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        yield q_latent, q_pe, cache, table, lengths, None, q_len, 576**-0.5


def decode_line(heads: int, rows: int, context: int, q_len: int, max_len: int) -> None:
    from mla_compile.ops.kernels.decode import decode_triton

    bytes_read = rows * context * 576 * 2
    flops = 2 * rows * heads * q_len * context * (576 + 512)
    floor = max(bytes_read / BYTES_PER_US, flops / FLOPS_PER_US)
    inputs = list(decode_inputs(rows, heads, context, q_len, max_len, max(2, min(16, int(2e8 / bytes_read)))))
    got, expected = decode_triton(*inputs[0]), decode_torch(*inputs[0])
    error = relative_error(got[0], expected[0])
    assert error < 2e-2 and relative_error(got[1], expected[1]) < 1e-3, error
    triton_us = graph_us([lambda args=args: decode_triton(*args) for args in inputs])
    torch_us = graph_us([lambda args=args: decode_torch(*args) for args in inputs[:2]])

    device = device_of(inputs[0][0])
    tiles = decode_tiles(heads * q_len, 512, torch.bfloat16, device)
    splits = num_splits(rows * -(-heads * q_len // tiles.rows), max_len, device)
    shape = f"{heads:4} heads {rows:3} rows {context:5} keys of {max_len:5}, q_len {q_len}"
    plan = f"tile {tiles.rows}x{tiles.keys}, {splits} splits"
    print(
        f"decode {shape}: floor {floor:6.1f}  triton {triton_us:7.1f}  torch {torch_us:8.1f}  ({plan})",
        flush=True,
    )


def moe_line(
    tokens: int, experts: int = 64, topk: int = 4, hidden: int = 2048, intermediate: int = 1536
) -> None:
    from mla_compile.ops.kernels.moe import moe_triton

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    layers = [
        (randn(experts, 2 * intermediate, hidden), randn(experts, hidden, intermediate)) for _ in range(4)
    ]
    x = randn(tokens, hidden) * hidden**0.5
    weights = torch.rand(tokens, topk, device="cuda")
    inputs = []
    for layer in layers:
        ids = torch.rand(tokens, experts, device="cuda").topk(topk).indices
        inputs.append((x, weights, ids, *layer))
    active = sum(args[2].unique().numel() for args in inputs) / len(inputs)
    floor = active * 3 * hidden * intermediate * 2 / BYTES_PER_US
    for args in inputs:
        error = relative_error(moe_triton(*args), moe_torch(*args))
        assert error < 2e-2, error
    triton_us = graph_us([lambda args=args: moe_triton(*args) for args in inputs])
    torch_us = graph_us([lambda args=args: moe_torch(*args) for args in inputs])
    print(
        f"moe {tokens:4} tokens: floor {floor:6.1f}  triton {triton_us:7.1f}  torch {torch_us:8.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["decode", "moe"])
    chosen = parser.parse_args().only
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    if chosen != "moe":
        for heads, q_len, context, rows in itertools.product((16, 20, 128), (1, 4), (1024, 4096), (1, 8, 32)):
            decode_line(heads, rows, context, q_len, max_len=context)
        for rows in (1, 8, 32):  # a table for far more than the rows hold, as in an engine
            decode_line(20, rows, 1024, 4, max_len=8192)
    if chosen != "decode":
        for tokens in (1, 4, 8, 32, 100, 128):
            moe_line(tokens)


if __name__ == "__main__":
    main()
