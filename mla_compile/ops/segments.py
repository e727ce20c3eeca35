"""Builders of segments, for rows whose kind is known; `pack_batch` makes a whole batch of rows of both kinds.

They compute what follows from `num_cached` with torch ops only. `decode_segment` may run inside a compiled step.
"""

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, PrefillSegment
from mla_compile.ops import validate
from mla_compile.ops.decode_metadata import mla_decode_metadata
from mla_compile.ops.paging import slots_of


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
    valid_lens = None if q_lens is None else valid
    return DecodeSegment(seq_lens, block_table, slots, page_size, q_len, valid_lens, backend), positions


def prefill_segment(
    chunk_lens: list[int],
    num_cached: list[int],
    block_table: Tensor,
    *,
    page_size: int,
    num_tokens: int = 0,
) -> tuple[PrefillSegment, Tensor]:
    """Prompt chunks of `chunk_lens` tokens after the `num_cached` tokens that each row already holds.

    num_tokens: pad to so many tokens, with chunks of nobody that write nowhere. Where the chunks have more already,
        nothing is padded.

    Returns the segment and the tokens' positions, int64 `[tokens]`, on the device of `block_table`.

    Raises:
        MLAError: lists of different lengths, a chunk shorter than 1, or a row that its table cannot hold.
    """
    validate.row_lengths("chunk_lens", chunk_lens, num_cached, block_table, page_size)
    validate.whole_number("num_tokens", num_tokens, 0)
    capacity = block_table.shape[1] * page_size
    device, count = block_table.device, sum(chunk_lens)
    padding = [min(capacity, rest) for rest in range(num_tokens - count, 0, -capacity)]
    block_table = pad_table(block_table, rows=len(padding))
    lens = [*chunk_lens, *padding]
    ends = [*(c + n for c, n in zip(chunk_lens, num_cached, strict=True)), *padding]
    host = torch.tensor([lens, ends], dtype=torch.int32, device="cpu")
    q_lens, seq_lens = copied_to(device, host)
    row_of_token = copied_to(device, torch.arange(len(lens), device="cpu").repeat_interleave(host[0]))
    cu_seqlens_q = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).to(torch.int32)
    index = torch.arange(row_of_token.shape[0], device=device) - cu_seqlens_q[row_of_token]
    positions = index + (seq_lens - q_lens)[row_of_token]
    slots = slots_of(block_table[row_of_token], positions[:, None], page_size).flatten()
    slots[count:] = -1
    # No field may be a view of another: Dynamo would guard on their common base, and compile anew for each batch.
    host_lens = torch.stack([host[0], host[1]], dim=1)
    segment = PrefillSegment(cu_seqlens_q, seq_lens.clone(), block_table, slots, host_lens, page_size)
    return segment, positions


def pad_table(block_table: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    """`block_table` with so many rows and columns more, none where below 0, of page 0, the dummy page."""
    if rows <= 0 and columns <= 0:
        return block_table
    return torch.nn.functional.pad(block_table, (0, max(0, columns), 0, max(0, rows)))


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A CPU tensor on `device`. The host does not wait for what the device still has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
