"""MLA in plain PyTorch, as in a paper, accelerated by the compiler alone.

    python examples/absorb_plain_mla.py

The module below has no op of mla-compile. Every step expands all cached latents to keys and values of every head, to
attend from one new token. `backend="mla"` recognises that and attends in the latent space instead. The program compares
the tokens with those of the uncompiled model, and the time of a step with that of `torch.compile` alone.
"""

import logging
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, HEADS, NOPE, ROPE, RANK, V = 256, 256, 16, 64, 32, 256, 64


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of `[rows, heads, tokens, ROPE]` at positions `[rows, tokens]`."""
    frequencies = 10000.0 ** -(torch.arange(0, ROPE, 2) / ROPE)
    angles = positions[:, None, :, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class PlainMLA(nn.Module):
    """Multi-head latent attention with a static cache of latents and rotary keys."""

    def __init__(self, rows: int, max_len: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(RANK)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (NOPE + V), bias=False)
        self.o_proj = nn.Linear(HEADS * V, HIDDEN, bias=False)
        self.register_buffer("cache", torch.zeros(rows, max_len, RANK + ROPE))

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        """x: `[rows, tokens, HIDDEN]`, at positions from `start`, `[rows]`."""
        rows, tokens, _ = x.shape
        positions = start[:, None] + torch.arange(tokens)
        q = self.q_proj(x).view(rows, tokens, HEADS, NOPE + ROPE).transpose(1, 2)
        q_nope, q_pe = q.split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = self.kv_a_proj(x).split([RANK, ROPE], dim=-1)
        k_pe = rotate(k_pe[:, None], positions)[:, 0]
        self.cache[torch.arange(rows)[:, None], positions] = torch.cat([self.kv_norm(kv_c), k_pe], dim=-1)

        kv_c, k_pe = self.cache.split([RANK, ROPE], dim=-1)
        kv = self.kv_b_proj(kv_c).view(rows, -1, HEADS, NOPE + V).transpose(1, 2)
        k_nope, v = kv.split([NOPE, V], dim=-1)
        k = torch.cat([k_nope, k_pe[:, None].expand(-1, HEADS, -1, -1)], dim=-1)
        q = torch.cat([q_nope, rotate(q_pe, positions)], dim=-1)
        visible = torch.arange(self.cache.shape[1]) <= positions[:, None, :, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, num_layers: int, rows: int, max_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(PlainMLA(rows, max_len) for _ in range(num_layers))
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(F.rms_norm(x, (HIDDEN,)), start)
        return self.lm_head(x[:, -1]).argmax(-1, keepdim=True)


def generate(model: nn.Module, step: nn.Module, prompt: Tensor, new_tokens: int) -> tuple[Tensor, float]:
    """Prefill with `model`, decode greedily with `step`; the tokens and the shortest step in milliseconds."""
    token, start = model(prompt, torch.zeros(len(prompt), dtype=torch.int64)), torch.tensor(prompt.shape[1])
    tokens, best = [token], float("inf")
    for _ in range(new_tokens - 1):
        before = time.perf_counter()
        token = step(token, start.expand(len(prompt)).clone())
        best = min(best, time.perf_counter() - before)
        start = start + 1
        tokens.append(token)
    return torch.cat(tokens, dim=1), best * 1000


def main(num_layers: int = 2, max_len: int = 2048, new_tokens: int = 16) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("mla_compile.passes").setLevel(logging.INFO)  # or TORCH_LOGS="+mla_compile"
    torch.manual_seed(0)
    model = Model(num_layers, rows=2, max_len=max_len).requires_grad_(False)
    prompt = torch.randint(VOCAB, (2, max_len // 2))
    steps = {
        "eager": model,
        "torch.compile": torch.compile(model, fullgraph=True),
        'backend="mla"': torch.compile(model, backend="mla", fullgraph=True),
    }
    results = {name: generate(model, step, prompt, new_tokens) for name, step in steps.items()}
    expected = results["eager"][0]
    for name, (tokens, milliseconds) in results.items():
        print(f"{name:14} {milliseconds:7.1f} ms a step   tokens equal: {torch.equal(tokens, expected)}")
    ratio = results["torch.compile"][1] / results['backend="mla"'][1]
    print(f'backend="mla" is {ratio:.1f} times as fast as torch.compile alone')


if __name__ == "__main__":
    main()
