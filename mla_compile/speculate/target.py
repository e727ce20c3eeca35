"""What speculative decoding asks of a model, and the engine of one that it serves."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mla_compile.batch import ForwardOutput, MLABatch
from mla_compile.caches import CacheSpec


class Target(Protocol):
    """What a step asks of a model; token dimensions are packed, `[tokens]`."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, batch: MLABatch, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """Hidden states, of `aux_layers` too, which the drafter asks for by index; appends to the trunk's caches."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` -> `[..., vocab_size]`."""

    def forward_mtp(
        self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch
    ) -> Tensor:
        """The MTP layer: hidden states after `shared_head.norm`; appends to its own cache."""

    def cache_specs(self) -> list[CacheSpec]:
        """What the caches of its layers hold of each token; those of the MTP layer have the owner "drafter"."""


class ServedModel(Target, Protocol):
    """A `Target` that an engine can serve.

    A model may have two more attributes. `max_position_embeddings`: the tokens of its longest text, which bound
    `max_model_len`. `num_aux_layers`: how many layers' outputs its forward can give; none by default.
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

    def prepare(self, num_pages: int) -> None:
        """An engine is about to allocate its caches: the model forgets what else it keeps of rows."""
