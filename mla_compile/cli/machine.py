"""The device to run on, whether this machine can compile for the CPU, and whether its cores are free."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mla_compile.defaults import DEFAULT_MAX_ROWS, IN_WORDS, defaults_on
from mla_compile.errors import MLAError

if TYPE_CHECKING:
    import torch


def pick_device(name: str | None) -> "torch.device":
    """The device of this name; by default the first GPU, else the CPU.

    Raises:
        MLAError: an unknown device, or one that this machine lacks.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda" if num_gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        here = f"{num_gpus} CUDA devices" if num_gpus else "no CUDA device"
        raise MLAError(
            "--device", "a device of this machine", name, f"it has {here}; --device cpu always works"
        )
    if device.type not in ("cpu", "cuda"):
        raise MLAError("--device", "cpu, cuda or cuda:N", name)
    return device


def defaults_here(device: "torch.device", memory: int) -> dict[str, str]:
    """What an engine on a device uses by default. memory: bytes that it can use there."""
    on = defaults_on(device.type)
    room = f"{memory / 1e9:.1f} GB less weights"
    if on.kept_bytes:
        room += f" and {on.kept_bytes / 1e9:.1f} GB"
    return {
        "dtype": on.dtype,
        "page size": f"{on.page_size} tokens",
        "rows": IN_WORDS["max_rows"],
        "drafts": IN_WORDS["num_speculative_tokens"],
        "max_model_len": f"the model's, if {DEFAULT_MAX_ROWS} such requests fit in {on.cache_share:.0%} of {room}",
        "tokens a step": IN_WORDS["max_tokens_per_step"],
    }


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor calls by default; None if it is missing.

    Does not import Inductor, which takes seconds.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        subprocess.run([name, "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return name


def cannot_compile() -> str | None:
    """Why graphs cannot be compiled for the CPU here and how to fix it; None if they can."""
    if cpp_compiler() is None:
        return (
            "no C++ compiler found: install one (apt install g++; xcode-select --install) or name it in CXX"
        )
    # Inductor's code is loaded as a Python extension.
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h not found: install Python's headers (apt install python3-dev)"
    return None


def share_cores() -> None:
    """Before torch is imported: let its threads sleep while they wait, if other programs use the cores now.

    By default a waiting thread looks for work for some 10 ms. On busy cores, that time is missing to the thread that it
    waits for; on free ones, it saves waking up. docs/command.md has figures.
    """
    if "torch" not in sys.modules and "GOMP_SPINCOUNT" not in os.environ and _num_others_running() >= 0.5:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _num_others_running() -> float:
    """The other threads of this machine that run or wait for a core, on average over 50 ms; 0 except on Linux."""
    file, samples = Path("/proc/loadavg"), []
    if not file.exists():
        return 0.0
    for _ in range(10):
        running = file.read_text().split()[3].partition("/")[0]
        samples.append(int(running) - 1)
        time.sleep(0.005)
    return sum(samples) / len(samples)
