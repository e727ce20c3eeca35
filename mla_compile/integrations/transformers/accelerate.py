"""`accelerate`: run a transformers model's `generate` on the engine."""

import logging
from dataclasses import replace
from typing import Any, TypeVar, Unpack

from torch import nn
from transformers import PreTrainedModel

from mla_compile.engine.config import config_of
from mla_compile.engine_settings import EngineSettings
from mla_compile.errors import MLAError
from mla_compile.integrations.transformers.accelerated import Accelerated
from mla_compile.integrations.transformers.generation import LOCK, AcceleratedGeneration
from mla_compile.integrations.transformers.mtp import MissingMtpLayer, mtp_layer
from mla_compile.integrations.transformers.target import TransformersTarget, check_model
from mla_compile.models.layout import pack_adjacent, unpack_adjacent
from mla_compile.speculate.drafter import known_drafter, loads_mtp

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=PreTrainedModel)


def accelerate(
    model: Model,
    *,
    mtp: nn.Module | None = None,
    **settings: Unpack[EngineSettings],
) -> Model:
    """Run `model.generate` on paged latents through the `mla` backend, with speculation if requested.

    Returns the same object, with only `generate` changed: forward, training and `save_pretrained` stay the same.
    Weights that one product can share move in memory, and stay the same parameters with the same values. Greedy and
    sampled generation, left-padded batches, streamers, stopping criteria and logits processors work; anything else
    (beams, `past_key_values`, ...) raises an `MLAError` that names it. `torch.manual_seed` makes sampling repeatable:
    it gives another text than stock `generate`, but the same one for any number of drafts. Only the decoder and the
    head run: a warning is logged if the model's forward is not transformers' own.

    Args:
        model: a transformers model with MLA attention in every layer, on one device, in evaluation mode.
        mtp: the MTP layer, a transformers `MtpModel` or a `LongcatMtpLayer`; by default it is loaded from the
            checkpoint that the model came from.
        settings: of `EngineConfig`, with its defaults, except `prefix_caching` and `num_pages`. `max_rows` and
            `max_model_len` are the initial room: rows, and tokens of one, prompt included. A larger call makes more
            room and recompiles, up to the model's positions. `generate(use_mtp=False)` runs without drafts. Without
            `drafter`, the MTP layer drafts if `mtp` is given or the checkpoint has one, else, if
            `num_speculative_tokens` is given, n-gram lookup in the sequence's own text; a warning is logged if the
            config names a layer that is missing.

    Raises:
        MLAError: a bad argument; the model is unchanged.
    """
    for name in ("prefix_caching", "num_pages"):  # weights may change between calls, and calls make room
        if name in settings:
            raise MLAError(name, "no value, as an accelerated model chooses it", settings[name], "remove it")
    settings["prefix_caching"] = False
    config = config_of(None, settings)
    kind = known_drafter(config.drafter)
    reads_mtp = loads_mtp(vars(config)) is None
    if mtp is not None and not reads_mtp:
        expected = "None, as num_speculative_tokens is 0 or the drafter uses no MTP layer"
        raise MLAError("mtp", expected, type(mtp).__name__)
    check_model(model)
    layer = None
    if reads_mtp:
        try:
            layer = mtp_layer(model, mtp)
        except MissingMtpLayer as error:
            if kind is not None:
                raise
            instead = "nothing" if config.num_speculative_tokens is None else "n-gram lookup"
            log.warning("%s drafts, as the MTP layer is missing: %s", instead, error)
    target = TransformersTarget(model, layer)
    fitted = config.fitted_to(target)
    drafts, room = fitted.num_speculative_tokens, fitted.max_model_len
    accelerated = Accelerated(target, replace(config, num_speculative_tokens=drafts, max_model_len=room))
    if not _has_stock_forward(model):
        message = "%s: its forward is not transformers' own, and generate runs only the decoder and the head"
        log.warning(message, type(model).__name__)
    with LOCK:
        earlier = _take_off(model)
        if earlier is not None and earlier.target.mtp_layer is not accelerated.target.mtp_layer:
            unpack_adjacent(earlier.target)  # also an MTP layer that is no longer used
            pack_adjacent(accelerated.target)
        own = type(model)
        # `generate` calls methods of the class. The class keeps its name, as saving a model writes it.
        model.__class__ = type(own.__name__, (AcceleratedGeneration, own), {"__module__": own.__module__})
        vars(model)["mla"] = accelerated
    return model


def restore(model: PreTrainedModel) -> None:
    """Undo `accelerate`: restore `generate` and free the caches; no effect on other models.

    Weights that `accelerate` joined in one tensor get their own memory.
    """
    with LOCK:
        accelerated = _take_off(model)
        if accelerated is not None:
            unpack_adjacent(accelerated.target)


def _has_stock_forward(model: PreTrainedModel) -> bool:
    """Whether all code of `forward` is transformers' own, compiled or not."""
    part: Any = getattr(model, "_orig_mod", model).forward  # what `torch.compile(model)` compiles
    while part is not None:
        # Not `__module__`, which wrappers copy.
        module = getattr(part, "__globals__", {}).get("__name__", "")
        if not module.startswith(("transformers.", "torch._dynamo.")):
            return False
        part = getattr(part, "__wrapped__", None)
    return True


def _take_off(model: PreTrainedModel) -> Accelerated | None:
    """Restore the class of `model`, and return its `Accelerated` state; None if it has none."""
    if not isinstance(model, AcceleratedGeneration):
        return None
    _, own = type(model).__bases__
    model.__class__ = own
    # A model that was made by the class of an accelerated one has none.
    accelerated: Accelerated | None = vars(model).pop("mla", None)
    return accelerated
