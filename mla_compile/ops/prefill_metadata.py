"""`mla_prefill_metadata`: where the tokens of prompt chunks go and which keys they see, from a few lengths.

One op, for one launch: what it computes is small, and as plain torch it would cost the host more than a step may.
"""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.implementations import SOME, reference, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import slots_of
from mla_compile.torch_internals import statically_known_true

_Metadata = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

PREFILL_METADATA = (
    triton(
        "one launch",
        "mla_compile.ops.kernels.prefill_metadata:prefill_metadata_triton",
        takes={"rows": range(1, 4097), "pages": SOME},
    ),
    reference("mla_compile.ops.prefill_metadata:prefill_metadata_torch"),
)


@define_op(
    table=PREFILL_METADATA,
    facts=lambda block_table: {"rows": block_table.shape[0], "pages": block_table.shape[1]},
    static="page_size",
    returns=("cu_seqlens_q", "seq_lens", "slot_mapping", "positions", "key_slots", "cu_seqlens_k"),
)
def mla_prefill_metadata(
    lens: Tensor, block_table: Tensor, *, tokens: int, keys: int, page_size: int
) -> _Metadata:
    """Where chunks write, and what they see.

    Args:
        lens: int32 `[2 + 2 * parts, rows]`: the lengths of the chunks, then those of context and chunk together; then
            for each part the position of a row's first key in it, and the one behind the last. A row of padding has no
            keys; any other one has its last key in the last part.
        block_table: int32 `[rows, max_pages]`.
        tokens: of all chunks together.
        keys: places for the keys of a part, at least as many as any part has.
        page_size: tokens per cache page, >= 1.

    Returns:
        cu_seqlens_q, seq_lens, slot_mapping, key_slots, cu_seqlens_k: see `PrefillSegment`.
        positions: int64 `[tokens]`.

    Raises:
        MLAError: an argument that is not so, named.
    """
    validate.whole_number("page_size", page_size, 1)
    validate.Layouts().check("lens", lens, "lens, rows", dtype=torch.int32, like=block_table)
    validate.Layouts().table(block_table)
    rows, parts = lens.shape[1], lens.shape[0] // 2 - 1
    if statically_known_true(rows != block_table.shape[0]):
        raise MLAError("lens", f"a column for each of {block_table.shape[0]} rows", list(lens.shape))
    if statically_known_true(parts < 1):
        raise MLAError("lens", "two rows of lengths and two for each part", list(lens.shape))
    slots, positions = (empty(lens, (tokens,), torch.int64) for _ in range(2))
    key_slots = empty(lens, (parts, keys), torch.int64)
    return (
        empty(lens, (rows + 1,)),
        empty(lens, (rows,)),
        slots,
        positions,
        key_slots,
        empty(lens, (parts, rows + 1)),
    )


prefill_metadata_op = torch.ops.mla_compile.mla_prefill_metadata.default


def prefill_metadata_torch(
    lens: Tensor, block_table: Tensor, tokens: int, keys: int, page_size: int
) -> _Metadata:
    """`mla_prefill_metadata` in plain torch: every device."""
    q_lens, seq_lens, starts, stops = lens[0], lens[1], lens[2::2], lens[3::2]

    def spread(first: Tensor, count: Tensor, places: int) -> tuple[Tensor, Tensor, Tensor]:
        """`count[r]` places for each row r, one row after the other: the row of a place, its position, which begins at
        `first[r]`, and whether it is any row's."""
        ends = count.cumsum(0)
        place = torch.arange(places, device=lens.device)
        row = torch.searchsorted(ends, place, right=True).clamp(max=len(count) - 1)
        return row, place + (first - ends + count)[row], place < ends[-1]

    row, positions, _ = spread(seq_lens - q_lens, q_lens, tokens)
    slots = slots_of(block_table[row], positions[:, None], page_size, (stops[-1] > 0)[row, None])
    slots_of_part = []
    for start, stop in zip(starts, stops, strict=True):
        row, position, inside = spread(start, stop - start, keys)
        slots_of_part.append(slots_of(block_table[row], position[:, None], page_size, inside[:, None]))
    cu_seqlens_q, cu_seqlens_k = (
        torch.nn.functional.pad(x.cumsum(-1, dtype=torch.int32), (1, 0)) for x in (q_lens, stops - starts)
    )
    key_slots = torch.cat(slots_of_part, dim=1).T.contiguous()
    return cu_seqlens_q, seq_lens.clone(), slots[:, 0], positions, key_slots, cu_seqlens_k
