"""`mla-compile env`: what is installed here, and what of it works."""

import os
import platform
import shutil
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version

import torch
import typer

import mla_compile
from mla_compile.cli.machine import cannot_compile, cpp_compiler
from mla_compile.ops.attention.decode_backends import DecodeBackend, QueryLenSupport
from mla_compile.ops.dispatch import SOME, Call, Candidate, describe_device, in_words
from mla_compile.ops.library import flagged, tables

_WIDTH = 80


def print_environment(*, verbose: bool) -> None:
    """Print versions, devices and what serves each op here; `verbose`: every implementation and its limits."""
    rows = {
        "mla-compile": mla_compile.__version__,
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "devices": ", ".join(_devices()),
        "C++ compiler": _compiler(),
        "CUDA graphs": "available" if torch.cuda.is_available() else f"not available: {_why_no_cuda()}",
    }
    for name, value in rows.items():
        _print_wrapped(f"{name:<15}", value)
    # The first GPU decides where there is one.
    here = Call(*describe_device(torch.device("cuda:0" if torch.cuda.is_available() else "cpu")))
    ops = {op: table for op, table in tables.items() if table}
    what = "all implementations" if verbose else "the implementations that work"
    typer.echo(
        f"\nops on {here.device_type}: {what}, fastest first" + (" (--verbose: all)" if not verbose else "")
    )
    for op, table in ops.items():
        if verbose:
            typer.echo(op)
            for row in table:
                _print_wrapped(f"  {row.name:<22}", _describe(op, row, here))
        else:
            _print_wrapped(f"  {op:<25}", ", ".join(row.name for row in table if row.why_not(here) is None))


def _describe(op: str, row: Candidate, here: Call) -> str:
    """Whether a row of an op's table works, and what it takes."""
    why_not = row.why_not(here)
    facts = []
    if op in flagged and row.batch_invariant:
        facts.append("batch-invariant")
    if not row.capturable:
        facts.append("not captured")
    if isinstance(row, DecodeBackend) and row.query_len_support is not QueryLenSupport.VARLEN:
        facts.append(f"query tokens: {row.query_len_support.value}")
    facts.append("works" if why_not is None else f"does not work: {why_not}")
    limits = "; ".join(
        f"{fact}: {in_words(taken)}" for fact, taken in row.constraints.items() if taken != SOME
    )
    return "; ".join(facts) + (limits and f". Takes {limits}")


def _print_wrapped(head: str, text: str) -> None:
    typer.echo(
        textwrap.fill(
            text,
            _WIDTH,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


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
