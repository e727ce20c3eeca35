"""Launches of the Hopper decode kernels."""

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_compile.latents import FP8
from mla_compile.ops.attention.kernels.fixed_splits import decode_by_fixed_splits, with_unit_strides
from mla_compile.ops.attention.kernels.gluon.narrow import MAX_ROWS, MAX_UNSPLIT_ROWS, narrow_kernel
from mla_compile.ops.attention.kernels.gluon.narrow_fp8 import MAX_ROWS as MAX_FP8_ROWS
from mla_compile.ops.attention.kernels.gluon.narrow_fp8 import narrow_fp8_kernel
from mla_compile.ops.attention.kernels.gluon.split import (
    RANK,
    ROPE,
    TILE,
    Inputs,
    Results,
    Sizes,
    join_kernel,
)
from mla_compile.ops.attention.kernels.gluon.wide import HALF, ROWS, wide_kernel
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.device import device_of, power_of_two
from mla_compile.ops.paging import check_alignment

_JOINERS = 2048
"""The most programs of `join_kernel`: as many as run at once, or a few times more."""


def decode_gluon(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    """`mla_decode` on a Hopper GPU. The host reads no value.

    Raises:
        MLAError: the address of the cache is not a multiple of 16, as bulk copies require.
    """
    operands = with_unit_strides(operands)
    q_latent, rows = operands.q_latent, operands.block_table.shape[0]
    tokens, heads, _ = q_latent.shape
    num_queries = operands.q_len * heads
    is_narrow = num_queries <= MAX_UNSPLIT_ROWS
    block_r = _narrow_rows(operands) if is_narrow else ROWS.value
    units = rows * triton.cdiv(num_queries, block_r)
    programs = device_of(q_latent).multiprocessors

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((tokens, heads), dtype=torch.float32)
    part_out = lse.new_empty((2 * programs, block_r, RANK.value))
    part_lse = lse.new_empty((2 * programs, block_r))
    pieces = lse.new_empty((units, 2), dtype=torch.int32)
    results = Results(out, lse, part_out, part_lse, pieces)
    _attend(operands, results, narrow_rows=block_r if is_narrow else 0)
    # Few units have many pieces each, many units have few.
    columns_each, at_once = (RANK.value, 8) if units * block_r >= 128 else (64, 32)
    column_blocks = RANK.value // columns_each
    share = min(block_r, num_queries, max(1, _JOINERS // (units * column_blocks)))
    join_kernel[(units, column_blocks, share)](
        part_out,
        part_lse,
        pieces,
        out,
        lse,
        rows,
        R=num_queries,
        BLOCK_R=block_r,
        RANK=RANK.value,
        BLOCK_C=columns_each,
        BLOCK_P=at_once,
        num_warps=4,
        launch_pdl=True,
    )
    return out, lse


def decode_gluon_invariant(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    """Batch-invariant `decode_gluon`: a token's bits depend on its own query and keys only.

    The two kernels add in different orders, so the number of heads alone decides which one runs. The narrow kernel's
    order does not depend on how many queries it computes at a time.
    """
    heads = operands.q_latent.shape[1]
    num_queries = operands.q_len * heads
    is_narrow = heads <= MAX_UNSPLIT_ROWS
    narrow_rows = _narrow_rows(operands) if is_narrow else 0

    def launch(part: DecodeOperands, part_out: Tensor, part_lse: Tensor) -> None:
        units = part.seq_lens.shape[0] * triton.cdiv(num_queries, narrow_rows or ROWS.value)
        pieces = part.seq_lens.new_empty((units, 2))
        # The kernel does not write to the first two.
        results = Results(part.q_latent, part_lse, part_out, part_lse, pieces)
        _attend(part, results, narrow_rows=narrow_rows, fixed=True)

    return decode_by_fixed_splits(launch, operands, early=True)


def _attend(operands: DecodeOperands, results: Results, *, narrow_rows: int, fixed: bool = False) -> None:
    """Launch a narrow kernel with `narrow_rows` queries at a time, `wide_kernel` for 0; fixed: over fixed splits."""
    q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale = operands
    check_alignment(kv_cache)
    heads, page_size = q_latent.shape[1], kv_cache.shape[1]
    rows, most_keys = block_table.shape[0], block_table.shape[1] * page_size
    q_blocks = triton.cdiv(q_len * heads, narrow_rows or ROWS.value)
    grid = (device_of(q_latent).multiprocessors,)
    inputs = Inputs(
        *(q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, softmax_scale),
        *(*q_latent.stride()[:2], *q_pe.stride()[:2], block_table.stride(0)),
    )
    units_block = max(32, triton.next_power_of_2(rows * q_blocks))
    box = min(TILE.value, page_size & -page_size)  # its largest power of two
    sizes = Sizes(fixed, q_len, heads, page_size, q_blocks, units_block, box if box >= 8 else 0)
    args = (inputs, results, rows, most_keys, sizes)
    if narrow_rows and kv_cache.dtype == FP8:
        narrow_fp8_kernel[grid](*args, narrow_rows, num_warps=4, launch_pdl=True)
        return
    if narrow_rows:
        warps = 4 if narrow_rows == 16 else 8  # four would spill the wider output
        narrow_kernel[grid](*args, narrow_rows, num_warps=warps, launch_pdl=True)
        return
    boxes = (None, None) if kv_cache.dtype == FP8 else _boxes(kv_cache, max(box, 8))
    wide_kernel[grid](*boxes, *args, num_warps=4, launch_pdl=True)


def _narrow_rows(operands: DecodeOperands) -> int:
    """The queries that the narrow kernel computes at a time."""
    most = MAX_FP8_ROWS if operands.kv_cache.dtype == FP8 else MAX_ROWS
    return min(most, power_of_two(operands.q_len * operands.q_latent.shape[1]))


def _boxes(kv_cache: Tensor, keys: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of a bfloat16 cache, for bulk copies of half the latent and of the rotary part of `keys` tokens."""
    latents = kv_cache.view(-1, RANK.value + ROPE.value)
    swizzled = gl.NVMMASharedLayout(128, 16, rank=2)
    return (
        TensorDescriptor.from_tensor(latents, [keys, HALF.value], swizzled),
        TensorDescriptor.from_tensor(latents, [keys, ROPE.value], swizzled),
    )
