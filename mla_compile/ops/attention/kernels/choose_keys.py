"""The choice of a token's highest scores without a sort, written as slots.

`choose_kernel`: a program finds one token's cut, the score at which its selection ends, by bisection: it counts the
scores above a number. BLOCK scores fit its registers.

`list_kernel` shortens longer rows, many programs a row: a sample gives a bound that few more than `topk` scores exceed,
and these are listed, in the order of positions. If they are fewer or do not fit, `choose_kernel` counts the whole row
from memory: slow, but that takes thousands of equal scores.
"""

import triton
import triton.language as tl

from mla_compile.ops.attention.kernels.index_scores import VARYING, part_of, slots, tokens_of
from mla_compile.ops.reductions.kernels.keys import LEAST_ORDER


@triton.jit
def _half_cut(half, rest, count, target, BLOCK: tl.constexpr):
    """The least number that at most `target` halves of scores exceed, and how many do.

    half: of the first scores, that of LEAST_ORDER past the last; rest: pointers to the scores, read from BLOCK on if
    their `count` is more. Differences of halves do not overflow: their signs count with half the instructions of
    comparisons. The compiler must not know that, or it compares: so `middle` is not half of a sum.
    """
    low, high, above = tl.full([], -(2**30), tl.int32), tl.full([], 2**30 - 1, tl.int32), 0
    while (low + 1 < high) & (above != target):
        middle = low + ((high - low) >> 1)
        found = -tl.sum((middle - half) >> 31, 0)
        for start in range(BLOCK, count, BLOCK):
            found -= tl.sum((middle - (_scores_from(rest, start, count, BLOCK) >> 1)) >> 31, 0)
        fits = found <= target
        low = tl.where(fits, low, middle)
        high = tl.where(fits, middle, high)
        above = tl.where(fits, found, above)
    return high, above


@triton.jit
def _scores_from(scores, start, count, BLOCK: tl.constexpr):
    """Scores from `start` on, LEAST_ORDER past the last. Memory there exists, and loads without a mask are wide."""
    i = start + tl.arange(0, BLOCK)
    return tl.where(i < count, tl.load(scores + i), LEAST_ORDER)


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


@triton.jit
def _token_of(
    program,
    k_lens,
    q_lens,
    has_q_lens,
    rows,
    parts,
    q_len,
    first_block,
    most_keys,
    PAGE_SIZE,
    ROWS_BLOCK,
    BLOCK_Q,
):
    """A program's token: its row, its index among all, int64, and the keys that it sees; -1 keys without a token."""
    row, first, start, count, valid, keys = tokens_of(
        first_block + program // BLOCK_Q, k_lens, q_lens, has_q_lens, rows, parts, q_len, most_keys,
        PAGE_SIZE, ROWS_BLOCK, BLOCK_Q,
    )  # fmt: skip
    token = first + program % BLOCK_Q
    seen = tl.where(token < valid, tl.maximum(keys - (valid - 1 - token), 0), 0)
    return row, (start + token).to(tl.int64), tl.where(token < count, seen, -1)


@triton.jit(do_not_specialize=VARYING)
def list_kernel(
    scores,  # int32 [blocks, BLOCK_Q, stride]: `width` scores; with more than BLOCK, a list: scores, positions, number
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
    SCAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lists what may be selected of BLOCK scores of a longer row; grid `[blocks * BLOCK_Q, width / BLOCK]`."""
    _, _, n = _token_of(
        tl.program_id(0), k_lens, q_lens, has_q_lens, rows, parts, q_len, first_block, columns * PAGE_SIZE,
        PAGE_SIZE, ROWS_BLOCK, BLOCK_Q,
    )  # fmt: skip
    begin = tl.program_id(1) * BLOCK
    if (n <= topk) | (n <= BLOCK) | (begin >= n):
        return
    scores += tl.program_id(0).to(tl.int64) * stride
    s = tl.arange(0, SAMPLE)
    sample = tl.load(scores + s * (n // SAMPLE) + s * (n % SAMPLE) // SAMPLE)
    expected = topk.to(tl.float32) * SAMPLE / n
    most = (expected + 4.0 * tl.sqrt(expected)).to(tl.int32) + 1
    half, _ = _half_cut(sample >> 1, scores, SAMPLE, most, SAMPLE)
    floor = 2 * half + 1
    # Each program counts what those before it list: they need not wait for each other.
    listed = 0
    for earlier in range(0, begin, BLOCK):
        listed += tl.sum((tl.load(scores + earlier + tl.arange(0, BLOCK)) > floor).to(tl.int32), 0)
    for at in range(begin, begin + BLOCK, SCAN):
        i = at + tl.arange(0, SCAN)
        score = tl.load(scores + i)
        kept = (score > floor) & (i < n)
        rank = tl.cumsum(kept.to(tl.int32), 0)
        to = listed + rank - 1
        tl.store(scores + width + to, score, mask=kept & (to < BLOCK))
        tl.store(scores + width + BLOCK + to, i, mask=kept & (to < BLOCK))
        listed += tl.max(rank, 0)
    if begin + BLOCK >= n:
        tl.store(scores + width + 2 * BLOCK, listed)


@triton.jit(do_not_specialize=VARYING)
def choose_kernel(
    scores,  # these as in `list_kernel`
    selected,  # int32 [tokens, topk], contiguous
    table,
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
    SCAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The slots of one token's highest scores, in the order of positions; grid `[blocks * BLOCK_Q]`."""
    row, token, n = _token_of(
        tl.program_id(0), k_lens, q_lens, has_q_lens, rows, parts, q_len, first_block, columns * PAGE_SIZE,
        PAGE_SIZE, ROWS_BLOCK, BLOCK_Q,
    )  # fmt: skip
    if n < 0:
        return
    selected += token * topk
    lane = tl.arange(0, SCAN)
    if n <= topk:
        for begin in range(0, topk, SCAN):
            i = begin + lane
            slot = _slots_of_row(table, k_lens, row, rows, parts, table_stride, i, i < n, PAGE_SIZE)
            tl.store(selected + i, tl.where(i < n, slot, -1), mask=i < topk)
        return

    scores += tl.program_id(0).to(tl.int64) * stride
    positions = scores + width + BLOCK
    count, is_listed = n, False
    if n > BLOCK:
        listed = tl.load(positions + BLOCK)
        is_listed = (listed >= topk) & (listed <= BLOCK)
        count = tl.where(is_listed, listed, n)
        scores += tl.where(is_listed, width, 0)
    half, above = _half_cut(_scores_from(scores, 0, count, BLOCK) >> 1, scores, count, topk, BLOCK)
    found = 0
    for begin in range(0, count, BLOCK):
        found += tl.sum((_scores_from(scores, begin, count, BLOCK) > 2 * half).to(tl.int32), 0)
    cut = tl.where(found <= topk, 2 * half, 2 * half + 1)
    above = tl.where(found <= topk, found, above)
    ties = topk - above
    done, equal = 0, 0
    for begin in range(0, count, SCAN):
        i = begin + lane
        score = _scores_from(scores, begin, count, SCAN)
        both = tl.cumsum(tl.where(score > cut, 1, tl.where(score == cut, 65536, 0)), 0)
        rank = equal + (both >> 16)  # among those at the cut
        to = done + (both & 65535) + tl.minimum(rank, ties) - 1
        chosen = (score > cut) | ((score == cut) & (rank <= ties))
        key = i
        if is_listed:
            key = tl.load(positions + i, mask=chosen, other=0)
        slot = _slots_of_row(table, k_lens, row, rows, parts, table_stride, key, chosen, PAGE_SIZE)
        tl.store(selected + to, slot, mask=chosen)
        total = tl.max(both, 0)
        done, equal = done + (total & 65535), equal + (total >> 16)
