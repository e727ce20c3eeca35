"""Your own model: call `mla_attention` once per layer, keep a cache in a buffer, compile with backend="mla".

    python examples/own_module.py

The model does not distinguish decode from prefill: it projects all tokens of a batch alike, and the compiler splits the
attention into the segments of the batch. The program runs ten different batches, as a small service would: prompts in
chunks, rows that verify up to two drafts, both at once. It compares each with eager. All of them together compile three
graphs: decode rows, prompts, both.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mla_compile import MLABatch, PackedBatch, mla_attention, pack_batch

VOCAB, HIDDEN, HEADS, NOPE, ROPE, RANK, V = 128, 64, 4, 16, 8, 32, 16
PAGE_SIZE, PAGES_PER_ROW, ROWS = 4, 8, 4
DRAFTS = 2


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of `[tokens, ..., ROPE]`."""
    frequencies = 10000.0 ** -(torch.arange(0, ROPE, 2, device=x.device) / ROPE)
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
        # From the latent to keys and values per head. The op takes both, to run the expanded or the absorbed form.
        self.w_uk = nn.Parameter(torch.randn(HEADS, NOPE, RANK) * RANK**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, RANK, V) * RANK**-0.5)
        self.o_proj = nn.Linear(HEADS * V, HIDDEN, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        # One cache tensor per layer, a buffer: its address is fixed, which CUDA graphs need. Page 0 is unused.
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
    """Token ids `[tokens]` to logits `[tokens, VOCAB]`."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, token_ids: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        x = self.embedding(token_ids)
        for layer in self.layers:
            x = layer(x, positions, batch)
        return self.head(x)


# Each line is a batch: (row, its tokens in this step, whether it has sampled yet). Rows begin with a prompt.
STEPS: Sequence[Sequence[tuple[int, int, bool]]] = [
    [(0, 5, False)],  # a prompt
    [(0, 3, True)],  # it decodes: its last token and two drafts
    [(0, 3, True), (1, 7, False)],  # another prompt arrives
    [(0, 3, True), (1, 3, True)],
    [(0, 1, True), (1, 2, True), (2, 4, False)],  # fewer drafts, and a prompt's first chunk
    [(1, 3, True), (2, 1, False)],  # its last chunk, one token
    [(0, 1, True)],
    [(1, 1, True), (2, 3, True)],
    [(3, 9, False)],
    [(0, 2, True), (1, 3, True), (2, 3, True), (3, 1, True)],
]


def batches() -> Iterator[tuple[str, PackedBatch]]:
    """The batches of the steps, with token ids, and a description of each."""
    tables = 1 + torch.arange(ROWS * PAGES_PER_ROW, dtype=torch.int32).view(ROWS, -1)
    num_cached = [0] * ROWS  # here every draft is accepted, so each step adds all of its tokens
    for step in STEPS:
        rows = [row for row, _, _ in step]
        query_lens = [count for _, count, _ in step]
        yield (
            ", ".join(
                f"{count} of {'decode' if sampled else 'prompt'} row {row}" for row, count, sampled in step
            ),
            pack_batch(
                query_lens,
                [num_cached[row] for row in rows],
                tables[rows],
                torch.randint(VOCAB, (sum(query_lens),)),
                has_sampled=[sampled for _, _, sampled in step],
                page_size=PAGE_SIZE,
                num_speculative_tokens=DRAFTS,
            ),
        )
        for row, count, _ in step:
            num_cached[row] += count


def main(num_layers: int = 2) -> None:
    torch.manual_seed(0)
    eager = Model(num_layers).requires_grad_(False)
    # fullgraph=True: one graph for the whole model, or an error with the reason.
    compiled = torch.compile(copy.deepcopy(eager), backend="mla", fullgraph=True)
    before = counters["stats"]["unique_graphs"]
    for what, packed in batches():
        (token_ids,) = packed.tensors
        expected = eager(token_ids, packed.positions, packed.batch)[packed.order]
        got = compiled(token_ids, packed.positions, packed.batch)[packed.order]
        torch.testing.assert_close(got, expected)
        error = float((got - expected).abs().max())
        print(f"{what:58} largest difference from eager {error:.1e}")
    print(f"{len(STEPS)} batches, {counters['stats']['unique_graphs'] - before} graphs")


if __name__ == "__main__":
    main()
