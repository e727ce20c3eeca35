"""Processes that share a model, each of them a rank."""

import os
import subprocess
import sys
import time
from pathlib import Path

ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""No multicast: it may put GPUs that others share out of service."""


def run_ranks(module: str, size: int, folder: Path, *words: str) -> None:
    """Runs `python -m MODULE RANK SIZE FOLDER WORDS` for each rank; a failure shows the ends of their logs."""
    (folder / "meeting").unlink(missing_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), str(folder), *words],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + 550
    try:
        logs = [process.communicate(timeout=max(1, deadline - time.monotonic()))[1] for process in processes]
        assert not any(process.returncode for process in processes), "\n".join(log[-3000:] for log in logs)
    finally:
        for process in processes:
            process.kill()
