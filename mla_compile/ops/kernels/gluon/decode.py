"""Launching the Hopper decode kernels."""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_compile.errors import MLAError
from mla_compile.ops.kernels.fixed_splits import decode_by_fixed_splits
from mla_compile.ops.kernels.gluon.narrow import MOST_ROWS, MOST_UNSPLIT_ROWS, narrow_kernel
from mla_compile.ops.kernels.gluon.split import RANK, ROPE, TILE, join_kernel
from mla_compile.ops.kernels.gluon.wide import HALF, ROWS, wide_kernel
from mla_compile.ops.kernels.plan import device_of, power_of_two

_JOINERS = 2048
"""Programs that join; as many as are at work at once, or a few times more."""


def decode_gluon(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """What `mla_decode` computes, with its arguments, on a Hopper GPU. Nothing is read on the host.

    Raises:
        MLAError: a cache at an address that the hardware's copies do not take.
    """
    tokens, heads, _ = q_latent.shape
    rows = block_table.shape[0]
    query_rows = q_len * heads
    q_latent, q_pe, block_table = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe, block_table)
    )
    is_narrow = query_rows <= MOST_UNSPLIT_ROWS
    block_r = power_of_two(query_rows) if is_narrow else ROWS.value
    units = rows * triton.cdiv(query_rows, block_r)
    programs = device_of(q_latent).multiprocessors

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((tokens, heads), dtype=torch.float32)
    part_out = lse.new_empty((2 * programs, block_r, RANK.value))
    part_lse = lse.new_empty((2 * programs, block_r))
    pieces = lse.new_empty((units, 2), dtype=torch.int32)
    lens = seq_lens.contiguous(), None if q_lens is None else q_lens.contiguous()
    with torch.cuda.device_of(q_latent):  # Triton launches on the current device
        _attend(
            *(q_latent, q_pe, kv_cache, block_table, *lens, q_len, softmax_scale),
            *(out, lse, part_out, part_lse, pieces),
            narrow_rows=block_r if is_narrow else 0,
        )
        # Few units are cut into many pieces each, many into few.
        columns_each, at_once = (RANK.value, 8) if units * block_r >= 128 else (64, 32)
        column_blocks = RANK.value // columns_each
        share = min(block_r, query_rows, max(1, _JOINERS // (units * column_blocks)))
        join_kernel[(units, column_blocks, share)](
            part_out,
            part_lse,
            pieces,
            out,
            lse,
            rows,
            R=query_rows,
            BLOCK_R=block_r,
            RANK=RANK.value,
            BLOCK_C=columns_each,
            BLOCK_P=at_once,
            num_warps=4,
            launch_pdl=True,
        )
    return out, lse


def decode_gluon_invariant(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """`decode_gluon` that gives a token the same bits whatever else is in the call, the other tokens of its row too.

    The two kernels add in different orders, so which one runs follows from the number of heads alone. The narrow one
    adds in the same order however many query rows it takes at a time.
    """
    heads = q_latent.shape[1]
    narrow_rows = min(MOST_ROWS, power_of_two(q_len * heads)) if heads <= MOST_UNSPLIT_ROWS else 0

    def launch(
        q_latent: Tensor,
        q_pe: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        q_lens: Tensor | None,
        part_out: Tensor,
        part_lse: Tensor,
    ) -> None:
        units = seq_lens.shape[0] * triton.cdiv(q_len * heads, narrow_rows or ROWS.value)
        pieces = seq_lens.new_empty((units, 2))
        _attend(
            *(q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale),
            *(q_latent, part_lse, part_out, part_lse, pieces),  # the first two are not written to
            narrow_rows=narrow_rows,
            fixed=True,
        )

    q_latent, q_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe))
    return decode_by_fixed_splits(
        launch, q_latent, q_pe, block_table, seq_lens, q_lens, q_len, kv_cache.shape[1], early=True
    )


def _attend(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    pieces: Tensor,
    *,
    narrow_rows: int,
    fixed: bool = False,
) -> None:
    """Launch `narrow_kernel` with so many query rows at a time, or for 0 `wide_kernel`; fixed: over fixed splits."""
    if kv_cache.data_ptr() % 16:
        mend = "give it storage of its own, or name another backend"
        raise MLAError("kv_cache", "an address divisible by 16", kv_cache.data_ptr(), mend)
    heads, page_size = q_latent.shape[1], kv_cache.shape[1]
    rows, columns = block_table.shape
    q_blocks = triton.cdiv(q_len * heads, narrow_rows or ROWS.value)
    grid = (device_of(q_latent).multiprocessors,)
    args = (
        q_latent,
        q_pe,
        kv_cache,
        block_table,
        seq_lens,
        seq_lens if q_lens is None else q_lens,
        out,
        lse,
        part_out,
        part_lse,
        pieces,
        softmax_scale,
        rows,
        columns * page_size,
        *q_latent.stride()[:2],
        *q_pe.stride()[:2],
        block_table.stride(0),
    )
    sizes = {
        "HAS_Q_LENS": q_lens is not None,
        "FIXED": fixed,
        "Q_LEN": q_len,
        "HEADS": heads,
        "PAGE_SIZE": page_size,
        "Q_BLOCKS": q_blocks,
        "UNITS_BLOCK": max(32, triton.next_power_of_2(rows * q_blocks)),
    }
    if narrow_rows:
        warps = 4 if narrow_rows == 16 else 8  # four would spill the wider output
        narrow_kernel[grid](*args, **sizes, BLOCK_R=narrow_rows, num_warps=warps, launch_pdl=True)
        return
    box = min(TILE.value, page_size & -page_size)  # the power of two in it
    latents = kv_cache.view(-1, RANK.value + ROPE.value)
    swizzled = gl.NVMMASharedLayout(128, 16, rank=2)
    boxes = (
        TensorDescriptor.from_tensor(latents, [max(box, 8), width], swizzled)
        for width in (HALF.value, ROPE.value)
    )
    wide_kernel[grid](*boxes, *args, **sizes, BOX=box if box >= 8 else 0, num_warps=4, launch_pdl=True)
