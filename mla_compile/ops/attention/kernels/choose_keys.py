"""The choice of a token's highest scores without a sort, written as slots.

A program finds one token's cut, the score at which its selection ends. Bisection finds it, counting the scores above a
number. BLOCK scores fit the registers. Of longer rows a sample gives a bound that few more than `topk` scores exceed:
these are listed, and the cut is theirs. If they are fewer or do not fit, the whole row is counted from memory: slow,
but that takes thousands of equal scores.
"""

import triton
import triton.language as tl

from mla_compile.ops.attention.kernels.index_scores import VARYING, part_of, slots, tokens_of
from mla_compile.ops.dependent_launch import wait_for_kernel_before
from mla_compile.ops.reductions.kernels.keys import LEAST_ORDER


@triton.jit
def _cut(tile, rest, count, low, target, BLOCK: tl.constexpr):
    """The least number that at most `target` scores exceed, and how many do; at least `target` exceed `low`.

    tile: the first scores, LEAST_ORDER past the last; rest: pointers to those from BLOCK on, `count` in all.
    """
    high, above = tl.full([], 0x7FFFFFFF, tl.int32), 0
    middle = (low & high) + ((low ^ high) >> 1)
    while (low < middle) & (above != target):
        found = tl.sum((tile > middle).to(tl.int32), 0)
        for start in range(BLOCK, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            found += tl.sum(((tl.load(rest + i) > middle) & (i < count)).to(tl.int32), 0)
        fits = found <= target
        low = tl.where(fits, low, middle)
        high = tl.where(fits, middle, high)
        above = tl.where(fits, found, above)
        middle = (low & high) + ((low ^ high) >> 1)
    return high, above


@triton.jit
def _slots_of_row(table, k_lens, row, rows, parts, table_stride, key, inside, PAGE_SIZE: tl.constexpr):
    """Slots, int32, of keys by their positions in a row."""
    if PAGE_SIZE > 0:
        found = slots(table + row.to(tl.int64) * table_stride, key, inside, PAGE_SIZE).to(tl.int32)
    else:
        found, low = tl.zeros(key.shape, tl.int32), 0
        for part in range(parts):
            begin, length = part_of(k_lens, part, row, rows)
            mine = inside & (key >= low) & (key < low + length)
            at = table + part * table_stride + begin - low
            found = tl.where(mine, slots(at, key, mine, PAGE_SIZE).to(tl.int32), found)
            low += length
    return found


@triton.jit(do_not_specialize=VARYING)
def choose_kernel(
    scores,  # int32 [blocks, BLOCK_Q, stride]: `width` scores, then, if BLOCK < width, a list: scores and positions
    selected,  # int32 [tokens, topk], contiguous
    table,  # these as in `scores_kernel`
    k_lens,
    q_lens,
    has_q_lens,
    rows,
    parts,
    q_len,
    columns,
    table_stride,
    first_block,
    topk,
    stride,
    width,
    PAGE_SIZE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The slots of one token's highest scores, in the order of positions; grid `[blocks * BLOCK_Q]`."""
    wait_for_kernel_before(EARLY)
    row, first, start, count, valid, keys = tokens_of(
        first_block + tl.program_id(0) // BLOCK_Q, k_lens, q_lens, has_q_lens, rows, parts, q_len,
        columns * PAGE_SIZE, PAGE_SIZE, ROWS_BLOCK, BLOCK_Q,
    )  # fmt: skip
    token = first + tl.program_id(0) % BLOCK_Q
    if token >= count:
        return
    n = tl.where(token < valid, tl.maximum(keys - (valid - 1 - token), 0), 0)
    selected += (start + token).to(tl.int64) * topk
    lane = tl.arange(0, BLOCK)
    if n <= topk:
        for begin in range(0, topk, BLOCK):
            i = begin + lane
            slot = _slots_of_row(table, k_lens, row, rows, parts, table_stride, i, i < n, PAGE_SIZE)
            tl.store(selected + i, tl.where(i < n, slot, -1), mask=i < topk)
        return

    scores += tl.program_id(0).to(tl.int64) * stride
    least = tl.full([], LEAST_ORDER, tl.int32)
    listed, floor, is_listed = 0, least, False
    if n > BLOCK:
        s = tl.arange(0, SAMPLE)
        sample = tl.load(scores + s * (n // SAMPLE) + s * (n % SAMPLE) // SAMPLE)
        expected = topk.to(tl.float32) * SAMPLE / n
        most = (expected + 4.0 * tl.sqrt(expected)).to(tl.int32) + 1
        floor = _cut(sample, scores, SAMPLE, least, most, SAMPLE)[0]
        for begin in range(0, n, BLOCK):
            i = begin + lane
            score = tl.load(scores + i)
            kept = (score > floor) & (i < n)
            to = listed + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(scores + width + to, score, mask=kept & (to < BLOCK))
            tl.store(scores + width + BLOCK + to, i, mask=kept & (to < BLOCK))
            listed += tl.sum(kept.to(tl.int32), 0)
        tl.debug_barrier()
        is_listed = (listed >= topk) & (listed <= BLOCK)
    source = scores + tl.where(is_listed, width, 0)
    count = tl.where(is_listed, listed, n)
    floor = tl.where(is_listed, floor, least)
    tile = tl.where(lane < count, tl.load(source + lane), LEAST_ORDER)
    cut, above = _cut(tile, source, count, floor, topk, BLOCK)
    ties = topk - above
    done, equal = 0, 0
    for begin in range(0, count, BLOCK):
        i = begin + lane
        score = tl.where(i < count, tl.load(source + i), LEAST_ORDER)
        both = tl.cumsum(tl.where(score > cut, 1, tl.where(score == cut, 65536, 0)), 0)
        rank = equal + (both >> 16)  # among those at the cut
        to = done + (both & 65535) + tl.minimum(rank, ties) - 1
        chosen = (score > cut) | ((score == cut) & (rank <= ties))
        key = tl.where(is_listed, tl.load(scores + width + BLOCK + i, mask=chosen & is_listed, other=0), i)
        slot = _slots_of_row(table, k_lens, row, rows, parts, table_stride, key, chosen, PAGE_SIZE)
        tl.store(selected + to, slot, mask=chosen)
        total = tl.max(both, 0)
        done, equal = done + (total & 65535), equal + (total >> 16)
