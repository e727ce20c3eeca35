"""`mla-compile env`: what is installed here, and what of it works."""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import typer

import mla_compile
from mla_compile.cli.machine import cannot_compile
from mla_compile.ops.kernels.plan import has_triton, triton_serves
from mla_compile.torch_internals import cpp_compiler


@dataclass(frozen=True)
class AttentionBackend:
    """An implementation of the attention ops; `why_not` tells why it cannot run here, None where it can."""

    name: str
    description: str
    why_not: Callable[[], str | None]


def _why_no_triton() -> str | None:
    if not torch.cuda.is_available():
        return _why_no_cuda()
    if not has_triton():
        return "triton is not installed"
    return None if triton_serves(torch.device("cuda", 0)) else "needs an NVIDIA GPU of SM 80 or newer"


ATTENTION_BACKENDS = (
    AttentionBackend("reference", "plain torch, any device", lambda: None),
    AttentionBackend("triton", "decode, latent widths that are multiples of 16", _why_no_triton),
)


def env() -> None:
    """Print versions, devices and which backends work here: what a bug report needs."""
    _print_rows(
        {
            "mla_compile": mla_compile.__version__,
            "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
            "torch": torch.__version__,
            "triton": _version("triton"),
            "transformers": _version("transformers"),
            "devices": ", ".join(_devices()),
            "C++ compiler": _compiler(),
            "CUDA graphs": "available" if torch.cuda.is_available() else f"not available: {_why_no_cuda()}",
        }
    )
    typer.echo("\nattention backends")
    for backend in ATTENTION_BACKENDS:
        why_not = backend.why_not()
        state = "works" if why_not is None else f"does not work here: {why_not}"
        typer.echo(f"  {backend.name:<12} {state} ({backend.description})")


def _print_rows(rows: dict[str, str]) -> None:
    for name, value in rows.items():
        typer.echo(f"{name:<14} {value}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"cuda:{i} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)" for i, gpu in enumerate(gpus)]
    return [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads)", *names]


def _why_no_cuda() -> str:
    return "no CUDA device" if torch.backends.cuda.is_built() else "this torch is built without CUDA"


def _compiler() -> str:
    why_not = cannot_compile()
    compiler = str(cpp_compiler())
    return f"unusable: {why_not}" if why_not else shutil.which(compiler) or compiler
