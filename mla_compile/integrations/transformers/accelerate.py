"""`accelerate`: run a transformers model's `generate` on the engine."""

import logging
from dataclasses import replace
from typing import TypeVar, Unpack

from torch import nn
from transformers import PreTrainedModel

from mla_compile.engine.config import config_of, max_model_len_of
from mla_compile.engine_settings import EngineSettings
from mla_compile.errors import MLAError
from mla_compile.integrations.transformers.accelerated import Accelerated
from mla_compile.integrations.transformers.generation import AcceleratedGeneration
from mla_compile.integrations.transformers.mtp import MissingMtpLayer, mtp_layer
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.models.layout import pack_adjacent, unpack_adjacent
from mla_compile.speculate.drafter import known_drafter

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
    it gives another text than stock `generate`, but the same one for any number of drafts.

    Args:
        model: a transformers model with MLA attention in every layer, on one device, in evaluation mode.
        mtp: the MTP layer, a transformers `MtpModel` or a `LongcatMtpLayer`; by default it is loaded from the
            checkpoint that the model came from.
        settings: of `EngineConfig`, except `prefix_caching` and `num_pages`. `max_rows` (1) and `max_model_len` are the
            initial room: rows, and tokens of one, prompt included. A larger call makes more room and recompiles: set
            them if known. `max_model_len` is 512 by default, or fewer if the model has fewer positions, which are a
            limit for calls too. `page_size` is 64 by default. `generate(use_mtp=False)` runs without drafts. Without
            `drafter`, the MTP layer drafts if `mtp` is given or the checkpoint has one, else n-gram lookup in the
            sequence's own text; a warning is logged if the config names a layer that is missing.

    Raises:
        MLAError: a bad argument; the model is unchanged.
    """
    for name in ("prefix_caching", "num_pages"):  # weights may change between calls, and calls make room
        if name in settings:
            raise MLAError(name, "no value, as an accelerated model chooses it", settings[name], "remove it")
    own_settings: EngineSettings = {"max_rows": 1, "page_size": 64, "prefix_caching": False}
    config = config_of(None, {**own_settings, **settings})
    kind = known_drafter(config.drafter)
    reads_mtp = config.num_speculative_tokens > 0 and (kind is None or kind.needs_mtp)
    if mtp is not None and not reads_mtp:
        expected = "None, as num_speculative_tokens is 0 or the drafter uses no MTP layer"
        raise MLAError("mtp", expected, type(mtp).__name__)
    layer = None
    if reads_mtp:
        try:
            layer = mtp_layer(model, mtp)
        except MissingMtpLayer as error:
            if kind is not None:
                raise
            log.warning("n-gram lookup drafts, as the MTP layer is missing: %s", error)
    target = TransformersTarget(model, layer)
    room = max_model_len_of(config.max_model_len, target.max_position_embeddings, default=512)
    accelerated = Accelerated(target, replace(config, max_model_len=room))
    earlier = _take_off(model)
    if earlier is not None and earlier.target.mtp_layer is not accelerated.target.mtp_layer:
        unpack_adjacent(earlier.target)  # also an MTP layer that is no longer used
        pack_adjacent(accelerated.target)
    own = type(model)
    # `generate` calls methods of the class. The class keeps its name, as saving a model writes it.
    model.__class__ = type(own.__name__, (AcceleratedGeneration, own), {"__module__": own.__module__})
    accelerated.own_class = own
    vars(model)["mla"] = accelerated
    return model


def restore(model: PreTrainedModel) -> None:
    """Undo `accelerate`: restore `generate` and free the caches; no effect on other models.

    Weights that `accelerate` joined in one tensor get their own memory.
    """
    accelerated = _take_off(model)
    if accelerated is not None:
        unpack_adjacent(accelerated.target)


def _take_off(model: PreTrainedModel) -> Accelerated | None:
    """Restore the class of `model`, and return its `Accelerated` state; None if it has none."""
    if not isinstance(model, AcceleratedGeneration):
        return None
    accelerated: Accelerated = vars(model).pop("mla")
    model.__class__ = accelerated.own_class  # type: ignore[assignment]
    return accelerated
