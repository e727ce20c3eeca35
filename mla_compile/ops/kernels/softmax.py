"""A softmax over keys that several programs share: what the Triton kernels of attention have in common."""

import math

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.plan import power_of_two

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

_COMBINED = 8192
"""Partial results, splits times columns, that a program of `combine_kernel` loads at once."""


@triton.jit
def accumulate(scores, k, top, total, acc):
    """Take a tile of keys into a running softmax, in which a score counts as a power of two.

    scores: `[keys, rows]`, -inf where a key is not seen; k: `[keys, rank]`; top, the highest score so far, and total,
    the sum of `2 ** (score - top)`: `[rows]`; acc: values weighted likewise, `[rank, rows]`. All float32 but k.
    """
    new_top = tl.maximum(top, tl.max(scores, 0))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - base[None, :])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 0)
    acc = tl.dot(tl.trans(k), weights.to(k.dtype), acc * decay[None, :], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def combine_kernel(
    part_out,  # float32 [SPLITS, total, RANK]; what an empty split holds is never read
    part_lse,  # float32 [SPLITS, total], natural log, -inf for an empty split
    out,  # [total, RANK]
    lse,  # float32 [total]
    total,  # rows * q_len * heads
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Join the splits of one query row, BLOCK_C columns of it: `sum_s exp(lse_s - lse) out_s`."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = tl.arange(0, SPLIT_BLOCK)
    parts = tl.load(part_lse + s * total + i, mask=s < SPLITS, other=-float("inf"))
    top = tl.max(parts, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp(parts - base)
    sum_of_weights = tl.sum(weights, 0)
    at = (s.to(tl.int64) * total + i)[:, None] * RANK + c[None, :]
    part = tl.load(part_out + at, mask=(weights > 0)[:, None] & (c < RANK)[None, :], other=0.0)
    result = tl.sum(part * weights[:, None], 0) / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    tl.store(out + i * RANK + c, result.to(out.dtype.element_ty), mask=c < RANK)
    if tl.program_id(1) == 0:
        tl.store(lse + i, base + tl.log(sum_of_weights))


def combine(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Join float32 `[splits, total, rank]` and `[splits, total]` in `out` and `lse`, which hold `total` rows."""
    splits, total, rank = part_out.shape
    split_block = triton.next_power_of_2(splits)
    columns = max(16, min(power_of_two(rank), _COMBINED // split_block))
    combine_kernel[(total, triton.cdiv(rank, columns))](
        part_out,
        part_lse,
        out,
        lse,
        total,
        RANK=rank,
        SPLITS=splits,
        SPLIT_BLOCK=split_block,
        BLOCK_C=columns,
        num_warps=4,
    )
