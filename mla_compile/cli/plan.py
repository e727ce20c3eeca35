"""`mla-compile plan`: the memory that a model needs on each GPU, from its config, and settings that fit."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Unpack

import torch
import typer

from mla_compile.engine.config import EngineConfig, max_model_len_of
from mla_compile.engine.memory import RESERVED, MemoryPlan, available, plan_memory
from mla_compile.engine_settings import CheckpointSettings, EngineSettings, with_drafts
from mla_compile.errors import MLAError
from mla_compile.hub import model_name
from mla_compile.models.checkpoint import meta_model, names_mtp, read_config
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.fp8 import SCALE_SUFFIX
from mla_compile.models.sharding import numbers_of_gpus

_UNITS = {"TB": 10**12, "GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "B": 1}
_H200 = 141 * 10**9
_CONTEXTS = (2_048, 8_192, 32_768, 131_072)
_meta_model = cache(meta_model)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(CheckpointSettings):
    """The model, settings and GPUs to plan for. settings: of the engine, from flags."""

    model: Path
    gpus: int
    settings: EngineSettings

    def config(self) -> EngineConfig:
        """The engine's settings, with the number of drafts and the maximum tokens of a request filled in."""
        config, _ = read_config(self.model)
        settings = with_drafts(self.settings, has_mtp=names_mtp(config))
        longest = max_model_len_of(settings["max_model_len"], config.max_position_embeddings)
        return replace(EngineConfig(**settings), max_model_len=longest)

    @property
    def longest(self) -> int:
        """Maximum tokens of a request."""
        longest = self.config().max_model_len
        assert longest is not None
        return longest

    def meta_model(self) -> MLAForCausalLM:
        return _meta_model(
            self.model,
            dtype=getattr(torch, self.dtype),
            mtp=False if self.config().num_speculative_tokens == 0 else None,
            quantize=self.quantize,
            dequantize=self.dequantize,
        )

    def plan(self) -> MemoryPlan:
        """Raises `MLAError` for a setting that the model rules out."""
        config = self.config()
        parallel = self.expert_parallel
        return plan_memory(self.meta_model(), config, self.gpus, expert_parallel=parallel, argument="--gpus")


def print_plan(request: PlanRequest, gpu_memory: str | None) -> bool:
    """Print the memory that a request needs; return whether it fits.

    gpu_memory: of each GPU, such as "141GB"; None: that of the first GPU here, else an H200's.

    Raises:
        MLAError: a bad setting.
    """
    memory = _memory(gpu_memory)
    if request.expert_parallel and request.gpus == 1:
        raise MLAError("--expert-parallel", "more than one GPU", "--gpus 1", "add --gpus 2 or more")
    plan = request.plan()
    for line in (*_head(request), *_table(request, plan, memory)):
        typer.echo(line)
    if plan.fits(memory):
        for line in _room(request, plan, memory):
            typer.echo(line)
        return True
    typer.echo(f"It does not fit: {_gb(plan.total - available(memory))} too much. What fits:")
    found = list(_remedies(request, memory)) or ["  no single change is enough"]
    for line in found:
        typer.echo(line)
    return False


def _memory(text: str | None) -> int:
    """Bytes of a size such as "141GB".

    Raises:
        MLAError: another form.
    """
    if text is None:
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.device_count() else _H200
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([A-Za-z]{0,3})", text)
    units = {name.lower(): size for name, size in _UNITS.items()}
    if match is None or match[2].lower() not in units or float(match[1]) == 0:
        expected = f"a number > 0 and a unit of {', '.join(_UNITS)}, such as 141GB"
        raise MLAError("--gpu-memory", expected, text)
    return int(float(match[1]) * units[match[2].lower()])


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"


def _head(request: PlanRequest) -> Iterator[str]:
    model = request.meta_model()

    def count(part: torch.nn.Module) -> int:
        named = part.named_parameters()
        return sum(p.numel() for name, p in named if not name.endswith(SCALE_SUFFIX))

    word, unit = ("billion", 10**9) if count(model) >= 10**8 else ("million", 10**6)
    mtp = "no MTP layer" if model.mtp is None else f"{count(model.mtp) / unit:.1f} of them in the MTP layer"
    yield f"{model_name(request.model)}: {count(model) / unit:.1f} {word} parameters, {mtp}"
    parallel = "whole experts" if request.expert_parallel else "each expert"
    among = f", divided by heads, {parallel} and vocabulary" if request.gpus > 1 else ""
    yield f"On each of {request.gpus} GPUs{among}:" if request.gpus > 1 else "On one GPU:"


def _table(request: PlanRequest, plan: MemoryPlan, memory: int) -> Iterator[str]:
    alike = f"{_gb(plan.alike)} of it replicated on every GPU" if plan.num_gpus > 1 else ""
    pages = f"{plan.num_pages:,} pages of {plan.page_size}"
    rows = (
        pages
        if request.settings["num_pages"]
        else f"{request.settings['max_rows']:,} rows x {request.longest:,} tokens: {pages}"
    )
    bound = f"a limit, with serve --capture-budget {plan.graphs}"
    lines = {
        "weights": (plan.weights, alike),
        "cache": (plan.cache, rows + (", replicated on every GPU" if plan.num_gpus > 1 else "")),
        "steps": (plan.steps, "an estimate of the working memory of one step"),
        "graphs": (plan.graphs, bound),
        "reserved": (memory - available(memory), f"{RESERVED:.0%}, for CUDA, kernel code and fragmentation"),
        "total": (plan.total + memory - available(memory), f"of {_gb(memory)}"),
    }
    for name, (num_bytes, note) in lines.items():
        yield f"  {name:<9}{_gb(num_bytes):>9}  {note}".rstrip()


def _room(request: PlanRequest, plan: MemoryPlan, memory: int) -> Iterator[str]:
    pages = plan.most_pages(memory)
    yield f"It fits. The cache may have {pages:,} pages (--num-pages), enough at once for"
    positions = request.meta_model().config.max_position_embeddings
    contexts = dict.fromkeys([*(n for n in _CONTEXTS if n < positions), request.longest, positions])
    for tokens in sorted(contexts):
        rows = plan.most_rows(memory, tokens)
        yield f"  {f'{rows:,}' if rows else 'no':>9} rows x {tokens:>7,} tokens"


def _remedies(request: PlanRequest, memory: int) -> Iterator[str]:
    """Single changes that make it fit."""
    plan, model, settings = request.plan(), request.meta_model(), request.settings
    page_size = settings["page_size"]
    pages = plan.most_pages(memory)
    needed = 1 + -(-request.longest // page_size)
    if pages >= needed:
        waiting = f"--num-pages {pages}: requests wait for free pages"
        yield from _if_fits(_set(request, num_pages=pages), memory, waiting)
        if settings["num_pages"] is None:
            rows = plan.most_rows(memory, request.longest)
            yield from _if_fits(_set(request, max_rows=rows), memory, f"--max-rows {rows}")
    elif settings["num_pages"] is None and (tokens := (pages - 1) * page_size) >= page_size:
        short = _set(request, max_rows=1, max_model_len=tokens)
        yield from _if_fits(short, memory, f"--max-rows 1 --max-model-len {tokens}")
    budget = plan.graphs - (plan.total - available(memory))
    if budget > 0:
        fewer = f"--capture-budget {budget}: fewer graphs are recorded"
        yield from _if_fits(_set(request, capture_budget=budget), memory, fewer)
    gpus = _enough_gpus(request, memory)
    if gpus is not None:
        yield f"  --gpus {gpus}" + " --expert-parallel" * request.expert_parallel
    by_expert = _enough_gpus(replace(request, expert_parallel=True), memory)
    if by_expert is not None and (gpus is None or by_expert < gpus):
        yield f"  --gpus {by_expert} --expert-parallel"
    if request.dequantize:
        yield from _if_fits(replace(request, dequantize=False), memory, "without --dequantize")
    elif request.quantize is None:
        yield from _if_fits(replace(request, quantize="fp8"), memory, "--quantize fp8")
    if model.mtp is not None:
        yield from _if_fits(_set(request, num_speculative_tokens=0), memory, "--num-speculative-tokens 0")


def _set(request: PlanRequest, **settings: Unpack[EngineSettings]) -> PlanRequest:
    return replace(request, settings={**request.settings, **settings})


def _enough_gpus(request: PlanRequest, memory: int) -> int | None:
    """The smallest number of GPUs that holds it; None if no number does."""
    for gpus in numbers_of_gpus(request.meta_model(), expert_parallel=request.expert_parallel):
        if replace(request, gpus=gpus).plan().fits(memory):
            return gpus
    return None


def _if_fits(request: PlanRequest, memory: int, change: str) -> Iterator[str]:
    try:
        if request.plan().fits(memory):
            yield f"  {change}"
    except MLAError:
        return  # this number of GPUs may not divide the FP8 blocks
