"""The multi-token prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

import torch
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.models.architecture import Architecture
from mla_compile.models.decoder import DecoderLayer
from mla_compile.models.layers import RMSNorm


class MTPLayer(nn.Module):
    """Predicts the token after the next one; embedding and head are the trunk's."""

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
        out: Tensor = self.norm(self.layer(x, rope, batch))
        return out
