"""Memory that the GPUs of a model share, for small collectives: `connect` allocates it.

It is divided into slots. Program i of a kernel (`collectives/kernels/collectives.py`) uses slot i on every GPU: it
writes its block of columns to its own slot, and reads those that program i of every other rank has written.
"""

import logging
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.device import power_of_two
from mla_compile.ops.dispatch import FLOATS, Allowed, describe_device
from mla_compile.torch_internals import symmetric_memory

log = logging.getLogger(__name__)

SLOTS = 512
"""Most programs of a collective."""
SLOT_COLUMNS = 8192
"""Elements per slot, float32 or narrower."""
SLOT_BYTES = 4 * SLOT_COLUMNS
MAX_RANKS = 8
"""Most GPUs that share memory."""
FLAGS = 2 * SLOTS * SLOT_BYTES
"""Offset of the flags, int64 `[SLOTS, ranks]`, after two buffers of slots."""
MAX_BYTES = 2**21
"""Most bytes that a GPU reads from all peers in one launch. (Chosen, not measured. With two GPUs NCCL reads as much;
with more it reads less.)"""
SMALL: dict[str, Allowed] = {
    "connected": (True,),
    "dtype": FLOATS,
    "programs": range(1, SLOTS + 1),
    "bytes": range(1, MAX_BYTES + 1),
}
"""Constraints on the messages of the kernels."""


_BLOCKS = (2048, 4096, SLOT_COLUMNS)


def blocks_of(tokens: int, columns: int) -> tuple[int, int]:
    """Columns per program, and programs per token: as many as slots allow, because few long programs are slow."""
    block = next((block for block in _BLOCKS if tokens * -(-columns // block) <= SLOTS), SLOT_COLUMNS)
    block = min(block, power_of_two(columns))
    return block, -(-columns // block)


@dataclass(frozen=True)
class Peers:
    """The shared memory of all ranks, in the address space of this rank's GPU.

    rank, size: this process's rank and the number of ranks.
    addresses: int64 `[size]`, the address of each rank's memory.
    epochs: int64 `[SLOTS]`, the number of finished collectives of each program of this rank. It is in GPU memory,
        because a replayed CUDA graph reuses its recorded arguments.
    memory: uint8, this rank's memory, which this object keeps alive.
    """

    rank: int
    size: int
    addresses: Tensor
    epochs: Tensor
    memory: Tensor


def bytes_of_memory(size: int) -> int:
    """Bytes that each of `size` ranks shares."""
    return FLAGS + SLOTS * size * 8


_connected: Peers | None = None
_group: object = None
"""The process group of `_connected`."""


def connected(device: torch.device) -> Peers | None:
    """The memory that `connect` has allocated on a device; None if there is none or its process group is gone."""
    found = _connected
    if found is None or found.memory.device != device or _group is not dist.group.WORLD:
        return None
    return found


def facts_of(x: Tensor) -> dict[str, object]:
    """The facts of a message `[tokens, columns]` that `SMALL` constrains."""
    peers, (tokens, columns) = connected(x.device), x.shape
    return {
        "connected": peers is not None,
        "dtype": x.dtype,
        "programs": tokens * blocks_of(tokens, columns)[1],
        "bytes": x.numel() * x.itemsize * (1 if peers is None else peers.size - 1),
    }


def connect(device: torch.device) -> Peers | None:
    """Allocate the shared memory once for torch.distributed's default group; None if the GPUs cannot share memory.

    All ranks of the group must call this, each with the device of its shard of the model, and outside of compiled code:
    the allocation must not be in the memory pool of a CUDA graph.

    Raises:
        MLAError: a CUDA graph is being recorded.
    """
    global _connected, _group
    if describe_device(device)[0] != "cuda":
        return None
    device = torch.empty(0, device=device).device  # with an index
    if connected(device) is not None:
        return connected(device)
    if torch.cuda.is_current_stream_capturing():
        hint = "load the model with load_model(parallel=...) first"
        raise MLAError(
            "connect", "a call before a CUDA graph is recorded", "a call during the recording", hint
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    if not 1 < size <= MAX_RANKS:
        return None
    with torch.cuda.device(device):
        hosts: list[str | None] = [None] * size
        dist.all_gather_object(hosts, platform.node())
        found = _share(size, device) if len(set(hosts)) == 1 else None
        # All ranks must make the same choice, so all have the memory or none.
        each = torch.tensor([found is not None], dtype=torch.int32, device=device)
        dist.all_reduce(each, dist.ReduceOp.MIN)
        if found is None or not each.item():
            log.warning("the GPUs cannot share memory: all collectives use NCCL")
            return None
        memory, addresses = found
        memory.zero_()
        _connected = Peers(
            rank,
            size,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(SLOTS, dtype=torch.int64, device=device),
            memory,
        )
        _group = dist.group.WORLD
        torch.cuda.synchronize()
        dist.barrier()  # all flags must be 0 before any signal
        torch.cuda.synchronize()
    return _connected


def _share(size: int, device: torch.device) -> tuple[Tensor, list[int]] | None:
    try:
        return symmetric_memory(bytes_of_memory(size), device)
    except RuntimeError as error:  # for example, GPUs without a direct link
        log.warning("no symmetric memory: %s", str(error).partition("\n")[0])
        return None
