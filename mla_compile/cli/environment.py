"""`mla-compile env`: what runs models here, the versions installed, and the candidates of each op."""

import os
import platform
import shutil
import sys
import textwrap
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, version

import torch
import typer

import mla_compile
from mla_compile.cli.machine import cannot_compile, cpp_compiler, defaults_here, pick_device
from mla_compile.engine.device_memory import usable_memory
from mla_compile.ops.attention.decode_backends import DECODE_BACKENDS, DecodeBackend, QueryLenSupport
from mla_compile.ops.dispatch import SOME, Call, Candidate, describe_device, in_words
from mla_compile.ops.library import flagged, tables

_WIDTH = 80


def print_environment(*, verbose: bool) -> None:
    """Print what runs models here by default, what is missing for more, and versions.

    verbose: also the candidates of each op, with their limits and why they do not work.
    """
    device = pick_device(None)
    here = Call(*describe_device(device))
    typer.echo("By default, models run here with")
    for name, value in _defaults(device).items():
        _print_wrapped(f"  {name:<16}", value)
    for reason, candidates in _missing(here).items():
        more = f" and {len(candidates) - 3} more" if len(candidates) > 3 else ""
        _print_wrapped(f"  {'not used':<16}", f"{', '.join(candidates[:3])}{more}: {reason}")
    typer.echo()
    for name, value in _versions().items():
        _print_wrapped(f"  {name:<16}", value)
    if not verbose:
        typer.echo("\n--verbose lists the candidates of each op, and why some do not work here.")
        return
    typer.echo(f"\nops on {here.device_type}: all candidates, fastest first")
    for op, table in tables.items():
        if table:
            typer.echo(op)
        for candidate in table:
            _print_wrapped(f"  {candidate.name:<22}", _describe(op, candidate, here))


def _defaults(device: torch.device) -> dict[str, str]:
    """What runs a model on this device unless a flag says otherwise."""
    is_gpu = device.type == "cuda"
    why_eager = None if is_gpu else cannot_compile()
    why_no_gpu = "no CUDA device" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
    compiled = "compiled before they run" if is_gpu else "eager until a thread has compiled them"
    call = Call(*describe_device(device), captured=is_gpu)
    backends = [each for each in DECODE_BACKENDS if not each.batch_invariant and each.why_not(call) is None]
    return {
        "device": _gpus()[0] if is_gpu else _cpu(),
        "steps": f"not compiled: {why_eager}" if why_eager else compiled,
        "CUDA graphs": "recorded" if is_gpu else f"none: {why_no_gpu}",
        "decode backend": ", else ".join(each.name for each in backends),
        **defaults_here(device, usable_memory(device)),
    }


def _missing(here: Call) -> dict[str, list[str]]:
    """Candidates that this device would run by default, by the reason why they cannot be imported."""
    found = defaultdict(list)
    for op, table in tables.items():
        for candidate in table:
            reason = candidate.why_not_on(here.device_type, here.capability)
            if reason is not None and reason == candidate.why_not_installed() and candidate.capturable:
                found[reason].append(f"{candidate.name} of {op}")
    return found


def _versions() -> dict[str, str]:
    compiler = str(cpp_compiler())
    return {
        "mla-compile": mla_compile.__version__,
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "C++ compiler": cannot_compile() or shutil.which(compiler) or compiler,
        **({"devices": ", ".join([_cpu(), *gpus])} if (gpus := _gpus()) else {}),
    }


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


def _cpu() -> str:
    threads = torch.get_num_threads()
    return f"cpu ({os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)})"


def _gpus() -> list[str]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"cuda:{i} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)" for i, gpu in enumerate(gpus)]
