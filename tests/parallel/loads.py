"""One of several processes that load checkpoints together: `python -m tests.parallel.loads RANK SIZE FOLDER`."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch

from mla_compile import MLAError, Parallel, load_model
from mla_compile.models.weight_loader import WeightLoader


def outcome(path: Path, device: str = "cpu") -> str:
    """The message of the error that loading raises; empty if there is none."""
    try:
        load_model(path, parallel=Parallel.of_processes(), device=device)
    except (MLAError, OSError) as error:
        return str(error)
    return ""


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    meeting = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    outcomes = []
    for name in job["checkpoints"]:
        own = folder / f"{name} of {rank}"  # each process may have files of its own
        outcomes.append(outcome(own if own.exists() else folder / name))
    with (
        patch.object(WeightLoader, "run", side_effect=OSError("the disk is gone"))
        if rank == 1
        else nullcontext()
    ):
        outcomes.append(outcome(folder / job["checkpoints"][0]))
    outcomes.append(outcome(folder / job["checkpoints"][0], "cpu" if rank == 0 else "nowhere"))
    (folder / f"outcomes.{rank}.json").write_text(json.dumps(outcomes))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
