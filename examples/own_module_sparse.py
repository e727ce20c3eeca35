"""Sparse attention in your own model: an indexer selects the keys that each token attends to.

    python examples/own_module_sparse.py

Each layer has a second cache, of the indexer's keys. `mla_select_keys` appends the new ones and returns the slots of
the best TOPK keys of each token; `mla_attention` takes them as `selected`. Decode rows, drafts and prompts are alike.
The program runs the batches of `own_module.py` and compares each with eager; while a row has no more than TOPK tokens,
also with attention over all keys.
"""

import copy

import torch
from own_module import (
    HEADS,
    HIDDEN,
    NOPE,
    PAGE_SIZE,
    PAGES_PER_ROW,
    RANK,
    ROPE,
    ROWS,
    VOCAB,
    V,
    batches,
    rotate,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mla_compile import MLABatch, mla_attention, mla_select_keys

INDEX_HEADS, INDEX_WIDTH, TOPK = 4, ROPE, 6
PAGES = 1 + ROWS * PAGES_PER_ROW


class Indexer(nn.Module):
    """Scores every earlier token by `sum_h weights[h] * relu(q[h] . k)`, as DeepSeek-V3.2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, INDEX_HEADS * INDEX_WIDTH, bias=False)
        self.k_proj = nn.Linear(HIDDEN, INDEX_WIDTH, bias=False)
        self.k_norm = nn.LayerNorm(INDEX_WIDTH)
        self.weights_proj = nn.Linear(HIDDEN, INDEX_HEADS, bias=False)
        # The pages are those of the latents, so one batch serves both caches.
        self.register_buffer("index_cache", torch.zeros(PAGES, PAGE_SIZE, INDEX_WIDTH))

    def forward(self, x: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        q = rotate(self.q_proj(x).view(-1, INDEX_HEADS, INDEX_WIDTH), positions)
        k = rotate(self.k_norm(self.k_proj(x)), positions)
        return mla_select_keys(q, k, self.weights_proj(x).float(), self.index_cache, batch, topk=TOPK)


class Attention(nn.Module):
    """Without an indexer it attends to all keys."""

    def __init__(self, indexer: Indexer | None) -> None:
        super().__init__()
        self.indexer = indexer
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_proj = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(RANK)
        self.w_uk = nn.Parameter(torch.randn(HEADS, NOPE, RANK) * RANK**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, RANK, V) * RANK**-0.5)
        self.o_proj = nn.Linear(HEADS * V, HIDDEN, bias=False)
        self.register_buffer("kv_cache", torch.zeros(PAGES, PAGE_SIZE, RANK + ROPE))

    def forward(self, x: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        q_nope, q_pe = self.q_proj(x).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = self.kv_proj(x).split([RANK, ROPE], dim=-1)
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
            selected=None if self.indexer is None else self.indexer(x, positions, batch),
        )
        return self.o_proj(out.flatten(1))


class Model(nn.Module):
    """Token ids `[tokens]` to hidden states `[tokens, HIDDEN]`. A layer may also use the selection of another one."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Attention(Indexer()) for _ in range(num_layers))

    def forward(self, token_ids: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        x = self.embedding(token_ids)
        for layer in self.layers:
            x = x + layer(x, positions, batch)
        return x


def main(num_layers: int = 2) -> None:
    torch.manual_seed(0)
    eager = Model(num_layers).requires_grad_(False)
    dense = copy.deepcopy(eager)
    for layer in dense.layers:
        layer.indexer = None
    compiled = torch.compile(copy.deepcopy(eager), backend="mla", fullgraph=True)
    before, count = counters["stats"]["unique_graphs"], 0
    for what, packed in batches():
        args = (*packed.tensors, packed.positions, packed.batch)
        expected, got, of_all = (model(*args)[packed.order] for model in (eager, compiled, dense))
        torch.testing.assert_close(got, expected)
        longest = 1 + int(packed.positions.max())
        if longest <= TOPK:
            torch.testing.assert_close(got, of_all)
        error, change = ((got - other).abs().max() for other in (expected, of_all))
        print(f"{what:58} up to {longest:2} keys: from eager {error:.1e}, from dense {change:.1e}")
        count += 1
    print(f"{count} batches, {counters['stats']['unique_graphs'] - before} graphs")


if __name__ == "__main__":
    main()
