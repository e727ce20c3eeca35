"""The prompt chunks that a mixed step prefills together with its decode rows."""

from array import array
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from mla_compile.batch import PrefillSegment
from mla_compile.ops.attention.metadata import prefill_metadata_op
from mla_compile.ops.attention.segments import MIN_KEYS, chunk_lens_and_bounds, most_keys
from mla_compile.packing import MIN_TOKENS, prompt_padding
from mla_compile.speculate.state import DecodeState
from mla_compile.torch_internals import (
    adjacent_tensors,
    is_marked,
    mark_sizes,
    mark_state_tensor,
    mark_varying,
    with_shape,
)


class PromptChunk(NamedTuple):
    """Tokens `start` to `stop` of a prompt; the tokens before them are in the caches.

    row: the prompt's row in the state.
    token_ids: the whole prompt, with the emitted tokens of a preempted row. If `stop` is its end, a token is sampled
        after it. An `array("q")` is the fastest to read.
    """

    row: int
    token_ids: Sequence[int]
    start: int
    stop: int


@dataclass(frozen=True)
class PromptChunks:
    """Chunks of different rows, packed one after the other, within a step. At least `MIN_TOKENS` tokens.

    token_ids: int64 `[tokens]`.
    next_token_ids: the token after each one, also at a chunk's end, int64 `[tokens]`; any id after a prompt's last
        token, as the next one is sampled.
    positions: int64 `[tokens]`.
    segment: their places in the cache.
    last_of_row: for each row of the state, the packed index of its prompt's last token, int64 `[rows]`; -1 if no prompt
        of the row ends here.
    """

    token_ids: Tensor
    next_token_ids: Tensor
    positions: Tensor
    segment: PrefillSegment
    last_of_row: Tensor


@dataclass(frozen=True)
class PackedChunks:
    """The host's input of a step's chunks, which the step turns into `PromptChunks`; `pack` builds it.

    token_ids, next_token_ids, last_of_row: see `PromptChunks`.
    rows: the chunks' rows in the state, int64 `[chunks]`; -1 for padding chunks.
    lens, bounds: int64 `[chunks, 2]` and `[chunks, 2 * parts]`, see `mla_prefill_metadata`.
    room: uint8 `[keys]`. Only its size is used, the number of keys of a part: a size that varies in compiled code.
    host_lens: `lens` on the CPU, int32.
    page_size: tokens per cache page.
    sizes: tokens, chunks and keys, padding included: a CUDA graph serves chunks of the same sizes.

    For the host's writes; no step reads these:

    sent: the memory of the first six tensors, int64 `[numbers]`; places: the start of each of them.
    numbers: the numbers to send next; host: a tensor on its memory; lens_on_host: the memory of `host_lens`.
    """

    token_ids: Tensor
    next_token_ids: Tensor
    last_of_row: Tensor
    rows: Tensor
    lens: Tensor
    bounds: Tensor
    room: Tensor
    host_lens: Tensor
    page_size: int
    sizes: tuple[int, int, int]
    sent: Tensor
    places: tuple[int, ...]
    numbers: "array[int]"
    host: Tensor
    lens_on_host: "array[int]"

    @classmethod
    def pack(
        cls,
        chunks: Sequence[PromptChunk],
        state: DecodeState,
        *,
        page_size: int,
        pad: bool = False,
        most: int | None = None,
        longest: int | None = None,
        least: int = 0,
        kept: "MutableMapping[tuple[int, ...], PackedChunks] | None" = None,
    ) -> "PackedChunks":
        """Pack chunks of rows of `state`, at most one per row and none empty. The step reads the state's block tables.

        pad: see `pack_batch`: CUDA graphs are recorded for each number of tokens, so few numbers should occur.
        most: a frequent number of tokens; chunks with exactly this number are not padded further. longest: the most
            tokens for which a graph is recorded. least: chunks are padded as if they had at least this many tokens.
        kept: cache of packed chunks by their sizes: chunks of the same sizes are written to the same tensors, since
            captured graphs hold their addresses. Chunks for which no graph is recorded, of more tokens or with keys in
            more than one part, are not kept.

        The host sends one copy to the device without waiting for it. If the state's tensors are marked for the
        compiler, so are these: their numbers of tokens, chunks, parts, keys and rows vary.
        """
        rows, max_pages = state.block_table.shape
        counts, starts = [chunk.stop - chunk.start for chunk in chunks], [chunk.start for chunk in chunks]
        capacity = max_pages * page_size
        padded = prompt_padding(
            counts, starts, capacity=capacity, pad=pad, most=most, longest=longest, least=least
        )
        lens, bounds = chunk_lens_and_bounds(
            counts,
            starts,
            num_tokens=padded["num_tokens"],
            num_chunks=padded.get("num_chunks", 0),
            capacity=capacity,
        )
        tokens = max(padded["num_tokens"], sum(counts))
        keys = max(padded.get("num_keys", 0), most_keys(bounds))
        key = tokens, rows, len(lens), len(bounds[0]), keys
        is_long = longest is not None and tokens > longest
        kept = kept if len(bounds[0]) == 2 and not is_long else None
        packed = None if kept is None else kept.get(key)
        if packed is None:
            packed = cls._allocate(key, state.block_table, page_size=page_size, stays=kept is not None)
            if kept is not None:
                kept[key] = packed
        packed._receive(chunks, lens, bounds, rows)
        return packed

    @classmethod
    def _allocate(
        cls, key: tuple[int, int, int, int, int], table: Tensor, *, page_size: int, stays: bool
    ) -> "PackedChunks":
        """key: tokens, rows, chunks, columns of `bounds`, keys. table: of the state.

        stays: whether the tensors keep their addresses.
        """
        tokens, rows, chunks, columns, keys = key
        shapes = (tokens,), (tokens,), (rows,), (chunks,), (chunks, 2), (chunks, columns)
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            sent, given, places = adjacent_tensors(shapes, torch.int64, table.device)
            room = torch.empty(keys, dtype=torch.uint8, device=table.device)
            numbers, lens_on_host = array("q", bytes(8 * len(sent))), array("i", bytes(4 * 2 * chunks))
            host = torch.frombuffer(numbers, dtype=torch.int64)
            host_lens = with_shape(torch.frombuffer(lens_on_host, dtype=torch.int32), (chunks, 2))
        token_ids, next_token_ids, last_of_row, of_state, lens, bounds = given
        for tensor in (*given, room) if is_marked(table) else ():
            varying = (0, 1) if tensor is bounds else (0,)
            mark = mark_state_tensor if stays else mark_sizes
            mark(tensor, *varying)
        if is_marked(table):
            mark_varying(host_lens)
        sizes = tokens, chunks, columns // 2 * keys
        return cls(
            *(token_ids, next_token_ids, last_of_row, of_state, lens, bounds, room),
            host_lens,
            page_size,
            sizes,
            sent,
            places,
            numbers,
            host,
            lens_on_host,
        )

    def _receive(
        self, chunks: Sequence[PromptChunk], lens: list[list[int]], bounds: list[list[int]], rows: int
    ) -> None:
        """Write the host's numbers without torch, as one torch call takes longer than all of this, and send them."""
        token_ids, next_token_ids, last_of_row = array("q"), array("q"), array("q", [-1]) * rows
        for row, of_row, start, stop in chunks:
            text = array("q", of_row[start : stop + 1])
            if stop == len(of_row):
                last_of_row[row] = len(token_ids) + stop - start - 1
                text.append(0)
            token_ids += text[:-1]
            next_token_ids += text[1:]
        padding = array("q", [0]) * (self.sizes[0] - len(token_ids))
        of_state = [chunk.row for chunk in chunks] + [-1] * (len(lens) - len(chunks))
        self.lens_on_host[:] = array("i", chain.from_iterable(lens))
        columns = (
            token_ids + padding,
            next_token_ids + padding,
            last_of_row,
            array("q", of_state),
            array("q", self.lens_on_host),
            array("q", chain.from_iterable(bounds)),
        )
        for place, column in zip(self.places, columns, strict=True):
            self.numbers[place : place + len(column)] = column
        # `pin_memory` copies, and torch keeps that copy until the transfer is done: `numbers` can be reused at once.
        host = self.host.pin_memory() if self.sent.is_cuda else self.host
        self.sent.copy_(host, non_blocking=True)

    @property
    def begins(self) -> Tensor:
        """The rows of the state whose prompts end here, bool `[rows]`."""
        return self.last_of_row >= 0

    def chunks(self, state: DecodeState) -> PromptChunks:
        """The chunks, on the pages of the rows of `state`. Runs inside a compiled step."""
        self._check_sizes(state.block_table.shape[0])
        table = state.block_table.index_select(0, self.rows.clamp(min=0))
        table = torch.where(self.rows[:, None] >= 0, table, 0)  # padding has only page 0, the dummy page
        cu_seqlens_q, seq_lens, slots, positions, key_slots, cu_seqlens_k = prefill_metadata_op(
            self.lens, self.bounds, table, self.token_ids.shape[0], self.room.shape[0], self.page_size
        )
        segment = PrefillSegment(
            cu_seqlens_q, seq_lens, table, slots, key_slots, cu_seqlens_k, self.host_lens, self.page_size
        )
        return PromptChunks(self.token_ids, self.next_token_ids, positions, segment, self.last_of_row)

    def _check_sizes(self, rows: int) -> None:
        """Assert for the compiler which sizes are equal, as each tensor has its own symbol."""
        tokens, chunks = self.token_ids.shape[0], self.rows.shape[0]
        torch._check(tokens >= MIN_TOKENS)
        torch._check(chunks >= 1)
        torch._check(self.next_token_ids.shape[0] == tokens)
        for tensor in (self.lens, self.bounds, self.host_lens):
            torch._check(tensor.shape[0] == chunks)
        torch._check(self.bounds.shape[1] >= 2)
        torch._check(self.room.shape[0] >= MIN_KEYS)
        torch._check(self.last_of_row.shape[0] == rows)
