"""The common parts of batch-invariant decode kernels: the splits of a row's keys, and their join.

A token gets the same bits in every call with the same keys. Splits begin at the same keys for all lengths, each is
computed from its first key on, and the token's splits are joined in order. Splits that the token does not see are not
read, and keys that it does not see weigh 0. Which program computes which split does not matter.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.attention.kernels.softmax import columns_at_once, join_splits
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.attention.tiles import DOUBLED, SPLIT_BLOCK, SPLIT_UNIT, num_fixed_splits, rows_at_once
from mla_compile.ops.dependent_launch import wait_for_kernel_before

_SECOND, _THIRD, _FOURTH, _FIFTH = (tl.constexpr(first) for first in DOUBLED)


@triton.jit
def _doubled_from(place, first):
    return place + tl.maximum(place - first, 0)


@triton.jit
def _halved_from(count, first):
    return tl.minimum(count, first) + (tl.maximum(count - first, 0) + 1) // 2


@triton.jit
def first_key_of(split, SPLIT_UNIT: tl.constexpr):
    """The first key of a split."""
    place = _doubled_from(_doubled_from(split, _FIFTH), _FOURTH)
    return _doubled_from(_doubled_from(place, _THIRD), _SECOND) * SPLIT_UNIT


@triton.jit
def splits_of(keys, SPLIT_UNIT: tl.constexpr):
    """The number of splits of a number of keys."""
    units = (tl.maximum(keys, 0) + SPLIT_UNIT - 1) // SPLIT_UNIT
    count = _halved_from(_halved_from(units, _SECOND), _THIRD)
    return _halved_from(_halved_from(count, _FOURTH), _FIFTH)


@triton.jit
def visible(seq_lens, q_lens, has_q_lens, row, token, q_len, most_keys):
    """`visible_keys` of query tokens of a row, 0 or less for none, and the number of the row's keys to read."""
    length = tl.load(seq_lens + row)
    valid = tl.load(q_lens + row, mask=has_q_lens != 0, other=q_len)
    stored = tl.minimum(length, most_keys)
    bounds = tl.where(token < valid, tl.minimum(length - (valid - 1 - token), stored), 0)
    return bounds, tl.where(valid > 0, stored, 0)


@triton.jit(do_not_specialize=["seq_lens", "q_lens", "lse", "has_q_lens", "q_len", "most_keys", "total"])
def join_kernel(
    part_out,  # see `join_splits`
    part_lse,
    out,
    lse,
    seq_lens,
    q_lens,
    has_q_lens,
    q_len,
    most_keys,
    total,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT_UNIT: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Join the splits that a query sees; grid `[rows * q_len * HEADS, blocks of RANK]`."""
    wait_for_kernel_before(EARLY)
    i = tl.program_id(0)
    row = i // (q_len * HEADS)
    token = i // HEADS % q_len
    keys, _ = visible(seq_lens, q_lens, has_q_lens, row, token, q_len, most_keys)
    splits = splits_of(keys, SPLIT_UNIT)
    join_splits(part_out, part_lse, out, lse, i.to(tl.int64), splits, total, RANK, SPLIT_BLOCK, BLOCK_C)


def with_unit_strides(operands: DecodeOperands) -> DecodeOperands:
    """The same operands; tensors whose columns are not adjacent are copied."""
    q_latent, q_pe, kv_cache, table, seq_lens, q_lens, q_len, softmax_scale = operands
    q_latent, q_pe, table = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe, table))
    q_lens = None if q_lens is None else q_lens.contiguous()
    # Without `_replace`, which takes a microsecond.
    seq_lens = seq_lens.contiguous()
    return DecodeOperands(q_latent, q_pe, kv_cache, table, seq_lens, q_lens, q_len, softmax_scale)


Launch = Callable[[DecodeOperands, Tensor, Tensor], None]
"""Launches a kernel that computes each split of some rows by itself. Its arguments: operands, part_out, part_lse.

part_out: each split's output, float32 `[splits, rows * q_len * heads, kv_lora_rank]`; part_lse: its log-sum-exp,
natural log, float32 `[splits, rows * q_len * heads]`, -inf for a query that sees no key of the split. For splits
after the last one that a query sees, both may stay unwritten.
"""


def decode_by_fixed_splits(
    launch: Launch,
    operands: DecodeOperands,
    *,
    split_unit: int = SPLIT_UNIT,
    split_block: int = SPLIT_BLOCK,
    at_once: int | None = None,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` over fixed splits, which `launch` computes.

    at_once: number of rows that share the workspace, chosen by `tiles.py` unless given. early: whether the joining
    kernel starts early. Neither changes a bit. `split_unit` and `split_block`, the splits summed at a time, do.
    """
    q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, _ = operands = with_unit_strides(operands)
    tokens, heads, rank = q_latent.shape
    rows, max_keys = block_table.shape[0], block_table.shape[1] * kv_cache.shape[1]
    splits = num_fixed_splits(max_keys, split_unit)
    at_once = min(rows, at_once or rows_at_once(splits * q_len * heads * rank))
    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((tokens, heads), dtype=torch.float32)
    part_out = lse.new_empty((splits, at_once * q_len * heads, rank))
    part_lse = lse.new_empty((splits, at_once * q_len * heads))
    columns_of_out = columns_at_once(rank, split_block)
    for first in range(0, rows, at_once):
        mine = slice(first, first + at_once)
        tokens_of_mine = slice(first * q_len, (first + at_once) * q_len)
        part = operands._replace(
            q_latent=q_latent[tokens_of_mine],
            q_pe=q_pe[tokens_of_mine],
            block_table=block_table[mine],
            seq_lens=seq_lens[mine],
            q_lens=None if q_lens is None else q_lens[mine],
        )
        launch(part, part_out, part_lse)
        total = part.q_latent.shape[0] * heads
        join_kernel[(total, triton.cdiv(rank, columns_of_out))](
            part_out,
            part_lse,
            out[tokens_of_mine],
            lse[tokens_of_mine],
            part.seq_lens,
            part.seq_lens if part.q_lens is None else part.q_lens,
            int(q_lens is not None),
            q_len,
            max_keys,
            total,
            HEADS=heads,
            RANK=rank,
            SPLIT_UNIT=split_unit,
            SPLIT_BLOCK=split_block,
            BLOCK_C=columns_of_out,
            EARLY=early,
            num_warps=4,
            launch_pdl=early,
        )
    return out, lse
