"""What speculative decoding asks of a model, and the engine of one that it serves."""

from typing import Protocol

import torch
from torch import Tensor

from mla_compile.batch import MLABatch
from mla_compile.caches import CacheSpec


class Target(Protocol):
    """What a step asks of a model; token dimensions are packed, `[tokens]`."""

    def __call__(self, token_ids: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        """Hidden states after the final norm, `[tokens, hidden_size]`; appends to the trunk's caches."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` -> `[..., vocab_size]`."""

    def forward_mtp(
        self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch
    ) -> Tensor:
        """The MTP layer: hidden states after `shared_head.norm`; appends to its own cache."""


class ServedModel(Target, Protocol):
    """A `Target` that an engine can serve: it owns the caches, which the engine allocates.

    A model may have one more attribute, `max_position_embeddings`: the tokens of its longest text. `max_model_len` is
    no more than that.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def has_mtp(self) -> bool:
        """Whether `forward_mtp` can be called."""

    @property
    def is_recurrent(self) -> bool:
        """Whether rows have state besides the caches. Each then owns a block of pages as long as its table, found by
        its first page, and its prompt is run in one piece."""

    def cache_specs(self) -> list[CacheSpec]:
        """What the caches of its layers hold of each token."""

    def allocate_cache(self, num_pages: int, page_size: int) -> None:
        """Give every layer of the specs a zeroed cache of its own, replacing the one it had."""

    def caches(self) -> list[Tensor | None]:
        """The layers' caches, in the order of `cache_specs`; None where there is none yet."""
