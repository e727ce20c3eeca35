"""Translates a call of `generate`; unsupported arguments are rejected by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from mla_compile.errors import MLAError
from mla_compile.speculate import SamplingParams

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

UNDO = "or undo accelerate with mla_compile.integrations.transformers.restore(model)"
"""The hint for arguments that only stock transformers supports."""
_COMPILED = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""Processors that the compiled step implements, in transformers' order: our name of the parameter, and theirs."""


@dataclass
class GenerateCall:
    """One call of `generate`.

    input_ids: int64 `[rows, width]`, padded on the left. prompts: the same without padding.
    stop_ids: end-of-sequence ids. pad_id: fills a row after its end.
    sampling: per row. With `processors` it only affects the drafts.
    processors: those that run on the host; None if the compiled step chooses the tokens.
    criteria: stopping criteria beyond the length and the end-of-sequence ids.
    """

    input_ids: Tensor
    prompts: list[list[int]]
    max_new_tokens: int
    stop_ids: list[int]
    pad_id: int
    sampling: list[SamplingParams]
    processors: LogitsProcessorList | None
    criteria: StoppingCriteriaList
    streamer: "BaseStreamer | None"
    config: GenerationConfig

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and generation together."""
        return max(map(len, self.prompts)) + self.max_new_tokens

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: "BaseStreamer | None",
        model_kwargs: dict[str, Any],
    ) -> "GenerateCall":
        """Translate the arguments that `generate` prepared. Raises `MLAError` for unsupported ones."""
        _check_config(config)
        _check_model_kwargs(model_kwargs)
        for processor in processors:
            _check_processor(processor)
        rows, width = input_ids.shape
        # By exact type, as a subclass may behave differently.
        eos = [c for c in criteria if type(c) is EosTokenCriteria]
        lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        rest = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        prompts = _prompts(input_ids, model_kwargs)
        on_host = not _is_compiled(processors, is_padded=min(map(len, prompts)) < width)
        on_host |= bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        pad = config._pad_token_tensor
        return cls(
            input_ids=input_ids,
            prompts=prompts,
            max_new_tokens=min(config.max_length, *lengths) - width,
            stop_ids=[int(i) for c in eos for i in c.eos_token_id],
            pad_id=0 if pad is None else int(pad),
            sampling=_sampling(processors, rows, do_sample=bool(config.do_sample)),
            processors=processors if on_host else None,
            criteria=StoppingCriteriaList(rest),
            streamer=streamer,
            config=config,
        )


def check_mask(mask: Tensor | None, inputs: Tensor) -> None:
    """Raises `MLAError` for a mask of another shape than the input, `[rows, tokens]`."""
    if mask is not None and mask.shape != inputs.shape[:2]:
        raise MLAError("attention_mask", f"{list(inputs.shape[:2])}, as input_ids", list(mask.shape))


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    if input_ids.numel() == 0:
        raise MLAError("input_ids", "at least one row, and one token in each", list(input_ids.shape))
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    live = mask.bool()
    if not bool((mask == live).all()):
        raise MLAError("attention_mask", "0 for padding and 1 for tokens", "other values", "pass mask.bool()")
    # Without a mask, `generate` takes each padding id as padding.
    hint = "if the padding id is a token of the text, pass attention_mask of ones"
    if not bool(live.any(dim=-1).all()):
        raise MLAError("attention_mask", "a token in every row", "a row of padding only", hint)
    if bool((live[:, :-1] & ~live[:, 1:]).any()) or not bool(live[:, -1].all()):
        hint = f"set tokenizer.padding_side = 'left'; {hint}"
        raise MLAError("attention_mask", "zeros only at the start of a row", "zeros after a token", hint)
    positions = model_kwargs.get("position_ids")
    usual = (live.long().cumsum(dim=-1) - 1).masked_fill(~live, 0)
    if positions is not None and not bool(((positions == usual) | ~live).all()):
        raise MLAError(
            "position_ids", "each row counted from its first token", "other positions", "remove it"
        )
    return [row[keep].tolist() for row, keep in zip(input_ids, live, strict=True)]


def _is_compiled(processors: LogitsProcessorList, *, is_padded: bool) -> bool:
    """Whether the compiled step implements the processors: each at most once, in its order, with default options.

    is_padded: whether any prompt is shorter than the longest.
    """
    kinds = [type(processor) for processor in processors]
    if any(kind not in _COMPILED for kind in kinds):
        return False
    if is_padded and RepetitionPenaltyLogitsProcessor in kinds:
        return False  # transformers' processor penalises the padding's id too
    if TopPLogitsWarper in kinds and MinPLogitsWarper in kinds:
        return False  # the step applies min-p first, which changes what top-p keeps (not what top-k keeps)
    order = [list(_COMPILED).index(kind) for kind in kinds]
    plain = all(
        getattr(processor, "min_tokens_to_keep", 1) == 1
        and not getattr(processor, "prompt_ignore_length", None)
        and getattr(processor, "filter_value", -float("inf")) == -float("inf")
        for processor in processors
    )
    return plain and order == sorted(set(order))


def _sampling(processors: LogitsProcessorList, rows: int, *, do_sample: bool) -> list[SamplingParams]:
    """Each row's parameters; seeds come from torch's generator, so `torch.manual_seed` makes texts repeatable.

    Exact if `_is_compiled`; otherwise they only affect the drafts.
    """
    values: dict[str, Any] = {"temperature": 1.0}
    for processor in processors:
        for kind, (ours, theirs) in _COMPILED.items():
            if isinstance(processor, kind):
                values[ours] = getattr(processor, theirs)
    if values.get("top_p") == 0:  # keeps the most likely token, as the least number above 0 does
        values["top_p"] = torch.finfo(torch.float32).tiny
    if not do_sample:
        values["temperature"] = 0.0
        return [SamplingParams(**values)] * rows
    seeds = torch.randint(2**62, (rows,), device="cpu").tolist()
    return [SamplingParams(**values, seed=seed) for seed in seeds]


_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_cache": (lambda value: value is False, "True, as the latents are cached"),
    "cache_implementation": (bool, "None, as the latents are in pages"),
    "compile_config": (bool, "None; pass mode to accelerate instead"),
    "output_attentions": (bool, "False, as attention weights are never computed"),
    "output_hidden_states": (bool, "False"),
    "token_healing": (bool, "False"),
    "is_assistant": (bool, "False, as an accelerated model has its own drafter"),
    "prompt_lookup_num_tokens": (bool, "None, as an accelerated model has its own drafter"),
    "assistant_early_exit": (bool, "None, as an accelerated model has its own drafter"),
}


def _check_config(config: GenerationConfig) -> None:
    for name, (is_refused, expected) in _REFUSED.items():
        value = getattr(config, name, None)
        if is_refused(value):
            raise MLAError(name, expected, value, f"remove it, {UNDO}")


_CACHES = ("past_key_values", "cache")
"""A cache's name until transformers 5.23, and from 5.24 on."""
_KNOWN_KWARGS = {"attention_mask", "position_ids", *_CACHES, "use_cache", "logits_to_keep"}


def _check_model_kwargs(model_kwargs: dict[str, Any]) -> None:
    for name, value in model_kwargs.items():
        given = bool(value) if isinstance(value, dict) else value is not None
        if name not in _KNOWN_KWARGS and given:
            raise MLAError(name, "only token ids and their mask", type(value).__name__, UNDO)
    for name in _CACHES:
        cache = model_kwargs.get(name)
        # `generate` makes an empty one, which is not used.
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            raise MLAError(name, "None, as the latents are in pages", type(cache).__name__, UNDO)


def _check_processor(processor: object) -> None:
    name = type(processor).__name__
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        raise MLAError("guidance_scale", f"None, as {name} runs the model itself", "a scale", UNDO)
    if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
        expected = f"None, as {name} counts its calls, and speculation calls it for rejected tokens too"
        raise MLAError("watermarking_config", expected, name, UNDO)
