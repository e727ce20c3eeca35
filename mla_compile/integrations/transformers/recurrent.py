"""Recurrent layers between MLA layers (Kimi-Linear): one state per row, and tokens arranged in rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment
from mla_compile.integrations.transformers.cache import PagedLatentCache
from mla_compile.ops.attention.segments import prefill_segment
from mla_compile.torch_internals import mark_state_tensor

Run = Callable[[Tensor, Tensor, MLABatch], Tensor]


class RecurrentStates:
    """Convolution and recurrent states of the `linear` layers of a cache, each `[slots, ...]`.

    A row's slot follows from its first page, as the engine gives each row a block of pages; slot 0 belongs to the dummy
    page, which padding rows share. A forward copies the rows' states to the layers and back.
    """

    def __init__(self, cache: PagedLatentCache) -> None:
        self._layers: list[Any] = list(cache.linear.values())
        self._num_pages = 0
        self._pools: list[tuple[Tensor, Tensor]] = []

    def allocate(self, num_pages: int) -> None:
        """Drop all states; the first forward allocates new ones, once it knows their shapes."""
        self._num_pages, self._pools = num_pages, []

    def forward(self, run: Run, token_ids: Tensor, positions: Tensor, batch: MLABatch) -> Tensor:
        """Hidden states `[tokens, hidden_size]`: of decode rows with one token each, then of prompt chunks in turn."""
        if batch.decode is None:
            assert batch.prefill is not None
            return self._prefill(run, token_ids, positions, batch.prefill)
        assert batch.decode.q_len == 1, "recurrent layers do not support drafts"
        if batch.prefill is None:
            return self._decode(run, token_ids, positions, batch.decode)
        rows = batch.decode.block_table.shape[0]
        # Runs first: it includes the prompts' rows as inactive ones, whose states the prefill then overwrites.
        before = None
        if self._pools:
            before = self._decode(run, token_ids[:rows], positions[:rows], batch.decode)
        hidden = self._prefill(run, token_ids[rows:], positions[rows:], batch.prefill)
        if before is None:  # no row has decoded yet
            before = hidden.new_zeros(rows, hidden.shape[1])
        return torch.cat([before, hidden])

    def _decode(self, run: Run, token_ids: Tensor, positions: Tensor, segment: DecodeSegment) -> Tensor:
        slots = _slots(segment.block_table)
        self._load(slots)
        hidden = run(token_ids[:, None], positions[:, None], MLABatch(decode=segment))[:, 0]
        self._store(slots)
        return hidden

    def _prefill(self, run: Run, token_ids: Tensor, positions: Tensor, segment: PrefillSegment) -> Tensor:
        hidden, start = [], 0
        slots = _slots(segment.block_table)
        for row, (q_len, seq_len) in enumerate(segment.host_lens.tolist()):
            if q_len == 0:  # padding
                continue
            tokens, one = slice(start, start + q_len), slice(row, row + 1)
            part, _ = prefill_segment(
                [q_len], [seq_len - q_len], segment.block_table[one], page_size=segment.page_size
            )
            part = replace(part, slot_mapping=segment.slot_mapping[tokens])
            if seq_len == q_len:
                for layer in self._layers:
                    layer.__init__()  # as transformers does for a new text
            else:
                self._load(slots[one])
            hidden.append(run(token_ids[None, tokens], positions[None, tokens], MLABatch(prefill=part))[0])
            self._make_pools(segment.block_table.shape[1])
            self._store(slots[one])
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
                mark_state_tensor(pool)
            self._pools.append((pools[0], pools[1]))

    def _load(self, slots: Tensor) -> None:
        for layer, (conv, recurrent) in zip(self._layers, self._pools, strict=True):
            layer.conv_states[0], layer.recurrent_states[0] = conv[slots], recurrent[slots]
            layer.has_previous_state[0] = True

    def _store(self, slots: Tensor) -> None:
        for layer, (conv, recurrent) in zip(self._layers, self._pools, strict=True):
            conv.index_copy_(0, slots, layer.conv_states[0])
            recurrent.index_copy_(0, slots, layer.recurrent_states[0])
            # Tensors left there would become outputs of the graph.
            layer.conv_states[0] = layer.recurrent_states[0] = None


def _slots(block_table: Tensor) -> Tensor:
    """The slot of each row, int64 `[rows]`: row blocks start at page 1, each as long as the table is wide."""
    width = block_table.shape[1]
    return ((block_table[:, 0] + (width - 1)) // width).long()
