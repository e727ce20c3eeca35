"""Prompt chunks that a mixed step prefills beside its decode rows."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile.batch import PrefillSegment
from mla_compile.errors import MLAError
from mla_compile.ops.segments import MIN_KEYS, copied_to, prefill_segment
from mla_compile.packing import MIN_TOKENS, prompt_padding
from mla_compile.speculate.state import DecodeState
from mla_compile.torch_internals import mark_state_tensor, mark_varying


class PromptChunk(NamedTuple):
    """Tokens `start` to `stop` of a prompt, those before them being in the caches.

    row: of the state, that the prompt belongs to.
    token_ids: the whole prompt; of a preempted row, what it has emitted too. Where `stop` is its end, a token is
        sampled after it.
    """

    row: int
    token_ids: Sequence[int]
    start: int
    stop: int


@dataclass(frozen=True)
class PromptChunks:
    """Chunks of different rows, packed one after the other; `pack` makes them. At least `MIN_TOKENS` tokens.

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

    @classmethod
    def pack(
        cls,
        chunks: Sequence[PromptChunk],
        state: DecodeState,
        *,
        page_size: int,
        pad: bool = False,
        most: int | None = None,
    ) -> "PromptChunks":
        """Chunks of rows of `state`, whose block tables are read now.

        pad: see `pack_batch`: CUDA graphs are recorded for each number of tokens, so few of them should occur.
        most: a number of tokens that occurs often, so that chunks of so many are not padded to more.

        The host does not wait for the device. The tensors are marked for the compiler: their numbers of tokens, chunks
        and rows vary.

        Raises:
            MLAError: a row that the state lacks or that has two chunks, an empty chunk or one past the prompt's end,
                or a table that cannot hold it.
        """
        rows, device = state.num_rows(), state.block_table.device
        last_of_row = [-1] * rows
        seen: set[int] = set()
        token_ids: list[int] = []
        next_token_ids: list[int] = []
        for i, (row, prompt, start, stop) in enumerate(chunks):
            if not 0 <= row < rows or row in seen:
                raise MLAError(f"chunks[{i}].row", f"a row of {rows}, with one chunk at most", row)
            seen.add(row)
            if not 0 <= start < stop <= len(prompt):
                expected = f"0 <= start < stop <= {len(prompt)} tokens"
                raise MLAError(f"chunks[{i}]", expected, f"start {start}, stop {stop}")
            token_ids += prompt[start:stop]
            next_token_ids += prompt[start + 1 : stop + 1]
            if stop == len(prompt):
                next_token_ids.append(0)
                last_of_row[row] = len(token_ids) - 1
        lens, starts = [chunk.stop - chunk.start for chunk in chunks], [chunk.start for chunk in chunks]
        sizes = prompt_padding(lens, starts, pad=pad, most=most)
        padding = [0] * (sizes["num_tokens"] - len(token_ids))
        # Split into copies: no tensor may be a view of another, see `prefill_segment`.
        columns = [chunk.row for chunk in chunks], token_ids + padding, next_token_ids + padding, last_of_row
        host = torch.tensor([value for column in columns for value in column], device="cpu")
        given = torch.ops.aten.split_with_sizes_copy(
            copied_to(device, host), [len(column) for column in columns]
        )
        # `pack_batch` does as much for rows of any kind; where all prefill, its order costs copies and nothing else.
        segment, positions = prefill_segment(
            lens, starts, state.block_table.index_select(0, given[0]), page_size=page_size, **sizes
        )
        packed = cls(given[1], given[2], positions, segment, given[3])
        for tensor in (*packed.tensors(), segment.host_lens):
            mark_varying(tensor)
        for tensor in (segment.key_slots, segment.cu_seqlens_k):
            mark_varying(tensor, 1)
        return packed

    def kept(self) -> "PromptChunks":
        """A copy whose tensors stay where they are, as a `DecodeState`'s do; `take` changes what they hold."""
        with torch.inference_mode(False):  # an inference tensor could not be changed outside that mode
            segment = replace(self.segment, **_clones(self.segment))
            kept = PromptChunks(**_clones(self), segment=segment)
        for tensor in kept.tensors():
            mark_state_tensor(tensor, varying=tensor.dim() if tensor is not segment.block_table else 1)
        mark_varying(segment.host_lens)
        return kept

    def take(self, other: "PromptChunks") -> None:
        """Become chunks of the same sizes."""
        pairs = list(zip(self.tensors(), other.tensors(), strict=True))
        for dtype in (torch.int64, torch.int32):  # one launch for each
            mine, theirs = zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True)
            torch._foreach_copy_(mine, theirs)
        self.segment.host_lens.copy_(other.segment.host_lens)

    def tensors(self) -> list[Tensor]:
        """All but the host's copy of the lengths; the first dimension of each varies."""
        segment = self.segment
        return [
            *(self.token_ids, self.next_token_ids, self.positions, self.last_of_row),
            *(segment.cu_seqlens_q, segment.seq_lens, segment.block_table, segment.slot_mapping),
            *(segment.key_slots, segment.cu_seqlens_k),
        ]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, chunks and keys, padding included: a CUDA graph serves chunks of the same sizes."""
        keys = self.segment.key_slots
        return len(self.token_ids), len(self.segment.seq_lens), keys.numel()

    @property
    def begins(self) -> Tensor:
        """The rows of the state whose prompts end here, bool `[rows]`."""
        return self.last_of_row >= 0

    def check_sizes(self, rows: int) -> None:
        """Tells the compiler, which gives each tensor a size of its own, which ones agree.

        rows: of the state.

        Raises:
            MLAError: chunks that were packed for a state of another number of rows.
        """
        if not torch.compiler.is_compiling() and self.last_of_row.shape[0] != rows:
            raise MLAError("chunks", f"those of a state of {rows} rows", self.last_of_row.shape[0])
        segment = self.segment
        tokens, chunks = self.token_ids.shape[0], segment.seq_lens.shape[0]
        torch._check(tokens >= MIN_TOKENS)
        torch._check(chunks >= 1)
        for tensor in (self.next_token_ids, self.positions, segment.slot_mapping):
            torch._check(tensor.shape[0] == tokens)
        torch._check(segment.block_table.shape[0] == chunks)
        torch._check(segment.host_lens.shape[0] == chunks)
        torch._check(segment.cu_seqlens_q.shape[0] == chunks + 1)
        torch._check(segment.cu_seqlens_k.shape[1] == chunks + 1)
        torch._check(segment.cu_seqlens_k.shape[0] == segment.key_slots.shape[0])
        torch._check(segment.key_slots.shape[1] >= MIN_KEYS)
        torch._check(self.last_of_row.shape[0] == rows)


def _clones(of: "PromptChunks | PrefillSegment") -> dict[str, Any]:
    """Copies of the tensors among its fields, by their names."""
    values = ((field.name, getattr(of, field.name)) for field in fields(of))
    return {name: value.clone() for name, value in values if isinstance(value, Tensor)}
