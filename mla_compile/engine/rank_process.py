"""A rank above 0 that `start_ranks` starts, as `python -m mla_compile.engine.rank_process RANK SIZE PORT DEVICE`."""

import logging
import os
import signal
import sys
import traceback
from typing import Any

import torch

from mla_compile.ending import INTERRUPTED, end_now
from mla_compile.engine.follow import follow
from mla_compile.engine.start_ranks import join
from mla_compile.errors import MLAError
from mla_compile.models import MLAForCausalLM, Parallel, load_model
from mla_compile.torch_internals import meeting_place


def main(rank: int, size: int, port: int, device: torch.device) -> None:
    """Join the other ranks, load the checkpoint that rank 0 names, and follow rank 0."""
    # Ctrl-C reaches all processes of a terminal. If rank 0 ignores it, as a server's does, this process does too, by
    # inheritance.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `start_ranks`
    logging.disable(logging.WARNING)  # rank 0 announces slow work
    store = meeting_place(size, port)
    join(rank, size, store, device)
    ranks = Parallel.of_processes().ranks
    assert ranks is not None
    settings = ranks.receive()
    if settings is not None:
        try:
            model = _loaded(settings, device)
        except Exception as error:  # rank 0 has and reports it too, unless only this rank has failed
            if ranks.has_failed:
                end_now(f"rank {rank}: {error}", 1)
        else:
            _follow(rank, model)
        ranks.leave()
    os._exit(0)  # a pending collective without peers would keep the process alive


def _follow(rank: int, model: MLAForCausalLM) -> None:
    try:
        follow(model)
    except Exception as error:
        if not isinstance(error, MLAError):
            traceback.print_exc()
        end_now(f"rank {rank}: {error}", 1)


def _loaded(settings: dict[str, Any], device: torch.device) -> MLAForCausalLM:
    parallel = Parallel.of_processes(expert_parallel=settings.pop("expert_parallel"))
    dtype = getattr(torch, settings.pop("dtype"))
    place = torch.device("cuda", parallel.rank) if device.type == "cuda" else device
    return load_model(**settings, dtype=dtype, device=place, parallel=parallel)


if __name__ == "__main__":
    rank, size, port, device = sys.argv[1:]
    main(int(rank), int(size), int(port), torch.device(device))
