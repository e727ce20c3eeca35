"""The largest number of each row in two launches: that of each part of a row, then that of the parts.

A number and its column become one integer. Integers have no NaN, and no two of a row are equal, so the largest is the
same whatever the parts are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import device_of

_BLOCK = 1024
"""Columns that a program reads at once: 154,880 bfloat16 logits are 152 programs of 16 bytes a thread."""
_JOINED = 256
_PROGRAMS = 16
"""Programs for a multiprocessor, of four warps each: as many as it can run. For more rows, parts are longer."""
_LAST = tl.constexpr(0x7FFFFFFF)
_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _in_order(value):
    """int32 in the order of floats: NaN is the largest, -0 is 0, and none is the least int32."""
    value = value.to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _LAST, bits)
    order = tl.where(value == 0.0, 0, order)
    return tl.where(value != value, _LAST, order)


@triton.jit(do_not_specialize=["blocks"])
def parts_kernel(
    x,  # [rows, COLUMNS], rows x_stride apart
    keys,  # int64 [rows, parts]
    x_stride,
    blocks,  # of a part
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The key of each part's largest number: the lower its column, the larger. Grid `[rows, parts]`."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], -0x80000000, tl.int32)
    at = tl.zeros([BLOCK], tl.int32)
    for block in range(part * blocks, (part + 1) * blocks):
        column = block * BLOCK + tl.arange(0, BLOCK)
        # What is not there comes behind all columns that are, so it is never chosen.
        value = tl.load(x + row * x_stride + column, mask=column < COLUMNS, other=-float("inf"))
        order = _in_order(value)
        at = tl.where(order > best, column, at)
        best = tl.maximum(best, order)
    key = (best.to(tl.int64) << 32) | (at ^ _LAST).to(tl.int64)
    tl.store(keys + row * tl.num_programs(1) + part, tl.max(key, 0))


@triton.jit(do_not_specialize=["parts"])
def join_kernel(
    keys,  # int64 [rows, parts]
    columns,  # int64 [rows]
    parts,
    BLOCK: tl.constexpr,
):
    """The column in the largest key of each row; grid `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], _LEAST, tl.int64)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        key = tl.load(keys + row * parts + part, mask=part < parts, other=_LEAST)
        best = tl.maximum(best, key)
    tl.store(columns + row, (tl.max(best, 0) & _LAST) ^ _LAST)


def argmax_triton(x: Tensor) -> Tensor:
    """What `row_argmax` computes, on the GPU or in Triton's interpreter."""
    rows, columns = x.shape
    of_row = triton.cdiv(columns, _BLOCK)
    blocks = triton.cdiv(of_row, max(1, _PROGRAMS * device_of(x).multiprocessors // rows))
    parts = triton.cdiv(of_row, blocks)
    keys = x.new_empty(rows, parts, dtype=torch.int64)
    out = x.new_empty(rows, dtype=torch.int64)
    parts_kernel[(rows, parts)](x, keys, x.stride(0), blocks, COLUMNS=columns, BLOCK=_BLOCK, num_warps=4)
    join_kernel[(rows,)](keys, out, parts, BLOCK=_JOINED, num_warps=1)
    return out
