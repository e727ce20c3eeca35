"""MLA attention in expanded form, written in different ways, without an op of ours."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, NOPE, ROPE, RANK, V = 20, 3, 6, 4, 16, 5
BATCH, KEYS = 2, 40


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64).requires_grad_(False)


class ReferenceMLA(nn.Module):
    """DeepSeek's reference code with products instead of einsums: the mask is added."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = linear(HIDDEN, HEADS * (NOPE + ROPE)), linear(HEADS * V, HIDDEN)
        self.wkv_b = linear(RANK, HEADS * (NOPE + V))
        self.softmax_scale = (NOPE + ROPE) ** -0.5

    def forward(self, x: Tensor, kv: Tensor, k_pe: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.size()
        q = self.wq(x).view(bsz, seqlen, HEADS, NOPE + ROPE)
        q_nope, q_pe = torch.split(q, [NOPE, ROPE], dim=-1)
        q = torch.cat([q_nope, q_pe * 1.5], dim=-1)
        kv = self.wkv_b(kv).view(bsz, -1, HEADS, NOPE + V)
        k_nope, v = torch.split(kv, [NOPE, V], dim=-1)
        k = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, HEADS, -1)], dim=-1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) * self.softmax_scale
        if mask is not None:
            scores += mask.unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float64).type_as(x)
        return self.wo((scores @ v).transpose(1, 2).flatten(2))


class CompactMLA(nn.Module):
    """With `scaled_dot_product_attention`, and a joint projection that `chunk` halves."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = linear(HIDDEN, HEADS * (NOPE + ROPE))
        self.kv_up = linear(RANK, HEADS * 2 * NOPE, bias)

    def keys_and_values(self, kv_c: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, heads, keys, NOPE]` each."""
        k_nope, v = self.kv_up(kv_c).chunk(2, dim=-1)
        return tuple(x.unflatten(-1, (HEADS, NOPE)).permute(0, 2, 1, 3) for x in (k_nope, v))

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor, mask: Tensor | None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (HEADS, NOPE + ROPE)).transpose(1, 2)
        k_nope, v = self.keys_and_values(kv_c)
        k = torch.cat((k_pe[:, None].repeat(1, HEADS, 1, 1), k_nope), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None])
        return out.transpose(1, 2).reshape(*x.shape[:2], HEADS * NOPE)


class TwoWeightsMLA(nn.Module):
    """Separate weights for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w_q", torch.randn(HIDDEN, HEADS, NOPE + ROPE, dtype=torch.float64) / 4)
        self.register_buffer("w_uk", torch.randn(RANK, HEADS * NOPE, dtype=torch.float64) / 4)
        self.register_buffer("w_uv", torch.randn(RANK, HEADS * V, dtype=torch.float64) / 4)

    def forward(self, x: Tensor, kv_c: Tensor, k_pe: Tensor, mask: Tensor | None) -> Tensor:
        q = torch.einsum("bqe,ehd->bhqd", x, self.w_q)
        k_nope = (kv_c @ self.w_uk).view(len(x), -1, HEADS, NOPE).transpose(1, 2)
        k = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1)], -1)
        scores = torch.matmul(q, k.mT) / 4
        scores = 30 * torch.tanh(scores / 30)  # a soft cap is no obstacle: it lies between the products
        if mask is not None:
            scores = (
                scores.masked_fill(mask[:, None] < -1, -torch.inf)
                if mask.is_floating_point()
                else (scores.masked_fill(~mask[:, None], -torch.inf))
            )
        v = (kv_c @ self.w_uv).view(len(x), -1, HEADS, V).transpose(1, 2)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class StaticCacheMLA(nn.Module):
    """Latents and rotary keys in one buffer, a page a row; `visible` makes the mask from positions `[batch, q_len]`."""

    def __init__(self, visible: Callable[[Tensor], Tensor], rows: int = BATCH) -> None:
        super().__init__()
        self.q_proj, self.kv_proj = linear(HIDDEN, HEADS * (NOPE + ROPE)), linear(HIDDEN, RANK + ROPE)
        self.kv_b_proj = linear(RANK, HEADS * (NOPE + V))
        self.visible = visible
        self.register_buffer("kv_cache", torch.randn(rows, KEYS, RANK + ROPE, dtype=torch.float64))

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        batch, q_len, _ = x.shape
        positions = start[:, None] + torch.arange(q_len)
        self.kv_cache[torch.arange(batch)[:, None], positions % KEYS] = self.kv_proj(x)
        latents, k_pe = self.kv_cache[:batch].split([RANK, ROPE], dim=-1)
        q = self.q_proj(x).view(batch, q_len, HEADS, NOPE + ROPE).transpose(1, 2)
        kv = self.kv_b_proj(latents).view(batch, KEYS, HEADS, NOPE + V).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_pe[:, None].expand(-1, HEADS, -1, -1)], -1)
        mask = self.visible(positions)
        out = F.scaled_dot_product_attention(q, k, kv[..., NOPE:], attn_mask=mask)
        return out.transpose(1, 2).flatten(2)
