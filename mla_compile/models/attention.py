"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over the paged latent cache."""

from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.caches import CacheSpec, Owner
from mla_compile.errors import MLAError
from mla_compile.models.architecture import Architecture
from mla_compile.models.indexer import Indexer
from mla_compile.models.layers import RMSNorm
from mla_compile.ops import mla_attention
from mla_compile.ops.attention.mla_attention import up_projections
from mla_compile.ops.attention.norm_rope import rotate


class MLAAttention(nn.Module):
    """One attention layer and its cache."""

    kv_cache: Tensor | None

    def __init__(
        self, arch: Architecture, *, input_size: int | None = None, shares_selection: bool = False
    ) -> None:
        """input_size: the width of its input; None: `hidden_size`, which its output always has.

        shares_selection: whether it has no indexer, in a model whose other layers have one.
        """
        super().__init__()
        self.arch = arch
        self.num_heads = heads = arch.num_heads
        size = input_size or arch.hidden_size
        qk_width = heads * (arch.qk_nope_head_dim + arch.qk_rope_head_dim)
        if arch.q_lora_rank is None:
            self.q_proj = nn.Linear(size, qk_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, arch.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(arch.q_lora_rank)
            self.q_b_proj = nn.Linear(arch.q_lora_rank, qk_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(size, arch.latent_width, bias=False)
        self.kv_a_layernorm = RMSNorm(arch.kv_lora_rank)
        kv_width = heads * (arch.qk_nope_head_dim + arch.v_head_dim)
        self.kv_b_proj = nn.Linear(arch.kv_lora_rank, kv_width, bias=False)
        self.o_proj = nn.Linear(heads * arch.v_head_dim, arch.hidden_size, bias=False)
        self.indexer = None if arch.indexer is None or shares_selection else Indexer(arch)
        self.register_buffer("kv_cache", None, persistent=False)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """`w_uk` and `w_uv`, the two halves of `kv_b_proj`."""
        return up_projections(self.kv_b_proj.weight, self.num_heads, self.arch.qk_nope_head_dim)

    def cache_specs(self, name: str, owner: Owner, lookahead: int = 0) -> list[CacheSpec]:
        """The layer's cache, latents in the weights' dtype, and that of its indexer."""
        weight, width, rank = self.kv_b_proj.weight, self.arch.latent_width, self.arch.kv_lora_rank
        spec = CacheSpec(name, owner, width, weight.dtype, weight.device, self, lookahead, kv_lora_rank=rank)
        return [spec, *(() if self.indexer is None else self.indexer.cache_specs(name, owner, lookahead))]

    def fill(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch) -> None:
        """As `forward`, for the cache alone. A compiled graph leaves out the attention, whose result is not used."""
        self(x, rope, batch)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: MLABatch,
        selected: list[Tensor] | None = None,
    ) -> Tensor:
        """`x` `[tokens, input_size]` and the tokens' cos and sin to `[tokens, hidden_size]`; appends to the cache.

        selected: in a model with indexers, the list with the latest selection of keys: the result of this layer's
            indexer replaces it, and a layer without an indexer uses it.
        """
        arch = self.arch
        if self.kv_cache is None:
            hint = "call mla_compile.caches.allocate(model.cache_specs(), ...) first"
            raise MLAError("kv_cache", "an allocated cache", "none", hint)
        if arch.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q_latent = self.q_a_layernorm(self.q_a_proj(x))
            q = self.q_b_proj(q_latent)
            if self.indexer is not None and selected is not None:
                selected[:] = [self.indexer(x, q_latent, rope, batch)]
        q = q.view(-1, self.num_heads, arch.qk_nope_head_dim + arch.qk_rope_head_dim)
        q_nope, q_pe = q.split([arch.qk_nope_head_dim, arch.qk_rope_head_dim], dim=-1)
        kv_c, k_pe = self.kv_a_proj_with_mqa(x).split([arch.kv_lora_rank, arch.qk_rope_head_dim], dim=-1)
        kv_c = self.kv_a_layernorm(kv_c)

        cos, sin = rope
        q_pe = rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), arch.rope.interleave)
        k_pe = rotate(k_pe, cos, sin, arch.rope.interleave)

        w_uk, w_uv = self.up_projections()
        out = mla_attention(
            *(q_nope, q_pe, kv_c, k_pe, self.kv_cache, w_uk, w_uv, batch),
            softmax_scale=arch.softmax_scale,
            selected=selected[0] if selected else None,
        )
        projected: Tensor = self.o_proj(out.flatten(1))
        return projected
