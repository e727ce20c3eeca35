"""The protocols of a model: `Target` for speculative decoding, `ServedModel` for an engine."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mla_compile.batch import ForwardOutput, MLABatch
from mla_compile.caches import CacheSpec


class Target(Protocol):
    """The members of a model that a step uses; token dimensions are packed, `[tokens]`."""

    def __call__(
        self, token_ids: Tensor, positions: Tensor, batch: MLABatch, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """Hidden states, and the outputs of the layers `aux_layers` for the drafter; appends to the trunk's caches."""

    @property
    def vocab_size(self) -> int:
        """The number of logits of a token."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden_size]` -> `[..., vocab_size]`."""

    def forward_mtp(
        self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch
    ) -> Tensor:
        """The MTP layer: hidden states after `shared_head.norm`; appends to its own cache."""

    def cache_specs(self) -> list[CacheSpec]:
        """The caches of its layers; those of the MTP layer have the owner "drafter"."""


class ServedModel(Target, Protocol):
    """A `Target` that an engine can serve.

    A model may have more attributes. `max_position_embeddings`: its maximum number of tokens, which bounds
    `max_model_len`. `num_aux_layers`: the number of layers whose outputs its forward can return; 0 by default.
    `selects_keys`: whether indexers select the keys that its attention reads, which rules out `batch_invariant` and a
    `decode_backend`. For EAGLE-3 heads: `hidden_size`, and for those without embeddings `embed`, a function from token
    ids `[tokens]` to `[tokens, hidden_size]`. For requests without their own: `default_sampling`, a dict of fields of
    `SamplingParams`, and `stop_ids`, a list of end-of-sequence ids. A model without an MTP layer needs no
    `forward_mtp`.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def has_mtp(self) -> bool:
        """Whether `forward_mtp` can be called."""

    @property
    def is_recurrent(self) -> bool:
        """Whether rows have state besides the caches. If so, each row owns a block of pages as long as its block table,
        its first page locates the state, and its prompt runs in one piece."""

    def prepare(self, num_pages: int) -> None:
        """Called before an engine allocates its caches: the model drops its other state of rows."""
