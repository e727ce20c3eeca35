"""One of several processes that share memory of GPUs: `python -m tests.parallel.gpu_worker RANK SIZE FOLDER CHECK`.

Every rank draws the same numbers for all ranks, so each knows the sum.
"""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mla_compile.ops.collectives.collectives import all_gather_op, all_reduce_in_order, all_reduce_op
from mla_compile.ops.collectives.kernels.collectives import (
    all_gather_triton,
    all_reduce_add_rms_norm_triton,
    all_reduce_triton,
)
from mla_compile.ops.collectives.peers import MAX_BYTES, SLOTS, connect
from mla_compile.ops.library import choose
from mla_compile.ops.norm.kernels.rms_norm import add_rms_norm_triton
from mla_compile.ops.norm.rms_norm import all_reduce_add_rms_norm_op
from tests.ops.rms_norm import TOLERANCE
from tests.parallel.worker import join

EPS = 1e-5
HIDDEN = 2048


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def in_order(parts: Tensor) -> Tensor:
    """The sum along the first dimension."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def check_same_on_all_ranks(*tensors: Tensor) -> None:
    """Bit by bit."""
    for tensor in tensors:
        bits = tensor.contiguous().view(torch.uint8).flatten()
        every = [torch.empty_like(bits) for _ in range(dist.get_world_size())]
        dist.all_gather(every, bits)
        assert all(torch.equal(bits, other) for other in every)


def kernels(rank: int, size: int) -> None:
    """Every kernel near float64, with the bits of the parts added in order, the same on all ranks.

    Ranks that share a GPU wait for their turns in each launch, so they try fewer sizes.
    """
    widths, heights = (8, 40, 576, 2048, 3001, 5000, 7168, 8192), (1, 2, 3, 7, 32, 33, 100, 128, 300, SLOTS)
    if size > torch.cuda.device_count():
        widths, heights = (40, 3001, 8192), (1, 33, SLOTS)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for columns in widths:
            for rows in heights:
                parts = draw(size, rows, columns, seed=rows * columns, dtype=dtype)
                residual, weight = (
                    draw(rows, columns, seed=1, dtype=dtype),
                    draw(columns, seed=2, dtype=dtype),
                )
                x, total = parts[rank], in_order(parts)
                found = all_reduce_triton(x)
                assert torch.equal(found, total), (dtype, rows, columns)
                error = (found.double() - parts.double().sum(0)).abs().max()
                assert error <= 8 * torch.finfo(dtype).eps * size**0.5, error
                normed, added = all_reduce_add_rms_norm_triton(x, residual, weight, EPS)
                expected, sums = add_rms_norm_triton(total, residual, weight, EPS)
                assert torch.equal(added, sums), (dtype, rows, columns)
                tolerance = TOLERANCE[dtype]
                torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)
                joined = all_gather_triton(x, size)
                assert torch.equal(joined, parts.transpose(0, 1).flatten(1)), (dtype, rows, columns)
                check_same_on_all_ranks(found, normed, added, joined)
    for rows in (1, 32):  # logits
        parts = draw(size, rows, 64_640, seed=rows)
        assert torch.equal(all_gather_triton(parts[rank], size), parts.transpose(0, 1).flatten(1))


def choices(rank: int, size: int) -> None:
    """Small messages go through the GPUs' memory, others by NCCL; in exact mode a row has the same bits in all."""
    columns = 4096
    most = MAX_BYTES // (size - 1) // (2 * columns)
    parts = draw(size, 4 * most, columns, seed=0)
    residual, weight = draw(4 * most, columns, seed=1), draw(columns, seed=2)
    small, large = parts[rank, :3], parts[rank]
    for x, exact, name in (
        (small, False, "triton"),
        (small, True, "triton"),
        (large, False, "nccl"),
        (large, True, "in_order"),
    ):
        assert choose("all_reduce", (x, exact)).chosen.name == name
    assert choose("all_gather", (small, size)).chosen.name == "triton"
    assert choose("all_gather", (large, size)).chosen.name == "reference"
    assert torch.equal(all_reduce_op(small), in_order(parts)[:3])
    assert torch.equal(all_reduce_op(large, True), in_order(parts))
    assert torch.equal(all_reduce_in_order(small), in_order(parts)[:3])
    torch.testing.assert_close(all_reduce_op(large), in_order(parts), rtol=2e-2, atol=6e-2)
    assert torch.equal(all_gather_op(large, size), parts.transpose(0, 1).flatten(1))
    for exact in (False, True):
        few = all_reduce_add_rms_norm_op(small, residual[:3], weight, EPS, exact)
        many = all_reduce_add_rms_norm_op(large, residual, weight, EPS, exact)
        check_same_on_all_ranks(*few, *many)
        for one, other in zip(few, many, strict=True):
            assert not exact or torch.equal(one, other[:3])
            torch.testing.assert_close(one, other[:3], rtol=2e-2, atol=6e-2)


def layers(x: Tensor, residual: Tensor, weight: Tensor, rank: int, size: int) -> list[Tensor]:
    """A chain of collectives of all kinds."""
    out = []
    for layer in range(4):
        x, residual = all_reduce_add_rms_norm_op(x * (layer + 1), residual, weight, EPS)
        x = all_reduce_op(x * (0.5 + rank)) * 0.1
        out += [x, residual]
        x = x * (1 + rank)
    return [*out, all_gather_op(x, size)]


def layers_of_all(parts: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    """The same, by one process for all ranks."""
    size, out, xs = len(parts), [], list(parts)
    for layer in range(4):
        total = in_order(torch.stack([x * (layer + 1) for x in xs]))
        normed, residual = add_rms_norm_triton(total, residual, weight, EPS)
        x = in_order(torch.stack([normed * (0.5 + rank) for rank in range(size)])) * 0.1
        out += [x, residual]
        xs = [x * (1 + rank) for rank in range(size)]
    return [*out, torch.cat(xs, dim=1)]


def replays(rank: int, size: int) -> None:
    """Recorded graphs of several numbers of rows, and eager calls of others, in any order, with one slow rank."""
    weight = draw(HIDDEN, seed=2)
    recorded = {}
    for rows in (1, 2, 5, 32, 100, 300):
        x, residual = draw(rows, HIDDEN, seed=0), draw(rows, HIDDEN, seed=1)
        layers(x, residual, weight, rank, size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread asks on
            out = layers(x, residual, weight, rank, size)
        recorded[rows] = x, residual, graph, out
    order, delay = random.Random(0), random.Random(rank)
    pending: list[tuple[list[Tensor], list[Tensor]]] = []
    for step in range(600):
        rows = order.choice([*recorded, 3, 64, 200])
        parts, residual = draw(size, rows, HIDDEN, seed=2 * step), draw(rows, HIDDEN, seed=2 * step + 1)
        if rows in recorded:
            x, held, graph, out = recorded[rows]
            x.copy_(parts[rank])
            held.copy_(residual)
            graph.replay()
            found = [tensor.clone() for tensor in out]
        else:
            found = layers(parts[rank], residual, weight, rank, size)
        pending.append((found, layers_of_all(parts, residual, weight)))
        slow = order.randrange(size) == rank
        if slow and delay.random() < 0.1:
            time.sleep(0.02)
        elif slow and delay.random() < 0.1:
            torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
        if step % 20 == 19:  # so up to 20 steps are under way at once
            for found, expected in pending:
                torch.testing.assert_close(found, expected, rtol=3e-2, atol=6e-2)
            check_same_on_all_ranks(*(tensor for found, _ in pending for tensor in found))
            pending.clear()


CHECKS: dict[str, Callable[[int, int], None]] = {"kernels": kernels, "choices": choices, "replays": replays}


def main() -> None:
    rank, size, folder, check = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    join(rank, size, folder, "cuda")
    assert connect(torch.device("cuda")) is not None, "these GPUs do not reach one another's memory"
    CHECKS[check](rank, size)
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
