"""`mla-compile env`: what is installed here, and what of it works."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import typer

import mla_compile
from mla_compile.cli.machine import cannot_compile, cpp_compiler
from mla_compile.ops.backends import DECODE_BACKENDS, DecodeCall, describe_device, short_name


def print_environment() -> None:
    """Print versions, devices and which backends work here."""
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
    typer.echo("\ndecode backends, fastest first")
    _print_table(list(_decode_backends()))


def _decode_backends() -> Iterator[tuple[str, ...]]:
    """The lines of the table, its header first; the first GPU decides where there is one."""
    here = DecodeCall(*describe_device(torch.device("cuda:0" if torch.cuda.is_available() else "cpu")))
    yield (
        "name",
        "query tokens",
        "captured",
        "kv_lora_rank + qk_rope_head_dim",
        "dtypes",
        f"on {here.device_type}",
    )
    for backend in DECODE_BACKENDS:
        why_not = backend.why_not(here)
        yield (
            backend.name,
            backend.query_len_support.name,
            "yes" if backend.capturable else "no",
            backend.widths(),
            ", ".join(map(short_name, backend.dtypes)),
            "works" if why_not is None else f"does not work: {why_not}",
        )


def _print_table(lines: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip())


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
