"""Prompt chunks that a mixed step prefills beside its decode rows."""

from array import array
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from mla_compile.batch import PrefillSegment
from mla_compile.errors import MLAError
from mla_compile.ops.prefill_metadata import prefill_metadata_op
from mla_compile.ops.segments import MIN_KEYS, chunk_lens_and_bounds, most_keys
from mla_compile.packing import MIN_TOKENS, prompt_padding
from mla_compile.speculate.state import DecodeState
from mla_compile.torch_internals import mark_state_tensor, mark_varying


class PromptChunk(NamedTuple):
    """Tokens `start` to `stop` of a prompt, those before them being in the caches.

    row: of the state, that the prompt belongs to.
    token_ids: the whole prompt; of a preempted row, what it has emitted too. Where `stop` is its end, a token is
        sampled after it. A tensor is int64 `[n]`, on the CPU.
    """

    row: int
    token_ids: Sequence[int] | Tensor
    start: int
    stop: int


@dataclass(frozen=True)
class PromptChunks:
    """Chunks of different rows, packed one after the other, within a step. At least `MIN_TOKENS` tokens.

    token_ids: int64 `[tokens]`.
    next_token_ids: the token after each one, across a chunk's end too, int64 `[tokens]`; any id after a prompt's last
        one, whose successor is sampled.
    positions: int64 `[tokens]`.
    segment: where they live.
    last_of_row: for each row of the state, the packed index of its prompt's last token, int64 `[rows]`; -1 where no
        prompt of the row ends here.
    """

    token_ids: Tensor
    next_token_ids: Tensor
    positions: Tensor
    segment: PrefillSegment
    last_of_row: Tensor

    @property
    def begins(self) -> Tensor:
        """The rows of the state whose prompts end here, bool `[rows]`."""
        return self.last_of_row >= 0


@dataclass(frozen=True)
class PackedChunks:
    """What the host says of the chunks of a step, which makes `PromptChunks` of it; `pack` makes these.

    token_ids, next_token_ids, last_of_row: see `PromptChunks`.
    rows: of the state, that the chunks belong to, int64 `[chunks]`; -1 for chunks of padding.
    lens, bounds: int64 `[chunks, 2]` and `[chunks, 2 * parts]`, see `mla_prefill_metadata`.
    room: uint8 `[keys]`. Only its size counts, places for the keys of a part: a size that compiled code can vary by.
    host_lens: `lens` on the CPU, int32.
    page_size: tokens a cache page.
    sent: the first six on the device, one behind the other, as the host sends them; pieces: views of it, in their
        shapes. No step reads these.
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
    sent: Tensor
    pieces: tuple[Tensor, ...]

    @classmethod
    def pack(
        cls,
        chunks: Sequence[PromptChunk],
        state: DecodeState,
        *,
        page_size: int,
        pad: bool = False,
        most: int | None = None,
        kept: "MutableMapping[tuple[int, ...], PackedChunks] | None" = None,
    ) -> "PackedChunks":
        """Chunks of rows of `state`, whose block tables are read by the step.

        pad: see `pack_batch`: CUDA graphs are recorded for each number of tokens, so few of them should occur.
        most: a number of tokens that occurs often, so that chunks of so many are not padded to more.
        kept: where chunks of some sizes were packed before: those of the same sizes are written to the same tensors,
            which stay where they are, as captured graphs know their addresses. Keys in more than one part, for which no
            graph is recorded, are not kept.

        The host sends one copy to the device and does not wait for it. The tensors are marked for the compiler: their
        numbers of tokens, chunks, parts, keys and rows vary.

        Raises:
            MLAError: a row that the state lacks or that has two chunks, an empty chunk or one past the prompt's end,
                or a table that cannot hold it.
        """
        (rows, max_pages), device = state.block_table.shape, state.block_table.device
        texts = [_text(chunk) for chunk in chunks]
        _check(chunks, texts, rows, max_pages, page_size)
        counts, starts = [chunk.stop - chunk.start for chunk in chunks], [chunk.start for chunk in chunks]
        capacity = max_pages * page_size
        padded = prompt_padding(counts, starts, capacity=capacity, pad=pad, most=most)
        lens, bounds = chunk_lens_and_bounds(
            counts,
            starts,
            num_tokens=padded["num_tokens"],
            num_chunks=padded.get("num_chunks", 0),
            capacity=capacity,
        )
        tokens = max(padded["num_tokens"], sum(counts))
        keys = max(padded.get("num_keys", 0), most_keys(bounds))

        host = torch.zeros(
            2 * tokens + rows + len(lens) * (3 + len(bounds[0])),
            dtype=torch.int64,
            device="cpu",
            pin_memory=device.type == "cuda",
        )
        last_of_row, end = [-1] * rows, 0
        for (row, _, start, stop), text in zip(chunks, texts, strict=True):
            host[end : end + stop - start] = text[start:stop]
            behind = text[start + 1 : stop + 1]
            host[tokens + end : tokens + end + behind.shape[0]] = behind
            end += stop - start
            if stop == text.shape[0]:
                last_of_row[row] = end - 1
        of_state = [*(chunk.row for chunk in chunks), *[-1] * (len(lens) - len(chunks))]
        # In a tenth of the time that `torch.tensor` takes to look at each of them.
        others = array("q", [*last_of_row, *of_state, *chain(*lens), *chain(*bounds)])
        host[2 * tokens :] = torch.frombuffer(others, dtype=torch.int64)

        shapes = (tokens,), (tokens,), (rows,), (len(lens),), (len(lens), 2), (len(lens), len(bounds[0]))
        kept = kept if len(bounds[0]) == 2 else None
        key = *chain(*shapes), keys
        packed = None if kept is None else kept.get(key)
        if packed is None:
            packed = cls._allocate(shapes, keys, page_size, device, stays=kept is not None)
            if kept is not None:
                kept[key] = packed
        packed._receive(host)
        return packed

    @classmethod
    def _allocate(
        cls,
        shapes: Sequence[tuple[int, ...]],
        keys: int,
        page_size: int,
        device: torch.device,
        *,
        stays: bool,
    ) -> "PackedChunks":
        """shapes: of what the host sends."""
        with torch.inference_mode(False):  # an inference tensor could not be changed outside that mode
            given = [torch.empty(shape, dtype=torch.int64, device=device) for shape in shapes]
            sent = torch.empty(sum(x.numel() for x in given), dtype=torch.int64, device=device)
            pieces = sent.split([x.numel() for x in given])
            pieces = tuple(piece.view(x.shape) for piece, x in zip(pieces, given, strict=True))
            room = torch.empty(keys, dtype=torch.uint8, device=device)
            host_lens = torch.empty(shapes[4], dtype=torch.int32, device="cpu")
        token_ids, next_token_ids, last_of_row, rows, lens, bounds = given
        for tensor in (*given, room):
            varying = (0, 1) if tensor is bounds else (0,)
            if stays:
                mark_state_tensor(tensor, *varying)
            for dim in () if stays else varying:
                mark_varying(tensor, dim)
        mark_varying(host_lens)
        return cls(
            token_ids,
            next_token_ids,
            last_of_row,
            rows,
            lens,
            bounds,
            room,
            host_lens,
            page_size,
            sent,
            pieces,
        )

    def _receive(self, host: Tensor) -> None:
        """Take what the host sends."""
        mine = [self.token_ids, self.next_token_ids, self.last_of_row, self.rows, self.lens, self.bounds]
        self.sent.copy_(host, non_blocking=True)
        torch._foreach_copy_(mine, self.pieces)
        end = host.shape[0] - self.bounds.numel()
        self.host_lens.copy_(host[end - self.lens.numel() : end].view(-1, 2))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, chunks and keys, padding included: a CUDA graph serves chunks of the same sizes."""
        chunks, bounds = self.bounds.shape
        return self.token_ids.shape[0], chunks, bounds // 2 * self.room.shape[0]

    @property
    def begins(self) -> Tensor:
        """See `PromptChunks`."""
        return self.last_of_row >= 0

    def chunks(self, state: DecodeState) -> PromptChunks:
        """The chunks, where the rows of `state` have their pages. Runs inside of a compiled step.

        Raises:
            MLAError: chunks that were packed for a state of another number of rows.
        """
        self._check_sizes(state.block_table.shape[0])
        table = state.block_table.index_select(0, self.rows.clamp(min=0))
        table = torch.where(self.rows[:, None] >= 0, table, 0)  # padding has page 0, the dummy page, alone
        cu_seqlens_q, seq_lens, slots, positions, key_slots, cu_seqlens_k = prefill_metadata_op(
            self.lens, self.bounds, table, self.token_ids.shape[0], self.room.shape[0], self.page_size
        )
        segment = PrefillSegment(
            cu_seqlens_q, seq_lens, table, slots, key_slots, cu_seqlens_k, self.host_lens, self.page_size
        )
        return PromptChunks(self.token_ids, self.next_token_ids, positions, segment, self.last_of_row)

    def _check_sizes(self, rows: int) -> None:
        """Tells the compiler, which gives each tensor a size of its own, which ones agree."""
        if not torch.compiler.is_compiling() and self.last_of_row.shape[0] != rows:
            raise MLAError("chunks", f"those of a state of {rows} rows", self.last_of_row.shape[0])
        tokens, chunks = self.token_ids.shape[0], self.rows.shape[0]
        torch._check(tokens >= MIN_TOKENS)
        torch._check(chunks >= 1)
        torch._check(self.next_token_ids.shape[0] == tokens)
        for tensor in (self.lens, self.bounds, self.host_lens):
            torch._check(tensor.shape[0] == chunks)
        torch._check(self.bounds.shape[1] >= 2)
        torch._check(self.room.shape[0] >= MIN_KEYS)
        torch._check(self.last_of_row.shape[0] == rows)


def _text(chunk: PromptChunk) -> Tensor:
    ids = chunk.token_ids
    return ids if isinstance(ids, Tensor) else torch.tensor(ids, dtype=torch.int64, device="cpu")


def _check(
    chunks: Sequence[PromptChunk], texts: Sequence[Tensor], rows: int, max_pages: int, page_size: int
) -> None:
    seen: set[int] = set()
    capacity = max_pages * page_size
    for i, ((row, _, start, stop), text) in enumerate(zip(chunks, texts, strict=True)):
        if not 0 <= row < rows or row in seen:
            raise MLAError(f"chunks[{i}].row", f"a row of {rows}, with one chunk at most", row)
        seen.add(row)
        if not 0 <= start < stop <= text.shape[0]:
            expected = f"0 <= start < stop <= {text.shape[0]} tokens"
            raise MLAError(f"chunks[{i}]", expected, f"start {start}, stop {stop}")
        if stop > capacity:
            expected = f"at most {capacity} tokens ({max_pages} pages of {page_size})"
            raise MLAError(f"chunks[{i}]", expected, f"stop {stop}", "widen block_table")
