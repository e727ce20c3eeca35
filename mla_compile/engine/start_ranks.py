"""Starting the processes of a model that is divided among them: this one is rank 0, the others are its children."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mla_compile.engine.orders import Order, order_with
from mla_compile.errors import MLAError
from mla_compile.models import Parallel
from mla_compile.torch_internals import meeting_place

if TYPE_CHECKING:
    from mla_compile.torch_internals import TCPStore

_LONG = timedelta(days=365)
"""A rank may wait for another that compiles. One that is gone is noticed by `Ranks`."""
INTERRUPTED = 130
"""The exit status after Ctrl-C: 128 + SIGINT, as shells have it."""
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
        MLAError: fewer GPUs than processes; this process is one of others already.
    """
    if dist.is_initialized():
        mend = "give load_model its `parallel` there"
        raise MLAError("tensor_parallel_size", "1 in a process group of torch.distributed", size, mend)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        expected = f"at most the number of GPUs, {torch.cuda.device_count()}"
        raise MLAError("tensor_parallel_size", expected, size)
    if device.index:
        raise MLAError("device", "'cpu' or 'cuda': each process takes a GPU of its own", device)
    store = meeting_place(size)
    command = [sys.executable, "-m", "mla_compile.engine.rank_process"]
    # Else Ctrl-C would have a child that still imports torch print a traceback. It unblocks what it handles.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    children = {
        rank: subprocess.Popen(
            [*command, str(rank), str(size), str(store.port), device.type],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank in range(1, size)
    }
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    atexit.register(_end, list(children.values()))
    have_joined = threading.Event()
    threading.Thread(target=_watch, args=(children, have_joined), daemon=True).start()
    join(0, size, store, device)
    parallel = Parallel.of_processes(expert_parallel=expert_parallel)
    have_joined.set()
    assert parallel.ranks is not None
    parallel.ranks.say(order_with(Order.LOAD, load | {"expert_parallel": expert_parallel}))
    return parallel


def join(rank: int, size: int, store: "TCPStore", device: torch.device) -> None:
    """Become one of the processes of torch.distributed's default group, which meet at a store."""
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        backend, own = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
        backend, own = "gloo", None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_LONG, device_id=own)


def _watch(children: dict[int, "subprocess.Popen[bytes]"], have_joined: threading.Event) -> None:
    """End this process if a child does before all have joined: joining would wait for it, deaf to Ctrl-C."""
    while not have_joined.wait(0.1):
        for rank, child in children.items():
            status = child.poll()
            if status is not None:
                what = f"rank {rank} has not started: its exit status is {status}"
                what = "interrupted" if status == INTERRUPTED else what
                print(f"mla-compile: {what}", file=sys.stderr, flush=True)
                os._exit(INTERRUPTED if status == INTERRUPTED else 1)


def _end(children: list["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + _GRACE
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
