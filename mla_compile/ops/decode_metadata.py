"""`mla_decode_metadata`: lengths, slots and positions of rows that decode, from what they have cached.

One op, so that a compiled step computes them once. As plain torch they are pointwise nodes, and Inductor computes such
an input of a custom op anew for every op that reads it: in each layer.
"""

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.kernels.plan import triton_serves
from mla_compile.ops.library import define_op
from mla_compile.ops.paging import slots_of

_Metadata = tuple[Tensor, Tensor, Tensor, Tensor]


def _fake(
    num_cached: Tensor, block_table: Tensor, q_lens: Tensor | None, q_len: int, page_size: int
) -> _Metadata:
    validate.decode_metadata(num_cached, block_table, q_lens, q_len, page_size)
    rows = num_cached.shape[0]
    slots, positions = (num_cached.new_empty(rows * q_len, dtype=torch.int64) for _ in range(2))
    return num_cached.new_empty(rows), num_cached.new_empty(rows), slots, positions


@define_op(
    "mla_decode_metadata(Tensor num_cached, Tensor block_table, Tensor? q_lens, SymInt q_len, int page_size) "
    "-> (Tensor seq_lens, Tensor valid, Tensor slot_mapping, Tensor positions)",
    fake=_fake,
)
def decode_metadata_op(
    num_cached: Tensor, block_table: Tensor, q_lens: Tensor | None, q_len: int, page_size: int
) -> _Metadata:
    if triton_serves(num_cached.device) and num_cached.shape[0] > 0:
        from mla_compile.ops.kernels.decode_metadata import decode_metadata_triton

        return decode_metadata_triton(num_cached, block_table, q_lens, q_len, page_size)
    return decode_metadata_torch(num_cached, block_table, q_lens, q_len, page_size)


def decode_metadata_torch(
    num_cached: Tensor, block_table: Tensor, q_lens: Tensor | None, q_len: int, page_size: int
) -> _Metadata:
    """`mla_decode_metadata` in plain torch: every device."""
    valid = torch.full_like(num_cached, q_len) if q_lens is None else q_lens.clone()
    end = num_cached + valid
    positions = num_cached[:, None].long() + torch.arange(q_len, device=num_cached.device)
    slots = slots_of(block_table, positions, page_size, positions < end[:, None])
    return torch.where(valid > 0, end, 0), valid, slots.view(-1), positions.view(-1)


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
    if not torch.compiler.is_compiling():
        validate.decode_metadata(num_cached, block_table, q_lens, q_len, page_size)
    metadata: _Metadata = decode_metadata_op(num_cached, block_table, q_lens, q_len, page_size)
    return metadata
