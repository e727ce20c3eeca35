"""Memory of this process's GPU that the processes which share a model reach, for small collectives: `connect`.

It is cut into slots. A program of a kernel (`collectives/kernels/collectives.py`) has the slot of its number, on every
GPU: it puts its part of a row there, and reads what the programs of the same number have put into theirs.
"""

import logging
import platform
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.dispatch import FLOATS, Allowed, describe_device
from mla_compile.torch_internals import symmetric_memory

log = logging.getLogger(__name__)

SLOTS = 512
"""Programs of a collective at most."""
SLOT_COLUMNS = 8192
"""What a slot holds, of float32 numbers or narrower ones."""
SLOT_BYTES = 4 * SLOT_COLUMNS
MOST_RANKS = 8
"""GPUs that reach one another's memory."""
FLAGS = 2 * SLOTS * SLOT_BYTES
"""Where the flags begin, int64 `[SLOTS, ranks]`, behind two buffers of slots."""
MOST_BYTES = 2**21
"""What a GPU reads from all of its peers in one launch, at most. (Chosen, not measured: two GPUs read as much as NCCL
has them read, and each further one makes it more.)"""
SMALL: dict[str, Allowed] = {
    "connected": (True,),
    "dtype": FLOATS,
    "programs": range(1, SLOTS + 1),
    "bytes": range(1, MOST_BYTES + 1),
}
"""The messages that the kernels take."""


_BLOCKS = (2048, 4096, SLOT_COLUMNS)


def blocks_of(rows: int, columns: int) -> tuple[int, int]:
    """The columns of a row that a program takes, and how many programs a row so has: the most for which there are
    slots, as a GPU waits for few programs with long parts."""
    block = next((block for block in _BLOCKS if rows * -(-columns // block) <= SLOTS), SLOT_COLUMNS)
    block = min(block, max(16, 1 << (columns - 1).bit_length()))
    return block, -(-columns // block)


@dataclass(frozen=True)
class Peers:
    """The memory of all processes, as this one's GPU sees it.

    rank, size: this process's place.
    addresses: int64 `[size]`: where each process's memory begins.
    epochs: int64 `[SLOTS]`: how many collectives each program of this process has taken part in. It is in the GPU's
        memory because a replayed CUDA graph has the arguments that it was recorded with.
    memory: uint8, this process's own; it lives as long as this does.
    """

    rank: int
    size: int
    addresses: Tensor
    epochs: Tensor
    memory: Tensor


def bytes_of_memory(size: int) -> int:
    """What each of `size` processes shares with the others."""
    return FLAGS + SLOTS * size * 8


_connected: Peers | None = None
_group: object = None
"""The process group among which it is."""


def connected(device: torch.device) -> Peers | None:
    """The memory that `connect` has made on a device; None where there is none, or it was for a group that is gone."""
    found = _connected
    if found is None or found.memory.device != device or _group is not dist.group.WORLD:
        return None
    return found


def facts_of(x: Tensor) -> dict[str, object]:
    """Of a message `[rows, columns]`: what `SMALL` speaks of."""
    peers, (rows, columns) = connected(x.device), x.shape
    return {
        "connected": peers is not None,
        "dtype": x.dtype,
        "programs": rows * blocks_of(rows, columns)[1],
        "bytes": x.numel() * x.itemsize * (1 if peers is None else peers.size - 1),
    }


def connect(device: torch.device) -> Peers | None:
    """Make the memory, once for torch.distributed's default group; None where GPUs do not reach one another's.

    All processes of the group call this, each with the device that its part of a model is on, and outside of compiled
    code: what is allocated here must not be in the memory of a CUDA graph.

    Raises:
        MLAError: a CUDA graph is being recorded.
    """
    global _connected, _group
    if describe_device(device)[0] != "cuda":
        return None
    device = torch.empty(0, device=device).device  # with its number
    if connected(device) is not None:
        return connected(device)
    if torch.cuda.is_current_stream_capturing():
        hint = "load the model with load_model(parallel=...) first"
        raise MLAError("connect", "to be called before a CUDA graph is recorded", "a call while one is", hint)
    rank, size = dist.get_rank(), dist.get_world_size()
    if not 1 < size <= MOST_RANKS:
        return None
    with torch.cuda.device(device):
        hosts: list[str | None] = [None] * size
        dist.all_gather_object(hosts, platform.node())
        found = _share(size, device) if len(set(hosts)) == 1 else None
        # Either all of them have it or none: they must choose alike.
        each = torch.tensor([found is not None], dtype=torch.int32, device=device)
        dist.all_reduce(each, dist.ReduceOp.MIN)
        if found is None or not each.item():
            log.warning("GPUs do not reach one another's memory: all collectives go through NCCL")
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
        dist.barrier()  # nobody signals before all flags are 0
        torch.cuda.synchronize()
    return _connected


def _share(size: int, device: torch.device) -> tuple[Tensor, list[int]] | None:
    try:
        return symmetric_memory(bytes_of_memory(size), device)
    except RuntimeError as error:  # GPUs without a link to each other, say
        log.warning("no symmetric memory: %s", str(error).partition("\n")[0])
        return None
