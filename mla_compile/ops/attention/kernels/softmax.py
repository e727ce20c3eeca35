"""A softmax over keys that several programs share: the common code of the Triton attention kernels."""

import math

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.attention.kernels.latents import load_latents, padded
from mla_compile.ops.device import power_of_two

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

_COMBINED = 8192
"""The partial results, splits times columns, that a program of `join_splits` loads at once."""


@triton.jit
def accumulate(scores, k, top, total, acc):
    """Add a tile of keys to a running softmax of base 2.

    scores: `[keys, rows]`, -inf for a key that is not seen; k: `[keys, rank]`; top: the maximum so far, `[rows]`;
    total: the sum of `2 ** (score - top)`, `[rows]`; acc: the values with these weights, `[rank, rows]`. All are
    float32 but k. Here and below "rows" are queries.
    """
    new_top = tl.maximum(top, tl.max(scores, 0))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - base[None, :])
    decay = tl.exp2(top - base)
    total = tl.fma(total, decay, tl.sum(weights, 0))
    acc = tl.dot(tl.trans(k), weights.to(k.dtype), acc * decay[None, :], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def split_of(keys, split, splits, BLOCK_N: tl.constexpr, MIN_KEYS: tl.constexpr):
    """The keys that a split reads of a row's `keys`: from the first returned index to before the second.

    Short rows use few splits: below MIN_KEYS keys a split costs more to start and to sum than it saves.
    """
    share = tl.cdiv(tl.maximum(tl.cdiv(keys, splits), MIN_KEYS), BLOCK_N) * BLOCK_N
    start = split * share
    return start, tl.minimum(keys, start + share)


@triton.jit
def load_queries(
    q_latent,  # pointers to queries, [rows]
    q_pe,  # pointers to their rotary parts, [rows]
    inside,  # [rows]: whether the query exists
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Queries as matrix columns, for `attend_latents`."""
    c = tl.arange(0, padded(RANK))
    p = tl.arange(0, padded(ROPE))
    q = tl.load(q_latent[:, None] + c[None, :], mask=inside[:, None] & (c < RANK)[None, :], other=0.0)
    qp = tl.load(q_pe[:, None] + p[None, :], mask=inside[:, None] & (p < ROPE)[None, :], other=0.0)
    return tl.trans(q), tl.trans(qp)


@triton.jit
def attend_latents(
    q,  # [RANK, rows], padded to a power of two
    q_pe,  # [ROPE, rows], padded to a power of two
    latent,  # pointers to the latents of a tile, [keys, 1]
    live,  # [keys]: whether the latent exists
    key,  # [keys]: the indices of these keys in their row
    bounds,  # [rows]: number of keys that each query sees
    scale,  # of the scores, for a softmax of base 2
    top,
    total,
    acc,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Add a tile of keys, latents with their rotary parts, to the running softmax of `accumulate`."""
    # Keys that do not exist are zeros too, not only their scores masked: 0 x NaN is NaN.
    k, k_pe = load_latents(latent, live, q.dtype, RANK, ROPE)
    scores = tl.dot(k, q, input_precision="ieee")
    scores = tl.dot(k_pe, q_pe, scores, input_precision="ieee") * scale
    scores = tl.where(key[:, None] < bounds[None, :], scores, -float("inf"))
    return accumulate(scores, k, top, total, acc)


@triton.jit
def store_split(
    out,  # [splits * total, RANK], contiguous
    lse,  # float32 [splits * total]
    target,  # [rows]: the index of the query in `out` and `lse`
    inside,  # [rows]: whether the query exists
    written,  # [rows]: whether to write its `out`
    top,
    total,
    acc,
    RANK: tl.constexpr,
):
    """Write the result of the running softmax of `accumulate`; 0 and -inf if no key was seen."""
    c = tl.arange(0, padded(RANK))
    filled = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + target, (top + tl.log2(total)) * LN_2, mask=inside)
    result = tl.trans(acc / filled[None, :]).to(out.dtype.element_ty)
    tl.store(out + target[:, None] * RANK + c[None, :], result, mask=written[:, None] & (c < RANK)[None, :])


@triton.jit
def join_splits(
    part_out,  # float32 [splits or more, total, RANK]; an empty split's is never read
    part_lse,  # float32 [splits or more, total], natural log, -inf for an empty split
    out,  # [total, RANK]
    lse,  # float32 [total]
    i,  # int64: the query
    splits,
    total,
    RANK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Join the first `splits` of a query, BLOCK_C columns of it: `sum_s exp(lse_s - lse) out_s`.

    SPLIT_BLOCK of them are loaded and summed at a time, in order; splits past the last one weigh 0.
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    top = -float("inf")
    sum_of_weights = 0.0
    acc = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, splits, SPLIT_BLOCK):
        s = first + tl.arange(0, SPLIT_BLOCK)
        parts = tl.load(part_lse + s * total + i, mask=s < splits, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(parts, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
        weights = tl.exp(parts - base)
        decay = tl.exp(top - base)
        at = (s.to(tl.int64) * total + i)[:, None] * RANK + c[None, :]
        part = tl.load(part_out + at, mask=(weights > 0)[:, None] & (c < RANK)[None, :], other=0.0)
        sum_of_weights = tl.fma(sum_of_weights, decay, tl.sum(weights, 0))
        acc = tl.fma(acc, decay, tl.sum(part * weights[:, None], 0))
        top = new_top
    result = acc / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    tl.store(out + i * RANK + c, result.to(out.dtype.element_ty), mask=c < RANK)
    if tl.program_id(1) == 0:
        tl.store(lse + i, top + tl.log(sum_of_weights))


@triton.jit(do_not_specialize=["splits", "total"])
def combine_kernel(
    part_out,  # see `join_splits`
    part_lse,
    out,
    lse,
    splits,
    total,  # rows * q_len * heads
    RANK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Join all splits of one query, as one block of `join_splits`."""
    i = tl.program_id(0).to(tl.int64)
    join_splits(part_out, part_lse, out, lse, i, splits, total, RANK, SPLIT_BLOCK, BLOCK_C)


def split_results(out: Tensor, lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """The tensors that splits write: `out` and `lse` themselves for one split, else partial results for `combine`."""
    if splits == 1:
        return out, lse
    total = lse.numel()
    return lse.new_empty((splits, total, out.shape[-1])), lse.new_empty((splits, total))


def columns_at_once(rank: int, split_block: int) -> int:
    """BLOCK_C of `join_splits`, for `split_block` splits at a time."""
    return max(16, min(power_of_two(rank), _COMBINED // split_block))


def combine(part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, *, least: int = 1) -> None:
    """Join float32 `[splits, total, rank]` and `[splits, total]` into `out` and `lse`, for `total` queries.

    least: a power of two. Fewer splits are loaded as this many, so that one kernel serves all of their numbers.
    """
    splits, total, rank = part_out.shape
    split_block = max(least, triton.next_power_of_2(splits))
    columns = columns_at_once(rank, split_block)
    combine_kernel[(total, triton.cdiv(rank, columns))](
        part_out,
        part_lse,
        out,
        lse,
        splits,
        total,
        RANK=rank,
        SPLIT_BLOCK=split_block,
        BLOCK_C=columns,
        num_warps=4,
    )
