"""Recurrent layers between MLA layers (Kimi-Linear): their states, one for each row, and tokens laid out in rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment
from mla_compile.integrations.transformers.cache import PagedLatentCache
from mla_compile.ops.attention.segments import prefill_segment
from mla_compile.torch_internals import mark_cache

Run = Callable[[Tensor, Tensor, MLABatch], Tensor]


class RecurrentStates:
    """States of the `linear` layers of a cache, each `[places, ...]`, convolution's and recurrence's.

    A row's place follows from its first page, since an engine gives each row a block of pages; place 0 is that of the
    dummy page, which padding rows share. Around a forward the rows' states are copied to the layers and back.
    """

    def __init__(self, cache: PagedLatentCache) -> None:
        self._layers: list[Any] = list(cache.linear.values())
        self._num_pages = 0
        self._pools: list[tuple[Tensor, Tensor]] = []

    def allocate(self, num_pages: int) -> None:
        """Forget all states; new ones are made when the first forward shows their shapes."""
        self._num_pages, self._pools = num_pages, []

    def forward(self, run: Run, token_ids: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        """Hidden states `[tokens, hidden_size]` of decode rows of one token each, then of prompt chunks, one by one."""
        if batch.decode is None:
            assert batch.prefill is not None
            return self._prefill(run, token_ids, positions, batch.prefill)
        assert batch.decode.q_len == 1, "recurrent layers take no drafts"
        if batch.prefill is None:
            return self._decode(run, token_ids, positions, batch.decode)
        rows = batch.decode.block_table.shape[0]
        # First, as the rows whose prompts these are run in it too, inactive, and leave states that mean nothing.
        before = None
        if self._pools:
            before = self._decode(run, token_ids[:rows], positions[:rows], batch.decode)
        hidden = self._prefill(run, token_ids[rows:], positions[rows:], batch.prefill)
        if before is None:  # nobody decodes yet
            before = hidden.new_zeros(rows, hidden.shape[1])
        return torch.cat([before, hidden])

    def _decode(self, run: Run, token_ids: Tensor, positions: Tensor, segment: DecodeSegment) -> Tensor:
        places = _places(segment.block_table)
        self._load(places)
        hidden = run(token_ids[:, None], positions[:, None], MLABatch(decode=segment))[:, 0]
        self._store(places)
        return hidden

    def _prefill(self, run: Run, token_ids: Tensor, positions: Tensor, segment: PrefillSegment) -> Tensor:
        hidden, start = [], 0
        places = _places(segment.block_table)
        for row, (q_len, seq_len) in enumerate(segment.host_lens.tolist()):
            if q_len == 0:  # padding
                continue
            tokens, one = slice(start, start + q_len), slice(row, row + 1)
            part, _ = prefill_segment(
                [q_len], [seq_len - q_len], segment.block_table[one], page_size=segment.page_size
            )
            part = replace(part, slot_mapping=segment.slot_mapping[tokens])
            if seq_len == q_len:
                self._clear()
            else:
                self._load(places[one])
            hidden.append(run(token_ids[None, tokens], positions[None, tokens], MLABatch(prefill=part))[0])
            self._make_pools(segment.block_table.shape[1])
            self._store(places[one])
            start += q_len
        return torch.cat(hidden)

    def _make_pools(self, pages_per_row: int) -> None:
        if self._pools:
            return
        count = (self._num_pages - 1) // pages_per_row + 1
        for layer in self._layers:
            states = layer.conv_states[0], layer.recurrent_states[0]
            pools = tuple(state.new_zeros(count, *state.shape[1:]) for state in states)
            for pool in pools:
                mark_cache(pool)
            self._pools.append((pools[0], pools[1]))

    def _clear(self) -> None:
        for layer in self._layers:
            layer.__init__()  # as transformers makes it for a new text

    def _load(self, places: Tensor) -> None:
        for layer, (conv, recurrent) in zip(self._layers, self._pools, strict=True):
            layer.conv_states[0], layer.recurrent_states[0] = conv[places], recurrent[places]
            layer.has_previous_state[0] = True

    def _store(self, places: Tensor) -> None:
        for layer, (conv, recurrent) in zip(self._layers, self._pools, strict=True):
            conv.index_copy_(0, places, layer.conv_states[0])
            recurrent.index_copy_(0, places, layer.recurrent_states[0])
            # Tensors left there would become outputs of the graph.
            layer.conv_states[0] = layer.recurrent_states[0] = None


def _places(block_table: Tensor) -> Tensor:
    """int64 `[rows]`: rows own blocks of as many pages as the table is wide, from page 1 on."""
    width = block_table.shape[1]
    return ((block_table[:, 0] + (width - 1)) // width).long()
