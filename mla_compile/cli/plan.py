"""`mla-compile plan`: the memory that a model needs on each GPU, from its config, and settings that fit."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Unpack

import torch
import typer

from mla_compile.defaults import defaults_on
from mla_compile.engine.config import EngineConfig
from mla_compile.engine.device_memory import RESERVED, available, usable_memory
from mla_compile.engine.memory import MemoryPlan, plan_memory
from mla_compile.engine_settings import CheckpointSettings, EngineSettings
from mla_compile.errors import MLAError
from mla_compile.hub import model_name
from mla_compile.models.checkpoint import meta_model
from mla_compile.models.deepseek import MLAForCausalLM
from mla_compile.models.fp8 import SCALE_SUFFIX
from mla_compile.models.sharding import numbers_of_gpus
from mla_compile.speculate.drafter import loads_mtp

_UNITS = {"TB": 10**12, "GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "B": 1}
_H200 = 141 * 10**9
_CONTEXTS = (2_048, 8_192, 32_768, 131_072)
_meta_model = cache(meta_model)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(CheckpointSettings):
    """The model, settings and device to plan for.

    device: "cuda" or "cpu". gpus: GPUs that share the model. memory: bytes of each GPU, or of the computer.
    settings: of the engine, from flags.
    """

    model: Path
    device: str
    gpus: int
    memory: int
    settings: EngineSettings

    @classmethod
    def of(cls, gpus: int | None, gpu_memory: str | None, **given: Any) -> "PlanRequest":
        """A request for the GPUs that flags describe, else for this machine's.

        Raises:
            MLAError: a malformed size.
        """
        here = torch.cuda.device_count() > 0
        if gpu_memory is not None:
            memory = _memory(gpu_memory)
        elif here:
            memory = torch.cuda.get_device_properties(0).total_memory
        else:
            memory = _H200 if gpus else usable_memory(torch.device("cpu"))
        device = "cuda" if gpus or gpu_memory or here else "cpu"
        return cls(device=device, gpus=gpus or 1, memory=memory, **given)

    @property
    def usable(self) -> int:
        """The memory without its reserved share."""
        return available(self.memory) if self.device == "cuda" else self.memory

    def meta_model(self) -> MLAForCausalLM:
        return _meta_model(
            self.model,
            dtype=getattr(torch, self.dtype or defaults_on(self.device).dtype),
            mtp=loads_mtp(self.settings),
            quantize=self.quantize,
            dequantize=self.dequantize,
        )

    def plan(self) -> MemoryPlan:
        """Raises `MLAError` for a setting that the model rules out."""
        config = EngineConfig(**self.settings)
        if self.device == "cpu":
            config = replace(config, capture_budget=None)
        return plan_memory(
            self.meta_model(),
            config,
            self.gpus,
            expert_parallel=self.expert_parallel,
            argument="--gpus",
            device_type=self.device,
            usable=self.usable,
        )


def print_plan(request: PlanRequest) -> bool:
    """Print the memory that a request needs; return whether it fits.

    Raises:
        MLAError: a bad setting.
    """
    if request.expert_parallel and request.gpus == 1:
        raise MLAError("--expert-parallel", "more than one GPU", "--gpus 1", "add --gpus 2 or more")
    plan = request.plan()
    typer.echo("\n".join([*_head(request), *_table(request, plan)]))
    if plan.fits(request.usable):
        typer.echo("\n".join(_room(request, plan)))
        return True
    typer.echo(f"It does not fit: {_gb(plan.total - request.usable)} too much. What fits:")
    typer.echo("\n".join(_remedies(request)) or "  no single change is enough")
    return False


def _memory(text: str) -> int:
    """Bytes of a size such as "141GB".

    Raises:
        MLAError: another form.
    """
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
    head = request.settings.get("drafter_model")
    if model.mtp is not None:
        mtp = f"{count(model.mtp) / unit:.1f} of them in the MTP layer"
    else:
        mtp = "no MTP layer" if head is None else f"without an MTP layer, as the head in {head} drafts"
    yield f"{model_name(request.model)}: {count(model) / unit:.1f} {word} parameters, {mtp}"
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    if request.device == "cpu":
        yield f"On the CPU of this machine, in {dtype}:"
    elif request.gpus == 1:
        yield f"On one GPU, in {dtype}:"
    else:
        parallel = "whole experts" if request.expert_parallel else "each expert"
        yield f"On each of {request.gpus} GPUs, in {dtype}, divided by heads, {parallel} and vocabulary:"


def _table(request: PlanRequest, plan: MemoryPlan) -> Iterator[str]:
    config, reserved = plan.config, request.memory - request.usable
    alike, pages = "", f"{config.num_pages:,} pages of {config.page_size}"
    if not request.settings["num_pages"]:
        pages = f"{config.max_rows:,} rows x {config.max_model_len:,} tokens: {pages}"
    if plan.num_gpus > 1:
        alike = f"{_gb(plan.alike)} of it replicated on every GPU"
        pages += ", replicated on every GPU"
    lines = {
        "weights": (plan.weights, alike),
        "cache": (plan.cache, pages),
        "steps": (plan.steps, "an estimate of the working memory of one step"),
        "graphs": (plan.graphs, f"a limit, with serve --capture-budget {plan.graphs}"),
        "reserved": (reserved, f"{RESERVED:.0%}, for CUDA, kernel code and fragmentation"),
        "total": (plan.total + reserved, f"of {_gb(request.memory)}"),
    }
    for name, (num_bytes, note) in lines.items():
        if request.device == "cuda" or name not in ("graphs", "reserved"):
            yield f"  {name:<9}{_gb(num_bytes):>9}  {note}".rstrip()


def _room(request: PlanRequest, plan: MemoryPlan) -> Iterator[str]:
    pages = plan.most_pages(request.usable)
    yield f"It fits. The cache may have {pages:,} pages (--num-pages), enough at once for"
    positions = request.meta_model().config.max_position_embeddings
    longest = plan.config.max_model_len
    contexts = dict.fromkeys([*(n for n in _CONTEXTS if n < positions), longest, positions])
    for tokens in sorted(contexts):
        rows = plan.most_rows(request.usable, tokens)
        yield f"  {f'{rows:,}' if rows else 'no':>9} rows x {tokens:>7,} tokens"


def _remedies(request: PlanRequest) -> Iterator[str]:
    """Single changes that make it fit."""
    plan, model, settings = request.plan(), request.meta_model(), request.settings
    page_size, usable = plan.config.page_size, request.usable
    pages = plan.most_pages(usable)
    if pages >= 1 + plan.config.pages_per_row:
        waiting = f"--num-pages {pages}: requests wait for free pages"
        yield from _if_fits(_set(request, num_pages=pages), waiting)
        if settings["num_pages"] is None:
            rows = plan.most_rows(usable, plan.config.max_model_len)
            yield from _if_fits(_set(request, max_rows=rows), f"--max-rows {rows}")
    elif settings["num_pages"] is None and (tokens := (pages - 1) * page_size) >= page_size:
        short = _set(request, max_rows=1, max_model_len=tokens)
        yield from _if_fits(short, f"--max-rows 1 --max-model-len {tokens}")
    budget = plan.graphs - (plan.total - usable)
    if budget > 0:
        fewer = f"--capture-budget {budget}: fewer graphs are recorded"
        yield from _if_fits(_set(request, capture_budget=budget), fewer)
    if request.device == "cuda":
        gpus = _enough_gpus(request)
        if gpus is not None:
            yield f"  --gpus {gpus}" + " --expert-parallel" * request.expert_parallel
        by_expert = _enough_gpus(replace(request, expert_parallel=True))
        if by_expert is not None and (gpus is None or by_expert < gpus):
            yield f"  --gpus {by_expert} --expert-parallel"
    if request.dequantize:
        yield from _if_fits(replace(request, dequantize=False), "without --dequantize")
    elif request.quantize is None:
        yield from _if_fits(replace(request, quantize="fp8"), "--quantize fp8")
    if model.mtp is not None:
        yield from _if_fits(_set(request, num_speculative_tokens=0), "--num-speculative-tokens 0")


def _set(request: PlanRequest, **settings: Unpack[EngineSettings]) -> PlanRequest:
    return replace(request, settings={**request.settings, **settings})


def _enough_gpus(request: PlanRequest) -> int | None:
    """The smallest number of GPUs that holds it; None if no number does."""
    for gpus in numbers_of_gpus(request.meta_model(), expert_parallel=request.expert_parallel):
        if replace(request, gpus=gpus).plan().fits(request.usable):
            return gpus
    return None


def _if_fits(request: PlanRequest, change: str) -> Iterator[str]:
    try:
        if request.plan().fits(request.usable):
            yield f"  {change}"
    except MLAError:
        return  # this number of GPUs may not divide the FP8 blocks
