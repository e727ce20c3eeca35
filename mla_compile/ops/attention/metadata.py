"""`mla_decode_metadata`, `mla_prefill_metadata`: slots and visible keys of the tokens of decode rows and of chunks.

They are ops so that a compiled step computes them once, in one launch each. As plain torch they would be pointwise
nodes, which Inductor recomputes for every custom op that reads them: in each layer.
"""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.dispatch import SOME, reference, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import slots_of
from mla_compile.torch_internals import statically_known_true

DECODE_METADATA = (
    triton(
        "one launch, a row a program",
        "mla_compile.ops.attention.kernels.decode_metadata:decode_metadata_triton",
        constraints={"rows": SOME},
    ),
    reference("mla_compile.ops.attention.metadata:decode_metadata_torch"),
)


@define_op(
    table=DECODE_METADATA,
    layouts={
        "num_cached": "int32 rows",
        "q_lens": "int32 rows or None",
        "block_table": validate.TABLE,
    },
    static="page_size",
    returns=("seq_lens", "valid", "slot_mapping", "positions"),
)
def mla_decode_metadata(
    num_cached: Tensor, block_table: Tensor, q_lens: Tensor | None, *, q_len: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, positions and visible keys of the next `q_len` tokens of each row.

    Args:
        num_cached: a row's tokens in the cache, int32 `[rows]`; negative only in an inactive row.
        block_table: int32 `[rows, max_pages]`.
        q_lens: valid query tokens per row, int32 `[rows]`; 0 for an inactive row. None means all `q_len`.
        q_len: query tokens per row, >= 1.
        page_size: tokens per cache page, >= 1.

    Returns:
        seq_lens: keys visible to a row's last valid query token, int32 `[rows]`; 0 for an inactive row.
        valid: `q_lens`, also if that is None, int32 `[rows]`.
        slot_mapping: int64 `[rows * q_len]`; -1 for a token that is not valid or is past the table.
        positions: int64 `[rows * q_len]`.
    """
    validate.whole_number("q_len", q_len, 1)
    validate.whole_number("page_size", page_size, 1)
    rows = num_cached.shape[0]
    slots, positions = (empty(num_cached, (rows * q_len,), torch.int64) for _ in range(2))
    return empty(num_cached, (rows,)), empty(num_cached, (rows,)), slots, positions


def decode_metadata_torch(
    num_cached: Tensor, block_table: Tensor, q_lens: Tensor | None, q_len: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mla_decode_metadata` in plain torch, for every device."""
    valid = torch.full_like(num_cached, q_len) if q_lens is None else q_lens.clone()
    end = num_cached + valid
    positions = num_cached[:, None].long() + torch.arange(q_len, device=num_cached.device)
    row = torch.arange(len(num_cached), device=num_cached.device)
    slots = slots_of(block_table, row[:, None], positions, page_size, positions < end[:, None])
    # Clones: compiled code guards on the sizes of a view's base.
    return torch.where(valid > 0, end, 0), valid, slots.view(-1).clone(), positions.view(-1).clone()


_PrefillMetadata = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

PREFILL_METADATA = (
    triton(
        "one launch",
        "mla_compile.ops.attention.kernels.prefill_metadata:prefill_metadata_triton",
        constraints={"rows": range(1, 4097), "max_pages": SOME},
    ),
    reference("mla_compile.ops.attention.metadata:prefill_metadata_torch"),
)


@define_op(
    table=PREFILL_METADATA,
    layouts={
        "block_table": validate.TABLE,
        "lens": "int64 rows, 2",
        "bounds": "int64 rows, 2 * parts",
    },
    static="page_size",
    returns=("cu_seqlens_q", "seq_lens", "slot_mapping", "positions", "key_slots", "cu_seqlens_k"),
)
def mla_prefill_metadata(
    lens: Tensor, bounds: Tensor, block_table: Tensor, *, tokens: int, keys: int, page_size: int
) -> _PrefillMetadata:
    """Slots, positions and visible keys of prompt chunks.

    Args:
        lens: for each row the length of its chunk, and of context and chunk together, int64 `[rows, 2]`.
        bounds: for each part the position of a row's first key, and the one after its last, int64 `[rows, 2 * parts]`.
            A padding row has no keys; any other row has its last key in the last part.
        block_table: int32 `[rows, max_pages]`.
        tokens: the total of all chunks.
        keys: the size of a part in `key_slots`, at least the keys of any part.
        page_size: tokens per cache page, >= 1.

    Returns:
        cu_seqlens_q, seq_lens, slot_mapping, key_slots, cu_seqlens_k: see `PrefillSegment`.
        positions: int64 `[tokens]`.
    """
    validate.whole_number("page_size", page_size, 1)
    rows, parts, like = bounds.shape[0], bounds.shape[1] // 2, block_table
    if statically_known_true(bounds.shape[1] % 2 != 0) or statically_known_true(parts < 1):
        raise MLAError("bounds", "two columns for each part", list(bounds.shape))
    cu_seqlens_q, seq_lens = empty(like, (rows + 1,)), empty(like, (rows,))
    slots, positions = (empty(like, (tokens,), torch.int64) for _ in range(2))
    key_slots, cu_seqlens_k = empty(like, (parts, keys), torch.int64), empty(like, (parts, rows + 1))
    return cu_seqlens_q, seq_lens, slots, positions, key_slots, cu_seqlens_k


prefill_metadata_op = torch.ops.mla_compile.mla_prefill_metadata.default


def prefill_metadata_torch(
    lens: Tensor, bounds: Tensor, block_table: Tensor, tokens: int, keys: int, page_size: int
) -> _PrefillMetadata:
    """`mla_prefill_metadata` in plain torch, for every device."""
    (q_lens, seq_lens), (starts, stops) = lens.unbind(1), (bounds[:, ::2], bounds[:, 1::2])

    def spread(first: Tensor, count: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
        """`count[r]` places for each row r, one row after the other. Returns each place's row, its position, which
        begins at `first[r]`, and whether it belongs to a row."""
        ends = count.cumsum(0)
        place = torch.arange(places, device=lens.device)
        row = torch.searchsorted(ends, place, right=True).clamp(max=len(count) - 1)
        return row, place + (first - ends + count)[row], place < ends[-1]

    row, positions, _ = spread(seq_lens - q_lens, q_lens, tokens)
    slots = slots_of(block_table, row, positions, page_size, (stops[:, -1] > 0)[row])
    slots_of_part = []
    for start, stop in zip(starts.unbind(1), stops.unbind(1), strict=True):
        row, position, inside = spread(start, stop - start, keys)
        slots_of_part.append(slots_of(block_table, row, position, page_size, inside))
    cu_seqlens_q, cu_seqlens_k = (
        torch.nn.functional.pad(x.cumsum(-1, dtype=torch.int32), (1, 0)) for x in (q_lens, (stops - starts).T)
    )
    key_slots = torch.stack(slots_of_part)
    return cu_seqlens_q, seq_lens.to(torch.int32), slots, positions, key_slots, cu_seqlens_k
