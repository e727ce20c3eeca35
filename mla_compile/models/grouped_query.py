"""Grouped-query attention (arXiv 2305.13245) over the paged cache, by the ops of MLA; an EAGLE-3 head may have it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.caches import CacheSpec, Owner
from mla_compile.models.layers import RMSNorm
from mla_compile.ops.attention.append import append_op
from mla_compile.ops.attention.decode import mla_decode
from mla_compile.ops.attention.norm_rope import rotate


@dataclass(frozen=True)
class GroupedQueries:
    """Shapes of grouped-query attention.

    norm_eps: of the norms of queries and keys by head, which Qwen3's layers have; None without such norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float | None = None


class GroupedQueryAttention(nn.Module):
    """One attention layer, and its cache of keys and values.

    For the ops of MLA each KV head is a row: its latents are values, its rotary keys are keys. Queries of the latents
    are zero, so the scores are those of queries and keys. That reads the bytes that a dedicated kernel would read, and
    adds multiplications by zero, half as many as attention's own.
    """

    kv_cache: Tensor | None

    def __init__(self, shapes: GroupedQueries, *, input_size: int, output_size: int) -> None:
        super().__init__()
        self.shapes = shapes
        queries, keys = (n * shapes.head_dim for n in (shapes.num_heads, shapes.num_kv_heads))
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, output_size, bias=False)
        eps = shapes.norm_eps
        self.q_norm = None if eps is None else RMSNorm(shapes.head_dim, eps)
        self.k_norm = None if eps is None else RMSNorm(shapes.head_dim, eps)
        self.register_buffer("kv_cache", None, persistent=False)

    def cache_specs(self, name: str, owner: Owner, lookahead: int = 0) -> list[CacheSpec]:
        """The layer's cache: a value and a key for each token and KV head."""
        weight, heads = self.k_proj.weight, self.shapes.num_kv_heads
        width = 2 * self.shapes.head_dim
        return [CacheSpec(name, owner, width, weight.dtype, weight.device, self, lookahead, heads)]

    def fill(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch) -> None:
        """Write the keys and values of prompt chunks, `x` `[tokens, input_size]`; nothing attends."""
        assert batch.prefill is not None
        self._append(x, rope, batch.prefill.slot_mapping, batch.page_size)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], batch: MLABatch) -> Tensor:
        """`x` `[tokens, input_size]` of decode rows to `[tokens, output_size]`; writes their keys and values."""
        decode, shapes = batch.decode, self.shapes
        assert decode is not None and batch.prefill is None and self.kv_cache is not None
        self._append(x, rope, decode.slot_mapping, batch.page_size)
        groups, q_len = shapes.num_kv_heads, decode.q_len
        rows, of_group = decode.seq_lens.shape[0], (q_len, shapes.num_heads // groups, shapes.head_dim)
        q = self._rotated(self.q_proj(x), self.q_norm, rope)
        q = q.view(rows, q_len, groups, *of_group[1:]).transpose(1, 2).reshape(-1, *of_group[1:])
        group = torch.arange(groups, dtype=torch.int32, device=x.device)
        table = decode.block_table[:, None] * groups + group[:, None]

        def by_group(lens: Tensor) -> Tensor:
            return lens[:, None].expand(-1, groups).flatten()

        # A decode backend that the batch names serves the target's latents, perhaps not this width.
        out, _ = mla_decode(
            torch.zeros_like(q),
            q,
            self.kv_cache,
            table.flatten(0, 1),
            by_group(decode.seq_lens),
            q_lens=None if decode.q_lens is None else by_group(decode.q_lens),
            q_len=q_len,
            softmax_scale=shapes.head_dim**-0.5,
        )
        out = out.view(rows, groups, *of_group).transpose(1, 2).reshape(x.shape[0], -1)
        projected: Tensor = self.o_proj(out)
        return projected

    def _append(self, x: Tensor, rope: tuple[Tensor, Tensor], slots: Tensor, page_size: int) -> None:
        """Write the keys and values of `x` `[tokens, input_size]` to `slots` `[tokens]` of the batch's pages."""
        groups = self.shapes.num_kv_heads
        k, v = self._rotated(self.k_proj(x), self.k_norm, rope), self.v_proj(x)
        group = torch.arange(groups, device=x.device)
        page, offset = slots // page_size, slots % page_size
        of_heads = (page[:, None] * groups + group) * page_size + offset[:, None]
        of_heads = torch.where(slots[:, None] >= 0, of_heads, -1)
        append_op(v.view(-1, self.shapes.head_dim), k.flatten(0, 1), self.kv_cache, of_heads.flatten())

    def _rotated(self, x: Tensor, norm: RMSNorm | None, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Projected queries or keys `[tokens, heads * head_dim]` to `[tokens, heads, head_dim]`."""
        x = x.view(x.shape[0], -1, self.shapes.head_dim)
        cos, sin = rope
        return rotate(x if norm is None else norm(x), cos.unsqueeze(1), sin.unsqueeze(1), False)
