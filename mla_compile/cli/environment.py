"""`mla-compile env`: the versions installed here and the candidates that work."""

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
    """Print versions, devices and the working candidates of each op; `verbose`: all, with their limits."""
    facts = {
        "mla-compile": mla_compile.__version__,
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "devices": ", ".join(_devices()),
        "C++ compiler": _compiler(),
        "CUDA graphs": "available" if torch.cuda.is_available() else f"not available: {_why_no_cuda()}",
    }
    for name, value in facts.items():
        _print_wrapped(f"{name:<15}", value)
    # Shows what works on the first GPU, if there is one.
    here = Call(*describe_device(torch.device("cuda:0" if torch.cuda.is_available() else "cpu")))
    ops = {op: table for op, table in tables.items() if table}
    what = "all candidates" if verbose else "the candidates that work"
    typer.echo(
        f"\nops on {here.device_type}: {what}, fastest first" + (" (--verbose: all)" if not verbose else "")
    )
    for op, table in ops.items():
        if verbose:
            typer.echo(op)
            for candidate in table:
                _print_wrapped(f"  {candidate.name:<22}", _describe(op, candidate, here))
        else:
            works = [candidate.name for candidate in table if candidate.why_not(here) is None]
            _print_wrapped(f"  {op:<25}", ", ".join(works))


def _describe(op: str, candidate: Candidate, here: Call) -> str:
    """Whether a candidate of an op works here, and its limits."""
    why_not = candidate.why_not(here)
    facts = []
    if op in flagged and candidate.batch_invariant:
        facts.append("batch-invariant")
    if not candidate.capturable:
        facts.append("not captured")
    lens = candidate.query_len_support if isinstance(candidate, DecodeBackend) else QueryLenSupport.VARLEN
    if lens is not QueryLenSupport.VARLEN:
        facts.append(f"query tokens: {lens.value}")
    facts.append("works" if why_not is None else f"does not work: {why_not}")
    limits = "; ".join(
        f"{fact}: {in_words(taken)}" for fact, taken in candidate.constraints.items() if taken != SOME
    )
    return "; ".join(facts) + (limits and f". Requires {limits}")


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
