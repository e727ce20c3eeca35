"""What this machine can run on and compile for."""

import sysconfig
from pathlib import Path

import torch

from mla_compile.errors import MLAError
from mla_compile.torch_internals import cpp_compiler


def pick_device(name: str | None) -> torch.device:
    """The device of this name; by default the first GPU, else the CPU.

    Raises:
        MLAError: an unknown device, or one that this machine lacks.
    """
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
            "--device", "a device of this machine", name, f"it has {here}; --device cpu works everywhere"
        )
    if device.type not in ("cpu", "cuda"):
        raise MLAError("--device", "cpu, cuda or cuda:N", name)
    return device


def cannot_compile() -> str | None:
    """Why graphs cannot be compiled for the CPU here and how to mend it; None where they can."""
    if cpp_compiler() is None:
        return (
            "no C++ compiler found: install one (apt install g++; xcode-select --install) or name it in CXX"
        )
    # Inductor's code is loaded as a Python extension.
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h not found: install Python's headers (apt install python3-dev)"
    return None
