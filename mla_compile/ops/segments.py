"""Builders of segments, for rows whose kind is known; `pack_batch` makes a whole batch of rows of both kinds.

`decode_segment` may run inside a compiled step.
"""

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, PrefillSegment
from mla_compile.ops import validate
from mla_compile.ops.decode_metadata import mla_decode_metadata
from mla_compile.ops.prefill_metadata import prefill_metadata_op


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
    num_chunks: int = 0,
    num_keys: int = 0,
) -> tuple[PrefillSegment, Tensor]:
    """Prompt chunks of `chunk_lens` tokens after the `num_cached` tokens that each row already holds.

    num_tokens: pad to so many tokens, with chunks of nobody that write nowhere. Where the chunks have more already,
        nothing is padded.
    num_chunks: pad to so many chunks, with empty ones of nobody; num_keys: to so many keys that are read. Likewise.

    Returns the segment and the tokens' positions, int64 `[tokens]`, on the device of `block_table`.

    Raises:
        MLAError: lists of different lengths, a chunk shorter than 1, or a row that its table cannot hold.
    """
    validate.row_lengths("chunk_lens", chunk_lens, num_cached, block_table, page_size)
    validate.whole_number("num_tokens", num_tokens, 0)
    validate.whole_number("num_chunks", num_chunks, 0)
    validate.whole_number("num_keys", num_keys, 0)
    capacity = block_table.shape[1] * page_size
    padding = [min(capacity, rest) for rest in range(num_tokens - sum(chunk_lens), 0, -capacity)]
    padding += [0] * (num_chunks - len(chunk_lens) - len(padding))
    lens = [*chunk_lens, *padding]
    ends = [*(c + n for c, n in zip(chunk_lens, num_cached, strict=True)), *padding]
    # Of each part, where the keys of each row begin and end. Padding sees none: page 0 holds anything.
    whole = [
        (row, at) for row, cached in enumerate(num_cached) for at in range(MAX_KEYS, cached + 1, MAX_KEYS)
    ]
    bounds = [_alone(row, bound, len(lens)) for row, at in whole for bound in (at - MAX_KEYS, at)]
    rest, no_keys = [cached - cached % MAX_KEYS for cached in num_cached], [0] * len(padding)
    bounds += [*rest, *no_keys], [*ends[: len(rest)], *no_keys]
    num_keys = max(num_keys, MIN_KEYS, sum(bounds[-1]) - sum(rest), MAX_KEYS if whole else 0)
    table = pad_table(block_table, rows=len(padding))
    host = torch.tensor([lens, ends, *bounds], dtype=torch.int32, device="cpu")
    cu_seqlens_q, seq_lens, slots, positions, key_slots, cu_seqlens_k = prefill_metadata_op(
        copied_to(block_table.device, host), table, sum(lens), num_keys, page_size
    )
    # No field may be a view of another: Dynamo would guard on their common base, and compile anew for each batch.
    host_lens = torch.stack([host[0], host[1]], dim=1)
    segment = PrefillSegment(
        cu_seqlens_q, seq_lens, table, slots, key_slots, cu_seqlens_k, host_lens, page_size
    )
    return segment, positions


MIN_KEYS = 2
"""A part has at least so many: then torch knows that its parts lie apart."""
MAX_KEYS = 32_768
"""A row's keys are expanded so many at a time, which bounds the workspace: 0.34 GB for 16 heads of DeepSeek-V3 in
bfloat16. They are cut at the multiples of it, so that which keys are a part does not depend on who is beside them."""


def _alone(row: int, value: int, rows: int) -> list[int]:
    """A value for one of the rows, 0 for the others."""
    return [value if i == row else 0 for i in range(rows)]


def pad_table(block_table: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    """`block_table` with so many rows and columns more, none where below 0, of page 0, the dummy page."""
    if rows <= 0 and columns <= 0:
        return block_table
    return torch.nn.functional.pad(block_table, (0, max(0, columns), 0, max(0, rows)))


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A CPU tensor on `device`. The host does not wait for what the device still has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
