"""Starts the processes that share a model: this one is rank 0, the others are its children."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mla_compile.ending import INTERRUPTED, before_end, end_now, ending_at_ctrl_c
from mla_compile.errors import MLAError
from mla_compile.models import Parallel
from mla_compile.progress import announce_if_slow
from mla_compile.ranks import PATIENCE
from mla_compile.torch_internals import keep_gloo_on_loopback, meeting_place

if TYPE_CHECKING:
    from mla_compile.torch_internals import TCPStore

_LONG = timedelta(days=365)
"""A rank may wait for another that compiles. `Ranks` detects one that has exited."""
_GRACE = 5.0
"""Seconds for children to exit once rank 0 does."""
_ROUND = 0.1
"""Seconds between two looks at children that start."""


def start_ranks(size: int, device: torch.device, *, expert_parallel: bool, **load: Any) -> Parallel:
    """Start `size - 1` processes, which load their parts of a checkpoint and then `follow` this one, rank 0.

    They end when this process does, however it ends.

    Args:
        device: "cpu" or, with a GPU for each process, "cuda".
        expert_parallel: see `Parallel`.
        load: arguments of `load_model`, as JSON can hold them; the dtype by its name.

    Raises:
        MLAError: fewer GPUs than processes; this process is in a torch.distributed process group already.
    """
    if dist.is_initialized():
        hint = "pass `parallel` to load_model there"
        raise MLAError("tensor_parallel_size", "1 in a process group of torch.distributed", size, hint)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        expected = f"at most the number of GPUs, {torch.cuda.device_count()}"
        raise MLAError("tensor_parallel_size", expected, size)
    if device.index:
        raise MLAError("device", "'cpu' or 'cuda', as each process uses a GPU of its own", device)
    store = meeting_place(size)
    command = [sys.executable, "-m", "mla_compile.engine.rank_process"]
    children: dict[int, subprocess.Popen[bytes]] = {}
    atexit.register(_end, children)
    before_end.append(partial(_kill, children))
    # Else a child that still imports torch would print a traceback at Ctrl-C. It unblocks it once handled.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for rank in range(1, size):
            children[rank] = subprocess.Popen(
                [*command, str(rank), str(size), str(store.port), device.type],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # Joining would wait for a child that has exited, and would not handle Ctrl-C.
    interruptible = ending_at_ctrl_c(lambda: signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)
    with (
        announce_if_slow(f"starting {size} processes"),
        interruptible,
        _watched(children),
    ):
        join(0, size, store, device)
        parallel = Parallel.of_processes(expert_parallel=expert_parallel)
    assert parallel.ranks is not None
    parallel.ranks.broadcast(load | {"expert_parallel": expert_parallel})
    return parallel


def join(rank: int, size: int, store: "TCPStore", device: torch.device) -> None:
    """Join torch.distributed's default process group of this machine, which is initialised through a store."""
    keep_gloo_on_loopback()
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        backend, own = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
        backend, own = "gloo", None
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_LONG, device_id=own)


@contextmanager
def _watched(children: dict[int, "subprocess.Popen[bytes]"]) -> Iterator[None]:
    """Inside, this process exits if a child exits, or stays stopped."""
    have_joined = threading.Event()
    watcher = threading.Thread(target=_watch, args=(children, have_joined), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        have_joined.set()
        watcher.join()


def _watch(children: dict[int, "subprocess.Popen[bytes]"], have_joined: threading.Event) -> None:
    stopped = Counter[int]()  # rounds, as this process may have been stopped too
    while not have_joined.wait(_ROUND):
        for rank, child in children.items():
            status = child.poll()
            if status == INTERRUPTED:
                end_now("interrupted", INTERRUPTED)
            elif status is not None:
                end_now(f"rank {rank} has not started: its exit status is {status}", 1)
            stopped[rank] = stopped[rank] + 1 if _is_stopped(child) else 0
            if stopped[rank] > PATIENCE / _ROUND:
                end_now(f"rank {rank} has not started: it is stopped", 1)


def _is_stopped(child: "subprocess.Popen[bytes]") -> bool:
    """Whether a signal stops a child; where the system does not say, False."""
    with suppress(AttributeError, ChildProcessError):
        return os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _kill(children: dict[int, "subprocess.Popen[bytes]"]) -> None:
    for child in tuple(children.values()):
        child.kill()  # a stopped process handles no other signal


def _end(children: dict[int, "subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + _GRACE
    for child in children.values():
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
