"""A number and its column in one integer key, and the largest key of each part of a matrix row.

Keys have no NaN, and no two keys of a matrix row are equal, so the largest does not depend on the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.device import device_of

BLOCK = 1024
"""Columns per iteration: 154,880 bfloat16 logits make 152 programs, which load 16 bytes per thread."""
_JOINED = tl.constexpr(256)
_PROGRAMS = 16
"""Programs of four warps per multiprocessor: as many as it can run. More matrix rows get longer parts."""
_LAST = tl.constexpr(0x7FFFFFFF)
LEAST_ORDER = tl.constexpr(-0x80000000)
_LEAST_KEY = tl.constexpr(-(2**63))


@triton.jit
def in_order(value):
    """Map floats to int32 in the same order: NaN is the largest, -0 equals 0. No float maps to the least int32."""
    value = value.to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _LAST, bits)
    order = tl.where(value == 0.0, 0, order)
    return tl.where(value != value, _LAST, order)


@triton.jit
def largest_key(order, column):
    """The largest key of a block; among equal numbers the lowest column has it."""
    return tl.max((order.to(tl.int64) << 32) | (column ^ _LAST).to(tl.int64), 0)


@triton.jit
def number_of(key):
    """The float32 number of a key."""
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ _LAST, order).to(tl.float32, bitcast=True)


@triton.jit
def column_of(key):
    """The column of a key, int64."""
    return (key & _LAST) ^ _LAST


@triton.jit
def join_keys(keys, parts):
    """The largest of `parts` keys, int64."""
    best = tl.full([_JOINED], _LEAST_KEY, tl.int64)
    for start in range(0, parts, _JOINED):
        part = start + tl.arange(0, _JOINED)
        best = tl.maximum(best, tl.load(keys + part, mask=part < parts, other=_LEAST_KEY))
    return tl.max(best, 0)


@triton.jit(do_not_specialize=["blocks"])
def parts_kernel(
    x,  # [rows, COLUMNS], strides (x_stride, 1)
    keys,  # int64 [rows, parts]
    x_stride,
    blocks,  # blocks per part
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key of each part. Grid `[rows, parts]`."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], LEAST_ORDER, tl.int32)
    at = tl.zeros([BLOCK], tl.int32)
    for block in range(part * blocks, (part + 1) * blocks):
        column = block * BLOCK + tl.arange(0, BLOCK)
        # Padding has higher columns than all numbers, so it never wins.
        value = tl.load(x + row * x_stride + column, mask=column < COLUMNS, other=-float("inf"))
        order = in_order(value)
        at = tl.where(order > best, column, at)
        best = tl.maximum(best, order)
    tl.store(keys + row * tl.num_programs(1) + part, largest_key(best, at))


def keys_of_parts(x: Tensor) -> tuple[Tensor, int]:
    """The largest key of each part of the matrix rows of `x`, int64 `[rows, parts]`, and the blocks of a part."""
    rows, columns = x.shape
    of_row = triton.cdiv(columns, BLOCK)
    blocks = triton.cdiv(of_row, max(1, _PROGRAMS * device_of(x).multiprocessors // rows))
    keys = x.new_empty(rows, triton.cdiv(of_row, blocks), dtype=torch.int64)
    parts_kernel[tuple(keys.shape)](x, keys, x.stride(0), blocks, COLUMNS=columns, BLOCK=BLOCK, num_warps=4)
    return keys, blocks
