"""The collectives' kernels in Triton's interpreter: each process is a rank, and they share memory as GPUs would."""

import multiprocessing
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.collectives import peers as shared  # noqa: E402
from mla_compile.ops.collectives.kernels.collectives import (  # noqa: E402
    all_gather_triton,
    all_reduce_add_rms_norm_triton,
    all_reduce_triton,
)
from mla_compile.ops.collectives.peers import Peers, blocks_of, bytes_of_memory  # noqa: E402
from mla_compile.ops.norm.kernels.rms_norm import add_rms_norm_triton  # noqa: E402

FORK = multiprocessing.get_context("fork")  # so memory has one address in all processes


def on_ranks(size: int, call: Callable[[int], None]) -> None:
    """Calls a function in one process for each rank, connected with the others."""
    memories = [torch.zeros(bytes_of_memory(size), dtype=torch.uint8).share_memory_() for _ in range(size)]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        epochs = torch.zeros(shared.SLOTS, dtype=torch.int64)
        peers = Peers(rank, size, addresses, epochs, memories[rank])
        shared.connected = lambda device: peers
        call(rank)

    processes = [FORK.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=200)
            assert process.exitcode == 0, f"exit code {process.exitcode}: None is a wait without end"
    finally:
        for process in processes:
            process.kill()


def parts(size: int, rows: int, columns: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The inputs of the ranks, and a residual that is the same on all."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(size + 1, rows, columns, generator=generator) * 10.0 ** torch.randint(
        -2, 3, (size + 1, 1, 1), generator=generator
    )
    return list(drawn.to(dtype))


def in_order(given: list[Tensor]) -> Tensor:
    total = given[0].float()
    for part in given[1:]:
        total = total + part.float()
    return total.to(given[0].dtype)


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_of_all_kinds_and_sizes_follow_one_another(size: int) -> None:
    """Every rank has the sum in the order of ranks, also with a slow rank and with reused slots."""

    def call(rank: int) -> None:
        draw = random.Random(size)
        for step in range(30):
            rows, columns = draw.choice([1, 1, 2, 3, 7]), draw.choice([8, 40, 100, 256])
            dtype, kind = draw.choice([torch.float32, torch.bfloat16]), draw.randrange(3)
            *given, residual = parts(size, rows, columns, dtype, step)
            if draw.randrange(size) == rank:
                time.sleep(0.05)
            if kind == 0:
                assert torch.equal(all_reduce_triton(given[rank]), in_order(given))
            elif kind == 1:
                assert torch.equal(all_gather_triton(given[rank], size), torch.cat(given, 1))
            else:
                weight = given[0][0] if step % 2 else None
                found = all_reduce_add_rms_norm_triton(given[rank], residual, weight, 1e-5)
                expected = add_rms_norm_triton(in_order(given), residual, weight, 1e-5)
                assert all(map(torch.equal, found, expected))

    on_ranks(size, call)


def test_a_row_of_several_blocks_and_rows_that_lie_apart() -> None:
    def call(rank: int) -> None:
        for rows, columns in ((1, 5000), (3, 2050)):
            *given, _ = parts(2, rows, columns + 3, torch.bfloat16, columns)
            views = [part[:, 3:] for part in given]
            assert blocks_of(rows, columns)[1] > 1
            assert torch.equal(all_reduce_triton(views[rank]), in_order(views))
            assert torch.equal(all_gather_triton(views[rank], 2), torch.cat(views, 1))

    on_ranks(2, call)
