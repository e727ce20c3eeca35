"""Explain a whole language model on a typical batch, without running it."""

import torch
from torch import Tensor, nn

from mla_compile.batch import MLABatch
from mla_compile.caches import allocate
from mla_compile.errors import MLAError
from mla_compile.explanation.explain import Explanation, explain
from mla_compile.models import MLAForCausalLM
from mla_compile.ops.attention.segments import decode_segment, prefill_segment
from mla_compile.speculate import DecodeState, SpeculativeDecoder

PAGE_SIZE = 16
NUM_CACHED = 96
"""The assumed number of cached tokens of each decode row."""


def inspect_forward(
    model: MLAForCausalLM, *, num_speculative_tokens: int = 3, rows: int = 4, prefill_tokens: int = 48
) -> Explanation:
    """Explain one forward of a mixed batch up to the logits that a step needs: all of a decode row's, a prompt's last.

    Args:
        model: any model; the function allocates a small cache for it.
        num_speculative_tokens: k >= 0; each decode row has k + 1 query tokens.
        rows: decode rows, >= 0.
        prefill_tokens: tokens of one prompt chunk, >= 0; 0 for none.

    Raises:
        MLAError: the batch has no tokens.
    """
    if rows + prefill_tokens == 0:
        raise MLAError("rows, prefill_tokens", "a batch of at least one token", "0 and 0")
    q_len = num_speculative_tokens + 1
    pages = -(-max(NUM_CACHED + q_len, prefill_tokens) // PAGE_SIZE)
    chunks = int(prefill_tokens > 0)
    _allocate(model, (rows + chunks) * pages)
    table = 1 + torch.arange((rows + chunks) * pages, dtype=torch.int32, device=model.device).view(-1, pages)
    decode = prefill = None
    positions = []
    if rows:
        cached = torch.full((rows,), NUM_CACHED, dtype=torch.int32, device=model.device)
        decode, where = decode_segment(cached, table[:rows].clone(), q_len=q_len, page_size=PAGE_SIZE)
        positions.append(where)
    if chunks:
        prefill, where = prefill_segment([prefill_tokens], [0], table[rows:].clone(), page_size=PAGE_SIZE)
        positions.append(where)
    tokens = torch.cat(positions)
    needed = torch.arange(len(tokens), device=model.device)
    needed = torch.cat([needed[: rows * q_len], needed[-1:]]) if chunks else needed
    batch = MLABatch(decode, prefill)
    return explain(_NeededLogits(model), torch.zeros_like(tokens), tokens, batch, needed)


def inspect_step(model: MLAForCausalLM, *, num_speculative_tokens: int = 3, rows: int = 4) -> Explanation:
    """Explain the whole MTP iteration that generation compiles: verify, accept, draft.

    Args:
        model: has an MTP layer if `num_speculative_tokens` is above 0; the function allocates a small cache for it.
        num_speculative_tokens: k >= 0.
        rows: sequences, >= 1.

    Raises:
        MLAError: `rows` is 0, or drafts are requested of a model without an MTP layer.
    """
    if rows == 0:
        raise MLAError("rows", "at least one sequence", rows)
    pages = -(-(NUM_CACHED + 2 * num_speculative_tokens + 1) // PAGE_SIZE)
    _allocate(model, rows * pages)
    decoder = SpeculativeDecoder(model, num_speculative_tokens, page_size=PAGE_SIZE)
    return explain(decoder, DecodeState.allocate(rows, num_speculative_tokens, max_pages=pages))


def _allocate(model: MLAForCausalLM, pages: int) -> None:
    """Allocate at most 1000 pages: the model does not run, and the cache's size only appears in the picture."""
    allocate(model.cache_specs(), 1 + min(pages, 1000), PAGE_SIZE)


class _NeededLogits(nn.Module):
    def __init__(self, model: MLAForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, positions: Tensor, batch: MLABatch, needed: Tensor) -> Tensor:
        hidden = self.model(token_ids, positions, batch).hidden
        return self.model.logits(torch.index_select(hidden, 0, needed))
