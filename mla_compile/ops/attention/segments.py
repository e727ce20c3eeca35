"""Builders of decode and prefill segments; `pack_batch` builds a whole batch from rows of both kinds.

`decode_segment` may run inside a compiled step.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, PrefillSegment
from mla_compile.ops import validate
from mla_compile.ops.attention.metadata import mla_decode_metadata, prefill_metadata_op
from mla_compile.torch_internals import refuse, run_check


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

    A row with `q_lens` 0 is inactive: it sees nothing and writes nowhere. `backend`: see `DecodeSegment`.

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

    num_tokens: pad to at least this number of tokens, with padding chunks that write nowhere.
    num_chunks: pad to at least this number of chunks, with empty ones.
    num_keys: pad `key_slots` to at least this number of keys.

    Returns the segment and the tokens' positions, int64 `[tokens]`, on the device of `block_table`.

    Raises:
        MLAError: lists of different lengths, a chunk shorter than 1, or a row that its table cannot hold.
    """
    run_check(validate.row_lengths, "chunk_lens", chunk_lens, num_cached, block_table, page_size)
    if not chunk_lens:
        refuse("chunk_lens", "at least one chunk", "none", "a batch without prompts has no prefill segment")
    for name, number in (("num_tokens", num_tokens), ("num_chunks", num_chunks), ("num_keys", num_keys)):
        run_check(validate.whole_number, name, number, 0)
    lens, bounds = chunk_lens_and_bounds(
        chunk_lens,
        num_cached,
        num_tokens=num_tokens,
        num_chunks=num_chunks,
        capacity=block_table.shape[1] * page_size,
    )
    table = pad_table(block_table, rows=len(lens) - len(chunk_lens))
    host_lens, host_bounds = torch.tensor(lens, device="cpu"), torch.tensor(bounds, device="cpu")
    device, tokens = table.device, max(num_tokens, sum(chunk_lens))
    given = copied_to(device, host_lens), copied_to(device, host_bounds)
    cu_seqlens_q, seq_lens, slots, positions, key_slots, cu_seqlens_k = prefill_metadata_op(
        *given, table, tokens, max(num_keys, most_keys(bounds)), page_size
    )
    segment = PrefillSegment(
        cu_seqlens_q, seq_lens, table, slots, key_slots, cu_seqlens_k, host_lens.to(torch.int32), page_size
    )
    return segment, positions


MIN_KEYS = 2
"""The least size of a part: with 2 or more keys torch knows that parts do not overlap."""
MAX_KEYS = 32_768
"""The keys of a row that are expanded at once. It bounds the workspace: 0.34 GB for 16 heads of DeepSeek-V3 in
bfloat16. Keys are cut at its multiples, so the parts of a row do not depend on the other rows."""


def chunk_lens_and_bounds(
    chunk_lens: Sequence[int], num_cached: Sequence[int], *, num_tokens: int, num_chunks: int, capacity: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The arguments `lens` and `bounds` of `mla_prefill_metadata`, with padding; see `prefill_segment`.

    capacity: the most tokens of a row.
    """
    lens: list[list[int]] = []
    bounds: list[list[int]] = []
    whole: list[tuple[int, int]] = []
    for row, (n, cached) in enumerate(zip(chunk_lens, num_cached, strict=True)):
        begin = cached - cached % MAX_KEYS
        lens.append([n, cached + n])
        bounds.append([begin, cached + n])
        whole += [(row, at) for at in range(0, begin, MAX_KEYS)]
    for row, last in enumerate(bounds if whole else ()):
        parts = ((at, at + MAX_KEYS) if row == owner else (0, 0) for owner, at in whole)
        bounds[row] = [*chain.from_iterable(parts), *last]
    padding = [min(capacity, rest) for rest in range(num_tokens - sum(chunk_lens), 0, -capacity)]
    padding += [0] * (num_chunks - len(lens) - len(padding))
    # Padding sees no key, as the content of page 0 is undefined.
    no_keys = [[0] * (2 * len(whole) + 2) for _ in padding]
    return [*lens, *([n, n] for n in padding)], [*bounds, *no_keys]


def most_keys(bounds: Sequence[Sequence[int]]) -> int:
    """The keys of the largest part, at least `MIN_KEYS`."""
    counts = [sum(row[i + 1] - row[i] for row in bounds) for i in range(0, len(bounds[0]), 2)]
    return max(MIN_KEYS, *counts)


def pad_table(block_table: Tensor, *, rows: int = 0, columns: int = 0) -> Tensor:
    """`block_table` with more rows and columns of page 0, the dummy page; none for numbers below 0."""
    if rows <= 0 and columns <= 0:
        return block_table
    return torch.nn.functional.pad(block_table, (0, max(0, columns), 0, max(0, rows)))


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """A copy of a CPU tensor on `device`. The host does not wait for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
