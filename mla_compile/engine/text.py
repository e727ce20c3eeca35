"""Text in, text out: a checkpoint's tokenizer around the engine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

import torch

from mla_compile.defaults import DEFAULT_MAX_ROWS, DEFAULT_MAX_TOKENS, SHIPPED_MODEL, default_dtype
from mla_compile.engine.completion import Completion
from mla_compile.engine.config import config_of
from mla_compile.engine.engine import Engine
from mla_compile.engine.grammar import Grammar
from mla_compile.engine.intake import check_one_each, check_prompt, checked_sampling, tokenize
from mla_compile.engine.start_ranks import start_ranks
from mla_compile.engine_settings import EngineSettings
from mla_compile.errors import MLAError, check_integer
from mla_compile.hub import find_checkpoint
from mla_compile.models import MLAForCausalLM, load_model, load_tokenizer
from mla_compile.models.checkpoint import LoadSettings, open_checkpoint, read_config
from mla_compile.models.sharding import check_divisible
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate.drafter import loads_mtp

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Checkpoint:
    """A model and its tokenizer, None if there is none; prompts are then token ids."""

    model: MLAForCausalLM
    tokenizer: "PreTrainedTokenizerBase | None"

    @classmethod
    def load(
        cls,
        path: str | Path = SHIPPED_MODEL,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        mtp: bool | None = None,
        quantize: Literal["fp8"] | None = None,
        dequantize: bool = False,
        generation_config: Literal["auto", "none"] = "auto",
        tokenizer: str | Path | None = None,
        text: bool = True,
        tensor_parallel_size: int = 1,
        expert_parallel: bool = False,
    ) -> "Checkpoint":
        """Load a checkpoint; other arguments and errors are those of `load_model`.

        Args:
            tokenizer: a directory with the tokenizer to use, for example if the checkpoint's own is code.
            text: whether text will be tokenized. If so, a tokenizer that cannot be loaded is an error, before any
                weight is read; if not, it is ignored.
            tensor_parallel_size: processes that share the model, each with a GPU of its own unless `device` is "cpu".
                This process is rank 0; it starts the others, which end with it.
            expert_parallel: see `Parallel`.

        Raises:
            MLAError: as `load_model` and `load_tokenizer`; `tokenizer` names a directory without one;
                `tensor_parallel_size` does not divide the model or exceeds the number of GPUs; `expert_parallel`
                without other processes.
        """
        size = tensor_parallel_size
        if type(size) is not int or size < 1:
            raise MLAError("tensor_parallel_size", "a number of processes >= 1", f"{size!r:.80}")
        if expert_parallel and size == 1:
            hint = "use tensor_parallel_size=2, for example"
            raise MLAError("expert_parallel", "more than one process", size, hint)
        directory = find_checkpoint(path)
        read_config(directory)
        found = _tokenizer(directory, tokenizer, text=text)
        settings = LoadSettings(mtp, quantize, dequantize, generation_config)
        parallel = None
        if size > 1:
            dtype = dtype or default_dtype(device)
            whole = open_checkpoint(directory, settings, dtype=dtype)[0]
            check_divisible(whole, size, expert_parallel=expert_parallel, argument="tensor_parallel_size")
            parallel = start_ranks(
                size,
                torch.device(device),
                expert_parallel=expert_parallel,
                path=str(directory.resolve()),
                dtype=str(dtype).removeprefix("torch."),
                **asdict(settings),
            )
        model = load_model(directory, dtype=dtype, device=device, parallel=parallel, **asdict(settings))
        return cls(model, found)

    def encode(self, prompt: Prompt, name: str = "prompt") -> list[int]:
        """Token ids of a prompt, checked against the model; errors call the prompt `name`.

        Raises:
            MLAError: an empty prompt, text without a tokenizer, an id outside the vocabulary, a prompt that leaves no
                position for a new token.
        """
        if not isinstance(prompt, Sequence):
            raise MLAError(name, "text or a list of token ids", repr(prompt))
        token_ids = prompt
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise MLAError(name, "token ids, as the checkpoint has no tokenizer", "text")
            token_ids = tokenize(self.tokenizer, prompt, name)
        limit = "the model's max_position_embeddings", self.model.config.max_position_embeddings
        return list(check_prompt(name, token_ids, vocab_size=self.model.arch.vocab_size, limit=limit))


def _tokenizer(path: str | Path, given: str | Path | None, *, text: bool) -> "PreTrainedTokenizerBase | None":
    if given is not None:
        tokenizer = load_tokenizer(given, "tokenizer")
        if tokenizer is None:
            raise MLAError("tokenizer", "a directory with a tokenizer.json", given)
        return tokenizer
    try:
        return load_tokenizer(path)
    except MLAError:
        if text:
            raise
        return None


def fitting_engine(
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = DEFAULT_MAX_TOKENS,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    **settings: Unpack[EngineSettings],
) -> Engine:
    """An engine large enough to complete these prompts.

    A step is compiled for the width of block tables and the number of cache pages. Both are those of an `Engine` with
    default sizes, or powers of two if these prompts need more: other prompts, commands and processes then find the
    compiled step in Inductor's cache.

    sampling: as for `Engine.generate`; `n` and `max_tokens` determine sizes.
    settings: of `EngineConfig`. By default there are not more rows than completions.
    """
    model = checkpoint.model
    asked = [sampling] if isinstance(sampling, SamplingParams) else sampling or []
    copies = max((params.n for params in asked), default=1)
    max_new_tokens = max([1, max_new_tokens, *(params.max_tokens or 1 for params in asked)])
    longest = _power_of_two(max(map(len, prompts), default=1) + max_new_tokens)
    default = config_of(None, settings).fitted_to(model)
    max_rows = settings.get("max_rows") or min(DEFAULT_MAX_ROWS, _power_of_two(len(prompts) * copies))
    room = max(default.max_model_len, min(longest, model.max_position_embeddings))
    max_model_len = settings.get("max_model_len") or room
    pages = 1 + max_rows * -(-max_model_len // default.page_size)
    num_pages = settings.get("num_pages") or max(default.num_pages, pages)
    sizes: EngineSettings = {"max_rows": max_rows, "max_model_len": max_model_len, "num_pages": num_pages}
    return Engine(model, config_of(None, {**settings, **sizes}), tokenizer=checkpoint.tokenizer)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def generate(
    prompts: Sequence[Prompt],
    *,
    model: str | Path = SHIPPED_MODEL,
    tokenizer: str | Path | None = None,
    max_new_tokens: int = DEFAULT_MAX_TOKENS,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    grammars: Grammar | Sequence[Grammar | None] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    quantize: Literal["fp8"] | None = None,
    dequantize: bool = False,
    generation_config: Literal["auto", "none"] = "auto",
    **settings: Unpack[EngineSettings],
) -> list[Completion]:
    """Complete prompts with a checkpoint.

        >>> generate(["In the beginning"], max_new_tokens=16)[0].text

    Each call loads and compiles: to complete more prompts later, keep the results of `load_model` and `Engine`.

    Args:
        prompts: texts, or token ids `[tokens]` each.
        model: a directory in Hugging Face format, or ORG/NAME of a model in the local Hugging Face cache; by default
            the small model that comes with the package.
        tokenizer: a directory with the tokenizer to use, if the model's own is code, which is never run. Without a
            tokenizer prompts are token ids, and completions have no text.
        max_new_tokens: maximum new tokens per prompt; a prompt's `SamplingParams.max_tokens` takes precedence.
        sampling: for all prompts, or one for each; by default what the checkpoint's `generation_config.json` says, else
            greedy. A prompt has `SamplingParams.n` completions, one after the other in the list.
        grammars: constrain completions: one for all prompts, or one for each; None for no constraint.
        dtype, device: of weights and caches; the dtype is bfloat16 on a GPU and float32 elsewhere by default.
        quantize, dequantize, generation_config: as for `load_model`: quantise weights to FP8, or convert FP8 weights to
            `dtype`; "none" ignores the checkpoint's `generation_config.json`.
        settings: of the engine, see `EngineConfig`. By default there are not more rows than completions.

    Returns:
        The completions, in order; each ends after an end-of-sequence id of the checkpoint, by its `SamplingParams`,
        after `max_new_tokens`, or at the model's `max_position_embeddings`.

    Raises:
        MLAError: a bad argument, prompt or checkpoint, named, before anything runs.
    """
    if isinstance(prompts, str):
        raise MLAError("prompts", "a list of prompts", "a str", "write [prompt]")
    if not isinstance(prompts, Sequence):
        raise MLAError("prompts", "a list of prompts", type(prompts).__name__)
    check_integer("max_new_tokens", max_new_tokens, 1)
    if sampling is not None and not isinstance(sampling, SamplingParams):
        check_one_each("sampling", "SamplingParams", sampling, len(prompts))
        for i, params in enumerate(sampling):
            checked_sampling(f"sampling[{i}]", params)
    text = any(isinstance(prompt, str) for prompt in prompts)
    checkpoint = Checkpoint.load(
        find_checkpoint(model, "model"),
        dtype=dtype,
        device=device,
        mtp=loads_mtp(settings),
        quantize=quantize,
        dequantize=dequantize,
        generation_config=generation_config,
        tokenizer=tokenizer,
        text=text,
    )
    token_ids = [checkpoint.encode(prompt, f"prompts[{i}]") for i, prompt in enumerate(prompts)]
    engine = fitting_engine(
        checkpoint, token_ids, max_new_tokens=max_new_tokens, sampling=sampling, **settings
    )
    return engine.generate(token_ids, sampling, max_new_tokens=max_new_tokens, grammars=grammars)
