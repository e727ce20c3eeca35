"""Launching the Hopper decode kernels."""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_compile.errors import MLAError
from mla_compile.ops.kernels.gluon.narrow import MOST_ROWS, narrow_kernel
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
    if kv_cache.data_ptr() % 16:
        mend = "give it storage of its own, or name another backend"
        raise MLAError("kv_cache", "an address divisible by 16", kv_cache.data_ptr(), mend)
    tokens, heads, _ = q_latent.shape
    rows, columns = block_table.shape
    page_size = kv_cache.shape[1]
    query_rows = q_len * heads
    q_latent, q_pe, block_table = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe, block_table)
    )
    is_narrow = query_rows <= MOST_ROWS
    block_r = power_of_two(query_rows) if is_narrow else ROWS.value
    q_blocks = triton.cdiv(query_rows, block_r)
    units = rows * q_blocks
    programs = device_of(q_latent).multiprocessors

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((tokens, heads), dtype=torch.float32)
    part_out = lse.new_empty((2 * programs, block_r, RANK.value))
    part_lse = lse.new_empty((2 * programs, block_r))
    pieces = lse.new_empty((units, 2), dtype=torch.int32)
    args = (
        q_latent,
        q_pe,
        kv_cache,
        block_table,
        seq_lens.contiguous(),
        seq_lens if q_lens is None else q_lens.contiguous(),
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
        "Q_LEN": q_len,
        "HEADS": heads,
        "PAGE_SIZE": page_size,
        "UNITS_BLOCK": max(32, triton.next_power_of_2(units)),
    }
    with torch.cuda.device_of(q_latent):  # Triton launches on the current device
        if is_narrow:
            warps = 4 if block_r == 16 else 8  # four would spill the wider output
            narrow_kernel[(programs,)](*args, **sizes, BLOCK_R=block_r, num_warps=warps)
        else:
            box = min(TILE.value, page_size & -page_size)  # the power of two in it
            latents = kv_cache.view(-1, RANK.value + ROPE.value)
            swizzled = gl.NVMMASharedLayout(128, 16, rank=2)
            boxes = (
                TensorDescriptor.from_tensor(latents, [max(box, 8), width], swizzled)
                for width in (HALF.value, ROPE.value)
            )
            wide_kernel[(programs,)](
                *boxes, *args, **sizes, BOX=box if box >= 8 else 0, Q_BLOCKS=q_blocks, num_warps=4
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
