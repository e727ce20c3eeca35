"""Argmax along the last dimension in two launches: over each split of a matrix row, then over the splits.

A number and its column are packed into one integer key. Keys have no NaN, and no two keys of a matrix row are equal, so
the result does not depend on the splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import device_of

_BLOCK = 1024
"""Columns per iteration: 154,880 bfloat16 logits make 152 programs, which load 16 bytes per thread."""
_JOINED = 256
_PROGRAMS = 16
"""Programs of four warps per multiprocessor: as many as it can run. More matrix rows get longer splits."""
_LAST = tl.constexpr(0x7FFFFFFF)
_LEAST = tl.constexpr(-(2**63))


@triton.jit
def _in_order(value):
    """Map floats to int32 in the same order: NaN is the largest, -0 equals 0. No float maps to the least int32."""
    value = value.to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _LAST, bits)
    order = tl.where(value == 0.0, 0, order)
    return tl.where(value != value, _LAST, order)


@triton.jit(do_not_specialize=["blocks"])
def parts_kernel(
    x,  # [rows, COLUMNS], strides (x_stride, 1)
    keys,  # int64 [rows, splits]
    x_stride,
    blocks,  # blocks per split
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key of each split; among equal numbers the lowest column has it. Grid `[rows, splits]`."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], -0x80000000, tl.int32)
    at = tl.zeros([BLOCK], tl.int32)
    for block in range(part * blocks, (part + 1) * blocks):
        column = block * BLOCK + tl.arange(0, BLOCK)
        # Padding has higher columns than all numbers, so it never wins.
        value = tl.load(x + row * x_stride + column, mask=column < COLUMNS, other=-float("inf"))
        order = _in_order(value)
        at = tl.where(order > best, column, at)
        best = tl.maximum(best, order)
    key = (best.to(tl.int64) << 32) | (at ^ _LAST).to(tl.int64)
    tl.store(keys + row * tl.num_programs(1) + part, tl.max(key, 0))


@triton.jit(do_not_specialize=["parts"])
def join_kernel(
    keys,  # int64 [rows, splits]
    columns,  # int64 [rows]
    parts,
    BLOCK: tl.constexpr,
):
    """The column in the largest key of each matrix row; grid `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], _LEAST, tl.int64)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        key = tl.load(keys + row * parts + part, mask=part < parts, other=_LEAST)
        best = tl.maximum(best, key)
    tl.store(columns + row, (tl.max(best, 0) & _LAST) ^ _LAST)


def argmax_triton(x: Tensor) -> Tensor:
    """`row_argmax` on the GPU or in Triton's interpreter."""
    rows, columns = x.shape
    of_row = triton.cdiv(columns, _BLOCK)
    blocks = triton.cdiv(of_row, max(1, _PROGRAMS * device_of(x).multiprocessors // rows))
    parts = triton.cdiv(of_row, blocks)
    keys = x.new_empty(rows, parts, dtype=torch.int64)
    out = x.new_empty(rows, dtype=torch.int64)
    parts_kernel[(rows, parts)](x, keys, x.stride(0), blocks, COLUMNS=columns, BLOCK=_BLOCK, num_warps=4)
    join_kernel[(rows,)](keys, out, parts, BLOCK=_JOINED, num_warps=1)
    return out
