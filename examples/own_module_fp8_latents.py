"""FP8 latents in your own module: the dtype and the width of the cache's buffer say it.

    python examples/own_module_fp8_latents.py

A cache with dtype uint8 and `fp8_width(rank, rope)` bytes a token holds FP8 latents; the call of `mla_attention` stays
the same. The program runs a prompt and ten decode steps through a layer with each kind of cache, compiled, and compares
bytes and results.
"""

import copy

import torch
from torch import Tensor, nn

from mla_compile import MLABatch, mla_attention, pack_batch
from mla_compile.latents import FP8, fp8_width

HIDDEN, HEADS, NOPE, ROPE, RANK, V = 64, 4, 16, 8, 256, 16
PAGE_SIZE, PAGES = 4, 8


class Attention(nn.Module):
    """A layer with latents of RANK columns, a multiple of 128."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_proj = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(RANK)
        self.w_uk = nn.Parameter(torch.randn(HEADS, NOPE, RANK) * RANK**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, RANK, V) * RANK**-0.5)
        self.o_proj = nn.Linear(HEADS * V, HIDDEN, bias=False)
        self.register_buffer("kv_cache", torch.zeros(1 + PAGES, PAGE_SIZE, RANK + ROPE))

    def store_in_fp8(self) -> None:
        """Replace the cache: FP8 values with a scale for every 128 of them, and a rotary key in bfloat16."""
        self.kv_cache = torch.zeros(1 + PAGES, PAGE_SIZE, fp8_width(RANK, ROPE), dtype=FP8)

    def forward(self, x: Tensor, batch: MLABatch) -> Tensor:
        # A real model rotates q_pe and k_pe by the tokens' positions.
        q_nope, q_pe = self.q_proj(x).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = self.kv_proj(x).split([RANK, ROPE], dim=-1)
        weights = self.w_uk, self.w_uv
        scale = (NOPE + ROPE) ** -0.5
        out = mla_attention(q_nope, q_pe, self.kv_norm(kv_c), k_pe, self.kv_cache, *weights, batch, scale)
        return self.o_proj(out.flatten(1))


def main() -> None:
    torch.manual_seed(0)
    plain = Attention().requires_grad_(False)
    fp8 = copy.deepcopy(plain)
    fp8.store_in_fp8()
    layers = [torch.compile(layer, backend="mla", fullgraph=True) for layer in (plain, fp8)]
    table = 1 + torch.arange(PAGES, dtype=torch.int32)[None]
    num_cached = 0
    for tokens in (9, *[1] * 10):
        x = torch.randn(tokens, HIDDEN)
        packed = pack_batch([tokens], [num_cached], table, x, has_sampled=[tokens == 1], page_size=PAGE_SIZE)
        expected, got = (layer(*packed.tensors, packed.batch)[packed.order] for layer in layers)
        num_cached += tokens
        error = float((got - expected).norm() / expected.norm())
        print(f"{num_cached:3} tokens in the cache: results differ by {error:.1%}")
        assert error < 0.05
    sizes = [layer.kv_cache[0, 0].nbytes for layer in (plain, fp8)]
    print(f"bytes of a cached token: {sizes[0]} in float32, {sizes[1]} with FP8 latents")


if __name__ == "__main__":
    main()
