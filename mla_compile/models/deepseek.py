"""The DeepSeek architecture over packed tokens, for checkpoints of all `MODEL_TYPES`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.batch import ForwardOutput, MLABatch
from mla_compile.caches import CacheSpec
from mla_compile.errors import MLAError
from mla_compile.models.architecture import Architecture
from mla_compile.models.decoder import DecoderLayer, MTPLayer
from mla_compile.models.layers import RMSNorm, random_embedding
from mla_compile.models.parallel import Parallel, gathered
from mla_compile.models.rotary import RotaryEmbedding
from mla_compile.ops.collectives.collectives import all_reduce

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class MLAForCausalLM(nn.Module):
    """A language model with multi-head latent attention and, with `mtp`, one multi-token prediction layer.

    Inference only: no parameter requires a gradient. Call `caches.allocate(model.cache_specs(), ...)` before the first
    forward.
    """

    def __init__(self, config: "PreTrainedConfig", *, mtp: bool) -> None:
        """Raises `MLAError` for a config that `Architecture.from_config` rejects."""
        super().__init__()
        self.config = config
        self.arch = arch = Architecture.from_config(config)
        self.embed_tokens = random_embedding(arch.vocab_size, arch.hidden_size)
        shared = (False,) * arch.num_layers if arch.indexer is None else arch.indexer.is_shared
        self.layers = nn.ModuleList(
            DecoderLayer(arch, is_moe=is_moe, shares_selection=is_shared)
            for is_moe, is_shared in zip(arch.is_moe, shared, strict=True)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.rotary = RotaryEmbedding(arch.rope)
        self.lm_head = (
            None if arch.tie_word_embeddings else nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        )
        self.mtp = MTPLayer(arch) if mtp else None
        self.parallel: Parallel | None = None
        """This process's part of a shared model; None if it has the whole model."""
        self.default_sampling: dict[str, Any] = {}
        self.stop_ids: list[int] = []
        """See `ServedModel`; `load_model` sets both."""
        self.requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        return self.arch.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.arch.hidden_size

    @property
    def max_position_embeddings(self) -> int:
        """The maximum number of positions."""
        positions: int = self.config.max_position_embeddings
        return positions

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def num_aux_layers(self) -> int:
        """The number of trunk layers, whose outputs `forward` can return as `aux_layers`."""
        return len(self.layers)

    @property
    def is_recurrent(self) -> bool:
        return False

    @property
    def selects_keys(self) -> bool:
        """Whether indexers select the keys that attention reads."""
        return self.arch.indexer is not None

    @property
    def has_mtp(self) -> bool:
        return self.mtp is not None

    def cache_specs(self) -> list[CacheSpec]:
        """The caches of each layer, the MTP layer's last: latents in the weights' dtype, and an indexer's keys."""
        specs = []
        for i, layer in enumerate(self.layers):
            attention = cast("DecoderLayer", layer).self_attn
            specs += attention.cache_specs(f"layers.{i}.self_attn", "target")
        if self.mtp is not None:
            specs += self.mtp.layer.self_attn.cache_specs("mtp.layer.self_attn", "drafter", lookahead=1)
        return specs

    def prepare(self, num_pages: int) -> None:
        """Does nothing: the model keeps no state of rows besides the caches."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: MLABatch, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """Run the trunk and append every layer's latents to its cache.

        Args:
            token_ids: int64 `[tokens]`, decode rows first, then prefill tokens.
            positions: int64 `[tokens]`, each token's place in its sequence.
            batch: the tokens' rows and slots.
            aux_layers: indices of layers whose outputs are returned too.
        """
        rope = self.rotary(positions)
        hidden = self.embed(token_ids)
        outputs: dict[int, Tensor] = {}
        selected: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, rope, batch, selected)
            if i in aux_layers:  # the others would stay in memory
                outputs[i] = hidden
        return ForwardOutput(self.norm(hidden), tuple(outputs[i] for i in aux_layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states `[..., hidden_size]`, of the trunk or the MTP layer, to logits `[..., vocab_size]`."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return gathered(F.linear(hidden, head.weight), self.parallel)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids `[tokens]`, int64, to their embeddings `[tokens, hidden_size]`."""
        if self.parallel is None:
            out: Tensor = self.embed_tokens(token_ids)
            return out
        num_ids = self.embed_tokens.weight.shape[0]
        ids = token_ids - self.parallel.rank * num_ids
        own = (ids >= 0) & (ids < num_ids)
        return all_reduce(torch.where(own[:, None], self.embed_tokens(torch.where(own, ids, 0)), 0))

    def forward_mtp(
        self, next_token_ids: Tensor, hidden: Tensor, positions: Tensor, batch: MLABatch
    ) -> Tensor:
        """Run the MTP layer and append its latents to its cache.

        Args:
            next_token_ids: int64 `[tokens]`: at position i the token of position i + 1.
            hidden: `[tokens, hidden_size]`: the result of `forward` for these positions or, in a chained draft, the
                result of this method for the position before.
            positions: int64 `[tokens]`, the positions i.
            batch: the tokens' rows and slots.

        Returns:
            Hidden states, `[tokens, hidden_size]`: their logits at position i are those of token i + 2.

        Raises:
            MLAError: the model has no MTP layer.
        """
        if self.mtp is None:
            hint = "load a checkpoint that has one"
            raise MLAError("mtp", "a model with an MTP layer", "one without it", hint)
        out: Tensor = self.mtp(self.embed(next_token_ids), hidden, self.rotary(positions), batch)
        return out
