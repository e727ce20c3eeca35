"""One of two processes that share a model; one of them is killed or stopped in a phase of its life.

`python -m tests.parallel.lost_rank RANK SIZE FOLDER LOST PHASE SIGNAL`: the rank LOST sends itself the signal.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mla_compile import Engine, MLABatch, Parallel, follow, ranks
from mla_compile.ending import before_end
from mla_compile.engine.caches import EngineCaches
from mla_compile.models.decoder import DecoderLayer
from mla_compile.models.weight_loader import WeightLoader
from tests.parallel.worker import join, loaded

PHASES: dict[str, tuple[type, str]] = {
    "loading": (WeightLoader, "_read"),
    "building": (EngineCaches, "__init__"),
    "warm_up": (DecoderLayer, "forward"),
    "prefill": (DecoderLayer, "forward"),
    "decode": (DecoderLayer, "forward"),
    "ending": (ranks.Ranks, "leave"),
}
"""The method in which the rank is lost. "idle" is none of them."""


def lose_in(phase: str, lose: Callable[[], None]) -> None:
    """Lose this rank in the phase's method: in the second tensor, or the second layer of a step of that kind."""
    owner, name = PHASES[phase]
    real: Callable[..., Any] = getattr(owner, name)
    kinds: list[str] = []

    def watched(*args: Any, **settings: Any) -> Any:
        kind = phase
        if owner is DecoderLayer:
            batch = next(each for each in args if isinstance(each, MLABatch))
            kind = "prefill" if batch.prefill is not None else "decode" if "prefill" in kinds else "warm_up"
        kinds.append(kind)
        if kinds.count(phase) == (2 if name in ("_read", "forward") else 1):
            lose()
        return real(*args, **settings)

    patch.object(owner, name, watched).start()


def lose_while_idle(sign: Path, lose: Callable[[], None]) -> None:
    while not sign.exists():
        time.sleep(0.02)
    lose()


def main() -> None:
    rank, size, folder, lost, phase, name = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        Path(sys.argv[3]),
        *sys.argv[4:],
    )
    ranks.BEAT, ranks.PATIENCE = 0.1, 2.0
    torch.set_num_threads(1)
    sign = folder / "idle"

    def lose() -> None:
        os.kill(os.getpid(), signal.Signals[name])

    def kill_lost() -> None:
        """In place of `start_ranks`: a stopped process would stay."""
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int((folder / "lost").read_text()), signal.SIGKILL)

    if rank != int(lost):
        before_end.append(kill_lost)
        atexit.register(kill_lost)
    else:
        (folder / "lost").write_text(str(os.getpid()))
        if phase == "idle":
            threading.Thread(target=lose_while_idle, args=(sign, lose), daemon=True).start()
        else:
            lose_in(phase, lose)
    join(rank, size, folder, "cpu")
    model = loaded(Parallel.of_processes(), folder, {})
    if rank > 0:
        follow(model)
    else:
        engine = Engine(model, compile=False, max_rows=2)
        engine.warm_up()
        engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=8)
        sign.touch()
        time.sleep(60 if phase == "idle" else 0)
        engine.close()


if __name__ == "__main__":
    main()
