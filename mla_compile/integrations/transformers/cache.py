"""Paged latents behind the cache protocol of transformers' MLA models.

Their attention passes a layer's new latents to `past_key_values.update(kv_c, k_pe, layer_idx)`, expands the result into
keys and values, and calls the attention function named in the config. The function here needs the latents, so `update`
keeps them (`LatentLayer.take`) and returns them unchanged: the expansion of the new tokens is then unused, and the
compiler removes it.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from mla_compile.batch import MLABatch
from mla_compile.caches import CacheSpec, Owner
from mla_compile.errors import MLAError


def attention_layers(model: nn.Module) -> list[Any]:
    """The MLA attention modules of a transformers model, in order: those with `expand_kv`."""
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


class LatentLayer(CacheLayerMixin):
    """The paged latents of one attention module, and the new ones between `update` and attention."""

    def __init__(self, owner: "PagedLatentCache", attention: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.attention = attention
        self.kv_cache: Tensor | None = None
        self._incoming: tuple[Tensor, Tensor] | None = None

    def spec(self, name: str, owner: Owner, lookahead: int = 0) -> CacheSpec:
        """Latents in the dtype of the up-projection's weight."""
        weight, rank = self.attention.kv_b_proj.weight, self.attention.kv_lora_rank
        width = rank + self.attention.qk_rope_head_dim
        at = weight.dtype, weight.device
        return CacheSpec(name, owner, width, *at, self, lookahead, kv_lora_rank=rank)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep kv_c `[batch, 1, tokens, kv_lora_rank]` and k_pe `[.., qk_rope_head_dim]`; returns both."""
        self._incoming = key_states, value_states
        return key_states, value_states

    def take(self) -> tuple[Tensor, Tensor]:
        """Return what `update` kept, and drop it: a tensor left here would become an output of the graph."""
        if self._incoming is None:
            hint = "call it outside of generate's processors, criteria and streamers"
            raise MLAError("past_key_values", "the cache of the model's own generate", "another", hint)
        incoming, self._incoming = self._incoming, None
        return incoming

    # transformers calls these for masks and positions only, which come with the batch.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class IndexerKeys:
    """The paged keys of one indexer."""

    def __init__(self, owner: "PagedLatentCache", indexer: Any) -> None:
        self.owner = owner
        self.indexer = indexer
        self.kv_cache: Tensor | None = None

    def spec(self, name: str, owner: Owner, lookahead: int = 0) -> CacheSpec:
        """Keys in the dtype of the norm's weight."""
        weight, width = self.indexer.k_norm.weight, self.indexer.head_dim
        return CacheSpec(f"{name}.indexer", owner, width, weight.dtype, weight.device, self, lookahead)


class PagedLatentCache(Cache):
    """The cache of one model (the trunk, or its MTP layer). `batch` maps the tokens of a forward to rows.

    `indexers` has the keys of the layers with an indexer. Layers without MLA (Kimi-Linear's) use transformers' own
    layers for recurrent states, `linear`.
    """

    def __init__(self, model: nn.Module) -> None:
        by_index = {module.layer_idx: module for module in attention_layers(model)}
        count = max(getattr(module, "layer_idx", -1) for module in model.modules()) + 1
        self.latent = {index: LatentLayer(self, module) for index, module in by_index.items()}
        self.linear = {index: LinearAttentionLayer() for index in range(count) if index not in by_index}
        layers: dict[int, Any] = self.latent | self.linear
        super().__init__(layers=[layers[index] for index in range(count)])
        self.indexers = {
            index: IndexerKeys(self, module.indexer)
            for index, module in by_index.items()
            if getattr(module, "indexer", None) is not None
        }
        self.batch: MLABatch | None = None

    def specs(self, name: str, owner: Owner, lookahead: int = 0) -> list[CacheSpec]:
        """Of all layers; `{}` in `name` stands for a layer's number."""
        layers = [(i, layer) for i, latent in self.latent.items() for layer in (latent, self.indexers.get(i))]
        return [layer.spec(name.format(i), owner, lookahead) for i, layer in layers if layer is not None]
