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
    device, count = block_table.device, sum(chunk_lens)
    padding = [min(capacity, rest) for rest in range(num_tokens - count, 0, -capacity)]
    padding += [0] * (num_chunks - len(chunk_lens) - len(padding))
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
    # Chunks of nobody see no key: page 0 holds anything.
    given = torch.nn.functional.pad(torch.tensor([num_cached, chunk_lens], device="cpu"), (0, len(padding)))
    key_slots, cu_seqlens_k = _keys(given[0], given[1], block_table, page_size=page_size, num_keys=num_keys)
    # No field may be a view of another: Dynamo would guard on their common base, and compile anew for each batch.
    host_lens = torch.stack([host[0], host[1]], dim=1)
    segment = PrefillSegment(
        cu_seqlens_q, seq_lens.clone(), block_table, slots, key_slots, cu_seqlens_k, host_lens, page_size
    )
    return segment, positions


MIN_KEYS = 2
"""A part has at least so many: then torch knows that its parts lie apart."""
MAX_KEYS = 32_768
"""Keys that are expanded at a time: it bounds the workspace, 0.34 GB for 16 heads of DeepSeek-V3 in bfloat16."""


def _keys(
    context: Tensor, new: Tensor, block_table: Tensor, *, page_size: int, num_keys: int
) -> tuple[Tensor, Tensor]:
    """`key_slots` and `cu_seqlens_k` of rows with so many tokens before this call and in it, int64 `[rows]`, CPU."""
    # Where each row's keys of each part start and stop, `[parts, rows]`.
    if int((context + new).sum()) <= MAX_KEYS:
        starts, stops = torch.zeros_like(context)[None], (context + new)[None]
    else:  # the context one row after the other, cut every MAX_KEYS keys; then all new tokens
        ends = context.cumsum(0)
        first = torch.arange(0, int(ends[-1]), MAX_KEYS, device="cpu")[:, None]
        starts, stops = (
            (at - (ends - context)).clamp(min=0).minimum(context) for at in (first, first + MAX_KEYS)
        )
        starts, stops = torch.cat([starts, context[None]]), torch.cat([stops, (context + new)[None]])
    lens = stops - starts
    cu_seqlens_k = torch.nn.functional.pad(lens.cumsum(1, dtype=torch.int32), (1, 0))
    counts = cu_seqlens_k[:, -1].tolist()
    device, flat, total = block_table.device, lens.flatten(), sum(counts)
    # A key's position is its index among all keys, plus what is the same for all of its row in its part.
    rows = torch.arange(lens.shape[1], device="cpu").repeat(len(lens))
    given = torch.stack([flat, rows, starts.flatten() - flat.cumsum(0) + flat])
    flat, rows, shifts = copied_to(device, given)
    row, shift = (torch.repeat_interleave(x, flat, output_size=total) for x in (rows, shifts))
    position = torch.arange(total, device=device) + shift
    slots = block_table[row, position // page_size].long() * page_size + position % page_size
    key_slots = torch.full((len(lens), max(num_keys, MIN_KEYS, *counts)), -1, device=device)
    for part, keys in zip(key_slots, slots.split(counts)):
        part[: len(keys)] = keys
    return key_slots, copied_to(device, cu_seqlens_k)


def pad_table(block_table: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    """`block_table` with so many rows and columns more, none where below 0, of page 0, the dummy page."""
    if rows <= 0 and columns <= 0:
        return block_table
    return torch.nn.functional.pad(block_table, (0, max(0, columns), 0, max(0, rows)))


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A CPU tensor on `device`. The host does not wait for what the device still has to do."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
