"""The indexer of sparse MLA (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): it selects the keys that a token reads.

Production code rotates its queries and keys by a Hadamard matrix and rounds them to FP8. The rotation changes no
product; here they stay in the weights' dtype.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.caches import CacheSpec, Owner
from mla_compile.models.architecture import Architecture
from mla_compile.ops import mla_select_keys
from mla_compile.ops.attention.norm_rope import rotate_first
from mla_compile.ops.dtypes import accumulate_dtype


class Indexer(nn.Module):
    """The indexer of one attention layer, and the cache of its keys.

    It is whole in every process that shares a model: all must select the same keys.
    """

    kv_cache: Tensor | None

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        assert arch.indexer is not None
        assert arch.q_lora_rank is not None  # transformers' configs of these families require it
        self.settings = arch.indexer
        self.rope_dim = arch.qk_rope_head_dim
        heads, width = self.settings.num_heads, self.settings.head_dim
        self.wq_b = nn.Linear(arch.q_lora_rank, heads * width, bias=False)
        self.wk = nn.Linear(arch.hidden_size, width, bias=False)
        self.k_norm = nn.LayerNorm(width, eps=1e-6)
        self.weights_proj = nn.Linear(arch.hidden_size, heads, bias=False)
        self.register_buffer("kv_cache", None, persistent=False)

    def cache_specs(self, name: str, owner: Owner, lookahead: int = 0) -> list[CacheSpec]:
        """Keys in the dtype of the norm's weight."""
        weight = self.k_norm.weight
        width = self.settings.head_dim
        return [CacheSpec(f"{name}.indexer", owner, width, weight.dtype, weight.device, self, lookahead)]

    def forward(self, x: Tensor, q_latent: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch) -> Tensor:
        """The slots of the selected keys, int32 `[tokens, topk]`; appends the new keys to the cache.

        x: the attention's input, `[tokens, hidden_size]`. q_latent: its normalised query latents `[tokens,
        q_lora_rank]`. rope: the tokens' cos and sin.
        """
        assert self.kv_cache is not None  # attention's own is checked
        heads, width = self.settings.num_heads, self.settings.head_dim
        cos, sin = rope
        rotary, interleave = self.rope_dim, self.settings.interleave
        q = self.wq_b(q_latent).view(-1, heads, width)
        q = rotate_first(q, rotary, cos.unsqueeze(1), sin.unsqueeze(1), interleave)
        k = rotate_first(self.k_norm(self.wk(x)), rotary, cos, sin, interleave)
        dtype = accumulate_dtype(x.dtype)
        weights = F.linear(x.to(dtype), self.weights_proj.weight.to(dtype)) * (heads * width) ** -0.5
        return mla_select_keys(q, k, weights, self.kv_cache, batch, topk=self.settings.topk)
