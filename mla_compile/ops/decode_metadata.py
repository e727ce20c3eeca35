"""`mla_decode_metadata`: lengths, slots and positions of rows that decode, from what they have cached.

One op, so that a compiled step computes them once. As plain torch they are pointwise nodes, and Inductor computes such
an input of a custom op anew for every op that reads it: in each layer.
"""

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.implementations import SOME, reference, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import slots_of

_Metadata = tuple[Tensor, Tensor, Tensor, Tensor]

DECODE_METADATA = (
    triton(
        "one launch, a row a program",
        "mla_compile.ops.kernels.decode_metadata:decode_metadata_triton",
        takes={"rows": SOME},
    ),
    reference("mla_compile.ops.decode_metadata:decode_metadata_torch"),
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
) -> _Metadata:
    """Where the next `q_len` tokens of rows go, and what they see.

    Args:
        num_cached: tokens that a row holds, int32 `[rows]`; negative only in a row that is inactive.
        block_table: int32 `[rows, max_pages]`.
        q_lens: valid query tokens per row, int32 `[rows]`; None means all `q_len`, 0 that a row is inactive.
        q_len: query tokens per row, >= 1.
        page_size: tokens per cache page, >= 1.

    Returns:
        seq_lens: keys visible to a row's last valid query token, int32 `[rows]`; 0 for an inactive row.
        valid: `q_lens`, written out, int32 `[rows]`.
        slot_mapping: int64 `[rows * q_len]`; -1 for a token that is not valid or that the table cannot hold.
        positions: int64 `[rows * q_len]`.

    Raises:
        MLAError: an argument that is not so, named.
    """
    validate.whole_number("q_len", q_len, 1)
    validate.whole_number("page_size", page_size, 1)
    rows = num_cached.shape[0]
    slots, positions = (empty(num_cached, (rows * q_len,), torch.int64) for _ in range(2))
    return empty(num_cached, (rows,)), empty(num_cached, (rows,)), slots, positions


def decode_metadata_torch(
    num_cached: Tensor, block_table: Tensor, q_lens: Tensor | None, q_len: int, page_size: int
) -> _Metadata:
    """`mla_decode_metadata` in plain torch: every device."""
    valid = torch.full_like(num_cached, q_len) if q_lens is None else q_lens.clone()
    end = num_cached + valid
    positions = num_cached[:, None].long() + torch.arange(q_len, device=num_cached.device)
    slots = slots_of(block_table, positions, page_size, positions < end[:, None])
    return torch.where(valid > 0, end, 0), valid, slots.view(-1), positions.view(-1)
