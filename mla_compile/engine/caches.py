"""The caches of one engine: those of its target and its drafter, allocated before any step is built."""

import torch

from mla_compile.caches import allocate
from mla_compile.engine.config import FittedConfig
from mla_compile.speculate import Drafter, ServedModel
from mla_compile.speculate.drafter import cache_specs


class EngineCaches:
    """Allocates the caches of a model and its drafter, which replace those of an earlier engine.

    specs: one for each cache.
    lookahead: number of tokens after a page that the page's contents depend on.
    """

    def __init__(self, model: ServedModel, drafter: Drafter | None, config: FittedConfig) -> None:
        self._model, self._drafter = model, drafter
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            model.prepare(config.num_pages)
            # After `prepare`, which may change a dtype or device.
            self.specs = config.stored(cache_specs(model, drafter))
            allocate(self.specs, config.num_pages, config.page_size)
        self.lookahead = max((spec.lookahead for spec in self.specs), default=0)
        self._allocated = [(spec.layer, spec.cache) for spec in self.specs]

    def are_in_place(self) -> bool:
        """Whether the layers still hold these caches."""
        return all(layer.kv_cache is cache for layer, cache in self._allocated)

    def are_of_all_layers(self) -> bool:
        """Whether the model still has the same layers."""
        layers = [spec.layer for spec in cache_specs(self._model, self._drafter)]
        return layers == [layer for layer, _ in self._allocated]
