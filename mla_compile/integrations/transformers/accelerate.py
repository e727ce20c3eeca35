"""`accelerate`: a transformers model whose `generate` runs on our engine."""

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
    """Let `model.generate` run on paged latents through the `mla` backend, with speculation where asked for.

    The same object comes back, and only its `generate` changes: a forward, training and `save_pretrained` are as
    before. Weights that are multiplied by together move in memory, and stay the same parameters with the same values.
    Greedy and sampled generation, batches padded on the left, streamers, stopping criteria and logits processors work;
    anything else (beams, `past_key_values`, ...) raises an `MLAError` that names it. `torch.manual_seed` repeats a
    sampled text: not that of stock `generate` with the same seed, but the same one for any number of drafts.

    Args:
        model: a transformers model with MLA attention in every layer, on one device, in evaluation mode.
        mtp: the MTP layer, a transformers `MtpModel` or a `LongcatMtpLayer`; by default it is loaded from the
            checkpoint that the model came from.
        settings: of `EngineConfig`; not `prefix_caching` or `num_pages`, which it chooses. `max_rows` (1) and
            `max_model_len` are sequences at once, and tokens of one, prompt included, that there is room for at first.
            A larger call makes more room, and compiles anew: set them if you know. Without `max_model_len` it is 512
            tokens, or as many as the model has positions; more than those are refused, in a call too. `page_size` is 64
            by default. `generate(use_mtp=False)` runs without drafts. Without a `drafter` the MTP layer drafts where
            `mtp` is given or the checkpoint has one, else a look-up in the sequence's own text; the log says so where
            the config names a layer that is nowhere.

    Raises:
        MLAError: a bad argument, named; the model is then as it was.
    """
    for name in ("prefix_caching", "num_pages"):  # weights may change between calls, and calls make room
        if name in settings:
            raise MLAError(
                name, "nothing, as an accelerated model chooses it", settings[name], "leave it out"
            )
    own_settings: EngineSettings = {"max_rows": 1, "page_size": 64, "prefix_caching": False}
    config = config_of(None, {**own_settings, **settings})
    kind = known_drafter(config.drafter)
    reads_mtp = config.num_speculative_tokens > 0 and (kind is None or kind.needs_mtp)
    if mtp is not None and not reads_mtp:
        expected = "None where num_speculative_tokens is 0 or the drafter runs no MTP layer"
        raise MLAError("mtp", expected, type(mtp).__name__)
    layer = None
    if reads_mtp:
        try:
            layer = mtp_layer(model, mtp)
        except MissingMtpLayer as error:
            if kind is not None:
                raise
            log.warning("no MTP layer drafts, a look-up does: %s", error)
    target = TransformersTarget(model, layer)
    room = max_model_len_of(config.max_model_len, target.max_position_embeddings, default=512)
    accelerated = Accelerated(target, replace(config, max_model_len=room))
    earlier = _take_off(model)
    if earlier is not None and earlier.target.mtp_layer is not accelerated.target.mtp_layer:
        unpack_adjacent(earlier.target)  # an MTP layer that serves no more among them
        pack_adjacent(accelerated.target)
    own = type(model)
    # `generate` looks its loops up on the class. The name stays, as saving a model writes it down.
    model.__class__ = type(own.__name__, (AcceleratedGeneration, own), {"__module__": own.__module__})
    accelerated.own_class = own
    vars(model)["mla"] = accelerated
    return model


def restore(model: PreTrainedModel) -> None:
    """Give `model` its own `generate` back, and free the caches; a model that was not accelerated stays as it is.

    Weights that `accelerate` moved, two in one tensor, get memory of their own.
    """
    accelerated = _take_off(model)
    if accelerated is not None:
        unpack_adjacent(accelerated.target)


def _take_off(model: PreTrainedModel) -> Accelerated | None:
    """Give `model` its own class back, and return what it had beside."""
    if not isinstance(model, AcceleratedGeneration):
        return None
    accelerated: Accelerated = vars(model).pop("mla")
    model.__class__ = accelerated.own_class  # type: ignore[assignment]
    return accelerated
