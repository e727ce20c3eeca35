"""Starting the processes of a model that is divided among them: this one is rank 0, the others are its children."""

import atexit
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mla_compile.engine.orders import Order, order_with
from mla_compile.errors import MLAError
from mla_compile.models import Parallel
from mla_compile.torch_internals import TCPStore, meeting_place

_LONG = timedelta(days=365)
"""A rank may wait for another that compiles. One that is gone is noticed by `Ranks`."""
_GRACE = 5.0
"""Seconds that children have to end, once rank 0 does."""


def start_ranks(size: int, device: torch.device, *, expert_parallel: bool, **load: Any) -> Parallel:
    """Start `size - 1` processes, which load their parts of a checkpoint and then `follow` this one, rank 0.

    They end when this process does, however it ends.

    Args:
        device: "cpu" or, with a GPU for each process, "cuda".
        expert_parallel: see `Parallel`.
        load: arguments of `load_model`, as JSON can hold them; the dtype by its name.

    Raises:
        MLAError: fewer GPUs than processes; a process that does not start.
    """
    if device.type == "cuda" and torch.cuda.device_count() < size:
        expected = f"at most the number of GPUs, {torch.cuda.device_count()}"
        raise MLAError("tensor_parallel_size", expected, size)
    if device.index:
        raise MLAError("device", "'cpu' or 'cuda': each process takes a GPU of its own", device)
    store = meeting_place(size)
    command = [sys.executable, "-m", "mla_compile.engine.rank_process"]
    children = {
        rank: subprocess.Popen(
            [*command, str(rank), str(size), str(store.port), device.type],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in range(1, size)
    }
    atexit.register(_end, list(children.values()))
    for rank, child in children.items():
        while not store.check([_started(rank)]):
            if child.poll() is not None:
                raise MLAError(f"rank {rank}", "a process that starts", f"exit status {child.returncode}")
            time.sleep(0.05)
    join(0, size, store, device)
    parallel = Parallel.of_processes(expert_parallel=expert_parallel)
    assert parallel.ranks is not None
    parallel.ranks.say(order_with(Order.LOAD, load | {"expert_parallel": expert_parallel}))
    return parallel


def join(rank: int, size: int, store: TCPStore, device: torch.device) -> None:
    """Become one of the processes of torch.distributed's default group, which meet at a store."""
    store.set(_started(rank), "")
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        backend, own = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
        backend, own = "gloo", None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_LONG, device_id=own)


def _started(rank: int) -> str:
    return f"mla_compile/started/{rank}"


def _end(children: list["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + _GRACE
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
