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
from mla_compile.errors import MLAError
from mla_compile.ops.backends import DECODE_BACKENDS
from mla_compile.ops.implementations import ANY, SOME, Call, Implementation, describe_device, in_words
from mla_compile.ops.library import flagged, tables
from mla_compile.ops.tuned import table_of


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
            "tuned table": _tuned(),
            "CUDA graphs": "available" if torch.cuda.is_available() else f"not available: {_why_no_cuda()}",
        }
    )
    # The first GPU decides where there is one.
    here = Call(*describe_device(torch.device("cuda:0" if torch.cuda.is_available() else "cpu")))
    typer.echo("\ndecode backends, fastest first")
    _print_table(list(_decode_backends(here)))
    typer.echo("\nimplementations of the other ops, fastest first")
    _print_table(list(_implementations(here)))


def _implementations(here: Call) -> Iterator[tuple[str, ...]]:
    """The lines of the table, its header first. What a row does not take, the next one serves.

    An op that cannot be asked for a batch-invariant row has "-" there.
    """
    yield "op", "name", "batch-invariant", f"on {here.device_type}", "takes"
    for op, table in tables.items():
        for row in table if op != "mla_decode" else ():
            invariant = _yes(row.batch_invariant) if op in flagged else "-"
            limits = "; ".join(f"{fact}: {in_words(x)}" for fact, x in row.takes.items() if x != SOME)
            yield op if row is table[0] else "", row.name, invariant, _works(row, here), limits or "all"


def _decode_backends(here: Call) -> Iterator[tuple[str, ...]]:
    """The lines of the table, its header first."""
    yield (
        "name",
        "query tokens",
        "captured",
        "batch-invariant",
        "kv_lora_rank + qk_rope_head_dim",
        "dtypes",
        f"on {here.device_type}",
    )
    for backend in DECODE_BACKENDS:
        yield (
            backend.name,
            backend.query_len_support.name,
            _yes(backend.capturable),
            _yes(backend.batch_invariant),
            backend.widths(),
            in_words(backend.takes.get("dtype", ANY)),
            _works(backend, here),
        )


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _works(row: Implementation, here: Call) -> str:
    why_not = row.why_not(here)
    return "works" if why_not is None else f"does not work: {why_not}"


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


def _tuned() -> str:
    try:
        table = table_of(torch.device("cuda:0"))
    except MLAError as error:
        return f"unusable: {error}"
    if table is None:
        return "none: rules choose who serves"
    return f"{table.file} (measured by {table.versions})"


def _why_no_cuda() -> str:
    return "no CUDA device" if torch.backends.cuda.is_built() else "this torch is built without CUDA"


def _compiler() -> str:
    why_not = cannot_compile()
    compiler = str(cpp_compiler())
    return f"unusable: {why_not}" if why_not else shutil.which(compiler) or compiler
