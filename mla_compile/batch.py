"""Batch metadata: which of a call's packed tokens are decode rows, which are prompt chunks, and where they live.

The builders compute what follows from `num_cached` with torch ops only, so they may run inside a compiled step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.decode_metadata import mla_decode_metadata
from mla_compile.ops.paging import slots_of


@dataclass(frozen=True)
class DecodeSegment:
    """Rows that decode, each with the same number of query tokens.

    seq_lens: keys visible to a row's last valid query token, that one included and those before it in this call, int32
        `[rows]`; 0 for an inactive row.
    block_table: int32 `[rows, max_pages]`.
    slot_mapping: int64 `[rows * q_len]`; -1 writes nowhere.
    q_len: query tokens per row in this call, >= 1.
    q_lens: valid query tokens per row where they differ, int32 `[rows]`, or None.
    backend: the decode backend to use, by name; None is the automatic choice.
    """

    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    q_len: int = 1
    q_lens: Tensor | None = None
    backend: str | None = None


@dataclass(frozen=True)
class PrefillSegment:
    """Prompt chunks, packed one after the other.

    cu_seqlens_q: prefix sum of the chunks' lengths, int32 `[rows + 1]`.
    seq_lens: context and chunk together, int32 `[rows]`.
    block_table: int32 `[rows, max_pages]`.
    slot_mapping: int64 `[tokens]`.
    host_lens: int32 `[rows, 2]` on the CPU: a chunk's length and its `seq_lens`.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    host_lens: Tensor


@dataclass(frozen=True)
class MLABatch:
    """A call's decode rows and prompt chunks; a segment that the batch lacks is None, never empty."""

    decode: DecodeSegment | None = None
    prefill: PrefillSegment | None = None


def decode_segment(
    num_cached: Tensor,
    block_table: Tensor,
    *,
    q_len: int,
    page_size: int,
    q_lens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[DecodeSegment, Tensor]:
    """Rows that each decode `q_len` tokens after the `num_cached` (int32 `[rows]`) that they hold.

    A row of which `q_lens` says 0 is inactive: it sees nothing and writes nowhere. `backend`: see `DecodeSegment`.

    Returns the segment and the tokens' positions, int64 `[rows * q_len]`.

    Raises:
        MLAError: q_len or page_size < 1, or a tensor of another dtype, rank or number of rows.
    """
    seq_lens, valid, slots, positions = mla_decode_metadata(
        num_cached, block_table, q_lens, q_len=q_len, page_size=page_size
    )
    segment = DecodeSegment(seq_lens, block_table, slots, q_len, None if q_lens is None else valid, backend)
    return segment, positions


def prefill_segment(
    chunk_lens: list[int], num_cached: list[int], block_table: Tensor, *, page_size: int
) -> tuple[PrefillSegment, Tensor]:
    """Prompt chunks of `chunk_lens` tokens after the `num_cached` tokens that each row already holds.

    Returns the segment and the tokens' positions, int64 `[sum(chunk_lens)]`, on the device of `block_table`.

    Raises:
        MLAError: lists of different lengths, a chunk shorter than 1, or a row that its table cannot hold.
    """
    rows, capacity = block_table.shape[0], block_table.shape[1] * page_size
    if len(chunk_lens) != rows or len(num_cached) != rows:
        got = f"{len(chunk_lens)} and {len(num_cached)}"
        raise MLAError("chunk_lens, num_cached", f"one entry per row of block_table ({rows})", got)
    for row, (chunk, cached) in enumerate(zip(chunk_lens, num_cached, strict=True)):
        if chunk < 1 or cached < 0:
            raise MLAError(f"row {row}", "chunk length >= 1 and num_cached >= 0", f"{chunk} and {cached}")
        if chunk + cached > capacity:
            mend = "widen block_table"
            raise MLAError(f"row {row}", f"at most {capacity} tokens in its pages", chunk + cached, mend)
    device = block_table.device
    host = torch.tensor([chunk_lens, [c + n for c, n in zip(chunk_lens, num_cached, strict=True)]])
    host = host.to(torch.int32)
    q_lens, seq_lens = copied_to(device, host)
    row_of_token = copied_to(device, torch.repeat_interleave(torch.arange(rows), host[0]))
    cu_seqlens_q = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).to(torch.int32)
    index = torch.arange(row_of_token.shape[0], device=device) - cu_seqlens_q[row_of_token]
    positions = index + (seq_lens - q_lens)[row_of_token]
    slots = slots_of(block_table[row_of_token], positions[:, None], page_size)
    # No field may be a view of another: Dynamo would guard on their common base, and compile anew for each batch.
    host_lens = torch.stack([host[0], host[1]], dim=1)
    segment = PrefillSegment(cu_seqlens_q, seq_lens.clone(), block_table, slots.flatten(), host_lens)
    return segment, positions


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A CPU tensor on `device`. The host does not wait for what the device still has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
