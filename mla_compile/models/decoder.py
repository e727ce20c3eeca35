"""The transformer layer of the trunk, and the multi-token prediction layer, which wraps one."""

import torch
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.models.architecture import Architecture
from mla_compile.models.attention import MLAAttention
from mla_compile.models.layers import MLP, RMSNorm
from mla_compile.models.moe import MoE
from mla_compile.ops.collectives.collectives import all_reduce


class DecoderLayer(nn.Module):
    """Attention and an MLP or MoE, each with a norm before it and a residual connection."""

    is_divided = False
    """Whether this process has only a part of the heads and of the MLP or experts (see `divide`)."""

    def __init__(self, arch: Architecture, *, is_moe: bool, shares_selection: bool = False) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = MLAAttention(arch, shares_selection=shares_selection)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = MoE(arch) if is_moe else MLP(arch.hidden_size, arch.intermediate_size)

    def forward(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch, selected: list[Tensor]
    ) -> Tensor:
        """`hidden` `[tokens, hidden_size]` and the tokens' cos and sin to `[tokens, hidden_size]`.

        selected: see `MLAAttention.forward`.
        """
        hidden = hidden + self._total(self.self_attn(self.input_layernorm(hidden), rope, batch, selected))
        normed = self.post_attention_layernorm(hidden)
        return hidden + self._total(
            self.mlp(normed, batch) if isinstance(self.mlp, MoE) else self.mlp(normed)
        )

    def _total(self, x: Tensor) -> Tensor:
        """The sum over all processes with a part of the layer."""
        return all_reduce(x) if self.is_divided else x


class MTPLayer(nn.Module):
    """Predicts the token after the next one (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Embedding and head are the trunk's.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.enorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.hnorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * arch.hidden_size, arch.hidden_size, bias=False)
        self.layer = DecoderLayer(arch, is_moe=True)
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch
    ) -> Tensor:
        """Combine, at each position i, the embedding of token i + 1 and the hidden state of position i.

        Args:
            embedded: `[tokens, hidden_size]`.
            hidden: `[tokens, hidden_size]`: the trunk's, after its final norm, or this layer's own output.
            rope: cos and sin of the positions i.
            batch: the tokens' rows and slots.

        Returns:
            `[tokens, hidden_size]` after the norm, ready for the head: its logits at i are those of token i + 2.
        """
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        out: Tensor = self.norm(self.layer(x, rope, batch, []))
        return out
