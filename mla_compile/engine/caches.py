"""The caches of one engine: those of its target and its drafter, allocated before any step is built."""

from typing import Any

import torch
from torch import Tensor

from mla_compile.caches import allocate
from mla_compile.engine.config import FittedConfig
from mla_compile.speculate import Drafter, ServedModel
from mla_compile.speculate.drafter import cache_specs


class EngineCaches:
    """specs: what the caches of a model and its drafter hold.

    lookahead: tokens after a page on which what they hold in it depends.
    """

    def __init__(self, model: ServedModel, drafter: Drafter | None) -> None:
        self._model, self._drafter = model, drafter
        self.specs = cache_specs(model, drafter)
        self.lookahead = max((spec.lookahead for spec in self.specs), default=0)
        self._allocated: list[tuple[Any, Tensor]] = []

    def allocate(self, config: FittedConfig) -> None:
        """Allocate them, in the place of those of an earlier engine."""
        with torch.inference_mode(False):  # an inference tensor could not be changed outside that mode
            self._model.prepare(config.num_pages)
            self.specs = cache_specs(self._model, self._drafter)  # what it moved has another dtype or device
            allocate(self.specs, config.num_pages, config.page_size)
        self._allocated = [(spec.layer, spec.cache) for spec in self.specs]

    def are_in_place(self) -> bool:
        """Whether the layers have these caches."""
        return all(layer.kv_cache is cache for layer, cache in self._allocated)

    def are_of_all_layers(self) -> bool:
        """Whether the model has the layers that it had."""
        layers = [spec.layer for spec in cache_specs(self._model, self._drafter)]
        return layers == [layer for layer, _ in self._allocated]
