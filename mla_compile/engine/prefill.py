"""Running whole prompts through the model before they decode."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from mla_compile.batch import MLABatch, prefill_segment
from mla_compile.speculate import DecodeState, SpeculativeDecoder

CHUNK = 512
"""Tokens of one prompt in one call: it bounds the activations."""


def prefill_prompts(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], state: DecodeState
) -> Tensor:
    """Fill the caches of the state's first rows with their prompts, chunk by chunk.

    Returns:
        The hidden states of the prompts' last tokens, `[rows, hidden_size]`; 0 for the other rows.
    """
    device = state.block_table.device
    last_hidden = None
    for start in range(0, max(map(len, prompts)), CHUNK):
        rows = [row for row, prompt in enumerate(prompts) if len(prompt) > start]
        chunks = [prompts[row][start : start + CHUNK] for row in rows]
        # The MTP layer reads each token's successor, across the chunk's end too; a prompt's last one has none yet.
        following = [[*prompts[row][start + 1 : start + CHUNK + 1], 0][:CHUNK] for row in rows]
        index = torch.tensor(rows, device=device)
        segment, positions = prefill_segment(
            [len(c) for c in chunks],
            [start] * len(rows),
            state.block_table[index],
            page_size=decoder.page_size,
        )
        hidden = decoder.prefill(
            torch.tensor(list(chain(*chunks)), device=device),
            torch.tensor(list(chain(*following)), device=device),
            positions,
            MLABatch(prefill=segment),
            segment.cu_seqlens_q[1:].long() - 1,
        )
        if last_hidden is None:
            last_hidden = hidden.new_zeros(state.num_rows(), hidden.shape[1])
        last_hidden[index] = hidden
    assert last_hidden is not None
    return last_hidden
