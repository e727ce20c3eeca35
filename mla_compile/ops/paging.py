"""Index arithmetic of the paged latent cache, shared by all backends."""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.latents import FP8, pack, unpack


def slots_of(
    block_table: Tensor, row: Tensor, positions: Tensor, page_size: int, valid: Tensor | None = None
) -> Tensor:
    """Cache slots of token positions, int64, -1 where a token writes nowhere.

    block_table: int32 `[rows, max_pages]`; row, positions: int, the row and the position of each token, of shapes that
    broadcast; valid: bool, of the positions' shape. A position that is not valid, is negative or is past the table
    writes nowhere, and the table is never read out of bounds.
    """
    page = positions // page_size
    inside = (positions >= 0) & (page < block_table.shape[1])
    if valid is not None:
        inside = inside & valid
    pages = block_table[row, page.clamp(0, block_table.shape[1] - 1)].long()
    return torch.where(inside, pages * page_size + positions % page_size, -1)


def write_latents(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write latents and rotary keys `[tokens, ...]` to their slots of `kv_cache`; slot -1 writes nowhere."""
    if kv_c.shape[0] == 0:
        return
    latents = pack(kv_c, k_pe) if kv_cache.dtype == FP8 else torch.cat([kv_c, k_pe], dim=-1)
    flat = kv_cache.view(-1, kv_cache.shape[-1])
    # "Writes nowhere" without a data-dependent shape: a masked token repeats the write of the first valid one
    # (same value, same slot). Without a valid token all rewrite slot 0 with its current value.
    valid = slot_mapping >= 0
    first = valid.to(torch.int32).argmax()
    source = torch.where(valid, torch.arange(latents.shape[0], device=latents.device), first)
    slots = slot_mapping.index_select(0, source).clamp(min=0)
    values = torch.where(valid.any(), latents.index_select(0, source), flat[:1])
    flat.index_copy_(0, slots, values)


def row_of(token: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """The row of each token of prompt chunks, by the prefix sum of their lengths; the last row for padding."""
    row = torch.searchsorted(cu_seqlens_q[1:], token.to(torch.int32), right=True)
    return row.clamp(max=cu_seqlens_q.shape[0] - 2)


def visible_keys(seq_lens: Tensor, q_lens: Tensor | None, q_len: int) -> Tensor:
    """Number of keys that each query token of a decode row sees, int32 `[rows, q_len]`.

    Token `j` of a row with `n` valid query tokens sees `max(0, seq_len - (n - 1 - j))` keys; tokens with
    `j >= n` see none. `n` is `q_lens`, or `q_len` if that is None.
    """
    token = torch.arange(q_len, device=seq_lens.device, dtype=torch.int32)
    valid = torch.full_like(seq_lens, q_len) if q_lens is None else q_lens
    bounds = seq_lens[:, None] - (valid[:, None] - 1 - token)
    return torch.where(token < valid[:, None], bounds, 0).clamp(min=0)


def num_pages_to_read(seq_lens: Tensor, block_table: Tensor, page_size: int) -> int:
    """Columns of `block_table` that some row needs, at least 1.

    On the CPU the longest row decides. A row that the table cannot hold raises `MLAError`, in compiled code too. On a
    device no length is read, so every column counts.
    """
    columns = block_table.shape[1]
    if seq_lens.device.type != "cpu" or seq_lens.numel() == 0:
        return columns
    longest = int(seq_lens.max())
    check_capacity("seq_lens", longest, columns, page_size)
    return max(1, -(-longest // page_size))


def check_capacity(name: str, longest: int, columns: int, page_size: int) -> None:
    """Raises `MLAError` if the longest row does not fit its `columns` pages."""
    if longest > columns * page_size:
        expected = f"at most {columns * page_size} tokens (block_table has {columns} pages of {page_size})"
        raise MLAError(name, expected, longest, "widen block_table")


def check_alignment(kv_cache: Tensor) -> None:
    """Raises `MLAError` if bulk copies cannot read a cache: they need an address divisible by 16."""
    if kv_cache.data_ptr() % 16:
        hint = "give it storage of its own, or select another backend"
        raise MLAError("kv_cache", "an address divisible by 16", kv_cache.data_ptr(), hint)


def read_latents(kv_cache: Tensor, index: Tensor, kv_lora_rank: int, dtype: torch.dtype) -> Tensor:
    """Entries of a cache, along its first dimension: latents and rotary keys `[..., kv_lora_rank + qk_rope_head_dim]`.

    FP8 latents are returned in `dtype`, others in their own.
    """
    found = kv_cache.index_select(0, index)
    return unpack(found, kv_lora_rank, dtype) if kv_cache.dtype == FP8 else found


def gather_latents(
    kv_cache: Tensor,
    block_table: Tensor,
    columns: int,
    seq_lens: Tensor,
    kv_lora_rank: int,
    dtype: torch.dtype,
) -> Tensor:
    """Latents of the pages in the first `columns` of the table, `[rows, columns * page_size, width]`: `read_latents`.

    Positions at or past a row's `seq_lens` are zeros, whatever the memory holds (`0 x NaN` is NaN). Table entries that
    only serve such positions are never followed.
    """
    page_size = kv_cache.shape[1]
    rows = block_table.shape[0]
    position = torch.arange(columns * page_size, device=kv_cache.device)
    live = position < seq_lens[:, None]
    pages = torch.where(live[:, ::page_size], block_table[:, :columns], 0)
    latents = read_latents(kv_cache, pages.reshape(-1), kv_lora_rank, dtype).view(rows, len(position), -1)
    return latents.masked_fill_(~live[..., None], 0)
