"""Your own model: call `mla_attention` once per layer, keep a cache in a buffer, compile with backend="mla".

    python examples/own_module.py

The model knows nothing of decode and prefill: it projects all tokens of a batch alike, and the compiler splits the
attention into the segments that the batch has. Compiled and eager results are compared for a decode batch (as in
speculative decoding, several tokens a row), a prompt, and both at once.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_compile import MLABatch, decode_segment, mla_attention, prefill_segment

HIDDEN, HEADS, NOPE, ROPE, RANK, V = 64, 4, 16, 8, 32, 16
PAGE_SIZE, PAGES_PER_ROW, ROWS = 4, 8, 4


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of `[tokens, ..., ROPE]`."""
    frequencies = 10000.0 ** -(torch.arange(0, ROPE, 2) / ROPE)
    angles = (positions[:, None] * frequencies).view(-1, *[1] * (x.dim() - 2), ROPE // 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Block(nn.Module):
    """A transformer layer with multi-head latent attention, written from scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_proj = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(RANK)
        # From the latent to keys and values per head. The op takes both, and expands or absorbs as it sees fit.
        self.w_uk = nn.Parameter(torch.randn(HEADS, NOPE, RANK) * RANK**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, RANK, V) * RANK**-0.5)
        self.o_proj = nn.Linear(HEADS * V, HIDDEN, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        # One cache tensor per layer, a buffer: its address is fixed, which CUDA graphs need. Page 0 belongs to nobody.
        self.register_buffer("kv_cache", torch.zeros(1 + ROWS * PAGES_PER_ROW, PAGE_SIZE, RANK + ROPE))

    def forward(self, x: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        y = self.norm_1(x)
        q_nope, q_pe = self.q_proj(y).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = self.kv_proj(y).split([RANK, ROPE], dim=-1)
        out = mla_attention(
            q_nope,
            rotate(q_pe, positions),
            self.kv_norm(kv_c),
            rotate(k_pe, positions),
            self.kv_cache,
            self.w_uk,
            self.w_uv,
            batch,
            softmax_scale=(NOPE + ROPE) ** -0.5,
        )
        x = x + self.o_proj(out.flatten(1))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, batch)
        return x


def batches(tables: Tensor) -> dict[str, tuple[MLABatch, Tensor]]:
    """Three steps of a small service: two prompts, two rows that decode 3 tokens each, and a mixed batch."""

    def prompts(lens: list[int], rows: slice) -> tuple:
        return prefill_segment(lens, [0] * len(lens), tables[rows].clone(), page_size=PAGE_SIZE)

    def decode(num_cached: list[int], rows: slice) -> tuple:
        cached = torch.tensor(num_cached, dtype=torch.int32)
        return decode_segment(cached, tables[rows].clone(), q_len=3, page_size=PAGE_SIZE)

    first, first_positions = prompts([5, 9], slice(0, 2))
    second, second_positions = decode([5, 9], slice(0, 2))
    third, third_positions = decode([8, 12], slice(0, 2))
    arriving, arriving_positions = prompts([7, 2], slice(2, 4))
    return {
        "prefill": (MLABatch(prefill=first), first_positions),
        "decode": (MLABatch(decode=second), second_positions),
        # Tokens are packed decode rows first, then prompts.
        "mixed": (MLABatch(third, arriving), torch.cat([third_positions, arriving_positions])),
    }


def main(num_layers: int = 2) -> None:
    torch.manual_seed(0)
    eager = Model(num_layers).requires_grad_(False)
    # fullgraph=True: one graph for the whole model, or an error that says why not.
    compiled = torch.compile(copy.deepcopy(eager), backend="mla", fullgraph=True)
    tables = 1 + torch.arange(ROWS * PAGES_PER_ROW, dtype=torch.int32).view(ROWS, -1)
    for name, (batch, positions) in batches(tables).items():
        x = torch.randn(len(positions), HIDDEN)
        expected, got = eager(x, positions, batch), compiled(x, positions, batch)
        torch.testing.assert_close(got, expected)
        error = float((got - expected).abs().max())
        print(f"{name:8} {len(positions):3} tokens   largest difference from eager {error:.1e}")


if __name__ == "__main__":
    main()
