"""A transformer layer: attention and an MLP or MoE, each normalised before and added after."""

from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.models.architecture import Architecture
from mla_compile.models.attention import MLAAttention
from mla_compile.models.layers import MLP, RMSNorm
from mla_compile.models.moe import MoE
from mla_compile.ops.collectives import all_reduce


class DecoderLayer(nn.Module):
    is_divided = False
    """Whether this process has a part of the heads and of the MLP or experts; others have the rest (see `divide`)."""

    def __init__(self, arch: Architecture, *, is_moe: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = MLAAttention(arch)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = MoE(arch) if is_moe else MLP(arch.hidden_size, arch.intermediate_size)

    def forward(self, hidden: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch) -> Tensor:
        """`hidden` `[tokens, hidden_size]` and the tokens' cos and sin to `[tokens, hidden_size]`."""
        hidden = hidden + self._total(self.self_attn(self.input_layernorm(hidden), rope, batch))
        normed = self.post_attention_layernorm(hidden)
        return hidden + self._total(
            self.mlp(normed, batch) if isinstance(self.mlp, MoE) else self.mlp(normed)
        )

    def _total(self, x: Tensor) -> Tensor:
        """The sum over all processes that have a part."""
        return all_reduce(x) if self.is_divided else x
