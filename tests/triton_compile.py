"""Triton kernels compiled for an absent GPU: what a launch would use, without launching.

The kernels' own launch code runs on CPU tensors. A stand-in for the driver names the GPU; `run` stops after compiling.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


@dataclass
class Compiled:
    """A kernel's assembled code."""

    name: str
    shared_memory: int
    registers: int
    spilled_bytes: int
    text: str
    """PTX."""
    cubin: bytes

    def instructions(self) -> str:
        """What ptxas made of the PTX."""
        return _printed("nvdisasm", "-c", self.cubin)


def _printed(tool: str, option: str, cubin: bytes) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def _resources(cubin: bytes) -> dict[str, int]:
    report = _printed("cuobjdump", "-res-usage", cubin)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Inside, a launch compiles the kernel for a compute capability (90, say), and appends it to the list."""
    target = GPUTarget("cuda", capability, 32)
    stand_in = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,  # a key of each kernel's cache
        get_current_stream=lambda device: 0,
    )
    kernels: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        used = _resources(kernel.asm["cubin"])
        spilled = used["STACK"] + used["LOCAL"]
        shared = kernel.metadata.shared
        text, cubin = kernel.asm["ptx"], kernel.asm["cubin"]
        kernels.append(Compiled(kernel.name, shared, used["REG"], spilled, text, cubin))
        return kernel

    active = driver._active  # private: `driver.active` would start the default driver
    driver.set_active(stand_in)
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver.set_active(active)
