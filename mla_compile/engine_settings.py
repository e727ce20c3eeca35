"""Declares the settings of an engine and of its checkpoint, each once, without importing torch.

To add a setting, add its type to `EngineSettings` and its field, with a line of documentation, to `EngineFields`. From
there it reaches `Engine`, `mla_compile.generate`, `accelerate`, the server, Ray, other ranks, and the commands that its
field names. Checks other than an integer's `least` and `most` belong in `EngineConfig.__post_init__`.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, get_origin

from mla_compile.defaults import (
    DEFAULT_MAX_ROWS,
    IN_WORDS,
    MAX_DRAFTS,
    DrafterName,
    DtypeName,
    KvCacheDtype,
    setting,
)
from mla_compile.errors import MLAError, check_integer

if TYPE_CHECKING:
    from mla_compile.speculate.drafter import DrafterKind


class EngineSettings(TypedDict, total=False):
    """The keyword arguments of `EngineConfig`, for type checkers: the fields of `EngineFields` without defaults."""

    num_speculative_tokens: int | None
    drafter: "DrafterName | DrafterKind | None"
    drafter_model: str | Path | None
    max_rows: int
    max_model_len: int | None
    page_size: int | None
    num_pages: int | None
    kv_cache_dtype: KvCacheDtype
    max_tokens_per_step: int | None
    prefix_caching: bool
    compile: bool | None
    mode: str | None
    decode_backend: str | None
    capture_budget: int | None
    batch_invariant: bool
    fp8_activations: bool


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How commands and the server load a checkpoint. See `Checkpoint.load`."""

    tokenizer: str | Path | None = setting(
        None,
        "generate serve",
        "Where to take the tokenizer from, if the checkpoint's own is code, which is never run.",
        kind=str | None,
        metavar="DIR",
        show_default="the checkpoint's",
    )
    dtype: DtypeName | None = setting(
        None,
        "generate serve plan",
        "The dtype of weights and cache.",
        show_default=IN_WORDS["dtype"],
    )
    quantize: Literal["fp8"] | None = setting(
        None,
        "generate serve plan",
        "Quantise weights as they are loaded, in blocks of 128 x 128.",
        show_default="as the checkpoint is",
    )
    dequantize: bool = setting(False, "generate serve plan", "Hold FP8 weights of the checkpoint in --dtype.")
    device: str | None = setting(
        None,
        "generate serve",
        "cpu, cuda or cuda:N.",
        metavar="NAME",
        show_default="cuda if there is one, else cpu",
    )
    tensor_parallel_size: int = setting(
        1,
        "generate serve",
        "Processes that share the model, each with a GPU of its own; they are started and ended.",
        least=1,
        metavar="N",
    )
    expert_parallel: bool = setting(
        False, "generate serve plan", "Assign whole routed experts to GPUs instead of dividing each of them."
    )

    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "generate serve",
        "auto: sampling defaults and end-of-sequence ids of the checkpoint's generation_config.json; none: the file is "
        "ignored.",
    )

    def of_checkpoint(self) -> dict[str, Any]:
        """The arguments of `Checkpoint.load`."""
        import torch

        chosen = {each.name: getattr(self, each.name) for each in fields(CheckpointSettings)}
        return {**chosen, "dtype": None if self.dtype is None else getattr(torch, self.dtype)}


@dataclass(frozen=True, kw_only=True)
class EngineFields:
    """The settings of an `Engine`.

    Args:
        num_speculative_tokens: drafts per step, k >= 0; 0 for a model with recurrent layers. None: 3 if the model has
            an MTP layer or a drafter is given, else 0.
        drafter: what proposes them: "mtp", the model's MTP layer; "ngram", prompt lookup of the last tokens in the
            request's own text; "eagle3", the head in `drafter_model`; or a custom `DrafterKind`. None: the head if
            `drafter_model` is given, else the MTP layer if there is one, else "ngram".
        drafter_model: a directory with an EAGLE-3 head for the model, or ORG/NAME of one in the local Hugging Face
            cache.
        max_rows: requests that run at once; others wait.
        max_model_len: maximum number of tokens of a request, prompt included; at most the model's number of positions,
            if it has one (see `ServedModel`). None: as many as it has, or the largest power of two of which `max_rows`
            requests fit in the memory that weights leave (docs/defaults.md), but at least 2048; 2048 for a model
            without a number of positions.
        page_size: tokens per cache page. None: 64 on GPUs, else 16.
        num_pages: of the caches, the dummy page 0 included. By default enough for `max_rows` requests of
            `max_model_len` tokens. With fewer, a request that finds no page is preempted and runs again later, with its
            emitted tokens as part of its prompt (but see `batch_invariant`); at least as many as one request needs.
        kv_cache_dtype: "auto" caches latents in the weights' dtype, "fp8" in FP8 with a float32 scale for every 128
            values: 0.57 times the bytes (docs/serving.md). For a `kv_lora_rank` that is a multiple of 128, on a CPU or
            a GPU of SM 89 or newer. The cache of a drafter with MLA follows; other caches of drafters do not.
        max_tokens_per_step: maximum number of query tokens of a step; a longer prompt takes several steps. By default
            4096, or 512 more than the tokens of `max_rows` decode rows if that is larger.
        prefix_caching: whether prompts reuse cached pages of others with the same beginning.
        compile: True compiles steps on their first use, or in `warm_up`. None does so too, but not in float32 on a CPU:
            there steps run eagerly while a thread compiles them, once there have been 256. False runs everything
            eagerly.
        mode: the mode of `torch.compile` for steps; "reduce-overhead" replays one CUDA graph per step. Steps with
            prompts are captured from `warm_up` on, or after 16 steps that mix prompts and decode rows. Until then the
            model's forward is eager in them: a few batches need few of them, and compiling it for prompts takes as long
            as for the others. It always is if no CUDA graphs are recorded (another mode, the CPU, a model with
            recurrent layers), and never with `batch_invariant`.
        decode_backend: the decode backend of steps, compiled or not; None selects the fastest. The engine rejects one
            that this device or `compile` rules out; the first step rejects one that the model's sizes rule out.
        capture_budget: bytes of device memory for CUDA graphs. Once they hold this many, no further number of rows is
            captured: its batches run uncaptured. Steps with prompts use at most half of it; further sizes of prompts
            run uncaptured, and so do those with more than 4,096 tokens (without a budget 8,192). 0 captures nothing.
            None for no limit: both have few sizes, and graphs share memory.
        batch_invariant: a request's tokens, log-probabilities and the target's latents have the same bits alone and
            beside any others, in every dtype: for any `max_rows`, drafts and `max_tokens_per_step`, with shared pages
            or without, in every process on the same model of GPU with the same versions. It compiles all steps, those
            with prompts included; prompts share only pages that prompts have filled, not emitted tokens; and requests
            begin once there are pages for their longest text. Not for `compile=False` or models with recurrent layers.
        fp8_activations: in steps of more than 128 tokens, tokens are quantised to FP8 before they are multiplied by FP8
            weights, with a scale for each 128 numbers. Prompts are faster and less exact (docs/checkpoints.md), and
            steps with prompts are compiled from the first on. For a model with FP8 weights on Hopper; not for
            `compile=False` or `batch_invariant`.

    Raises:
        MLAError: a bad argument, named.
    """

    num_speculative_tokens: int | None = setting(
        None,
        "generate serve plan",
        "Tokens drafted per step; the completions are the same whatever K is.",
        least=0,
        most=MAX_DRAFTS,
        metavar="K",
        show_default=IN_WORDS["num_speculative_tokens"],
    )
    drafter: "DrafterName | DrafterKind | None" = setting(
        None,
        "generate serve",
        "What drafts. mtp: the MTP layer; ngram: prompt lookup in the text so far; eagle3: the head in "
        "--drafter-model.",
        kind=DrafterName | None,
        show_default=IN_WORDS["drafter"],
    )
    drafter_model: str | Path | None = setting(
        None,
        "generate serve plan",
        "An EAGLE-3 head that drafts: a directory, or ORG/NAME of one in the local Hugging Face cache.",
        kind=str | None,
        metavar="DIR",
        show_default="none",
    )
    max_rows: int = setting(
        DEFAULT_MAX_ROWS, "serve plan", "Requests that run at once.", least=1, metavar="N"
    )
    max_model_len: int | None = setting(
        None,
        "serve plan",
        "Tokens of a request, prompt included.",
        least=2,
        metavar="N",
        show_default=IN_WORDS["max_model_len"],
    )
    page_size: int | None = setting(
        None,
        "serve plan",
        "Tokens of a cache page.",
        least=1,
        metavar="N",
        show_default=IN_WORDS["page_size"],
    )
    num_pages: int | None = setting(
        None,
        "serve plan",
        "Pages of the cache.",
        least=2,
        metavar="N",
        show_default=IN_WORDS["num_pages"],
    )
    kv_cache_dtype: KvCacheDtype = setting(
        "auto",
        "generate serve plan",
        "The dtype of cached latents. auto: that of the weights; fp8: 8 bits with a scale for every 128 values.",
    )
    max_tokens_per_step: int | None = setting(
        None,
        "serve plan",
        "Tokens of a step at most, decode rows and prompts together.",
        least=1,
        metavar="N",
        show_default=IN_WORDS["max_tokens_per_step"],
    )
    prefix_caching: bool = setting(True, "serve", "Share pages of equal beginnings.")
    compile: bool | None = setting(
        None,
        "generate serve",
        "Compile the steps.",
        show_default="before they run; in float32 on a CPU while they run eagerly",
    )
    mode: str | None = setting(
        "reduce-overhead", "serve", "The mode of torch.compile.", kind=str, metavar="NAME"
    )
    decode_backend: str | None = setting(
        None,
        "serve",
        "The decode backend of every step; `mla-compile env --verbose` lists them.",
        metavar="NAME",
        show_default="the fastest",
    )
    capture_budget: int | None = setting(
        None,
        "serve plan",
        "Device memory for CUDA graphs.",
        least=0,
        most=2**63 - 1,
        metavar="BYTES",
        show_default="no limit",
    )
    batch_invariant: bool = setting(
        False,
        "generate serve",
        "A completion has the same tokens and logprobs, bit for bit, alone and beside any others, in any dtype, with "
        "any K; compiles every step.",
    )
    fp8_activations: bool = setting(
        False,
        "serve",
        "Quantise the tokens of long steps to FP8 where the weights are FP8: faster prompts, less exact.",
    )

    def __post_init__(self) -> None:
        """Check each value against its field's type and bounds."""
        for each in fields(EngineFields):
            value, least, most = getattr(self, each.name), each.metadata["least"], each.metadata["most"]
            if each.type in (bool, bool | None) and type(value) not in (bool, *get_args(each.type)):
                expected = "True or False" if each.type is bool else "True, False or None"
                raise MLAError(each.name, expected, f"{value!r:.80}")
            if get_origin(each.type) is Literal and value not in get_args(each.type):
                raise MLAError(each.name, " or ".join(map(repr, get_args(each.type))), f"{value!r:.80}")
            if least is not None and not (value is None and NoneType in get_args(each.type)):
                check_integer(each.name, value, least, most)
