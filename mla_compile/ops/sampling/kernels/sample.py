"""Sampling without a sort, in five launches that many programs share.

A position's scores are `(logit - largest) / temperature`. Top-k and top-p each keep the first ids in the order of
scores and ids.

1. `parts_kernel` of `row_argmax` finds the largest logit.
2. `histogram_kernel` adds counts and probability masses in bins of scores.
3. `window_kernel` finds the bins in which top-k and top-p end. Ids in bins before these are kept.
4. `collect_kernel` lists the ids of these bins, and finds the best of the ids before them, noise added.
5. `choose_kernel` finds where top-k and top-p end in the list, and the best of all kept ids.

Masses are integers, so sums are exact and atomics may add in any order. A position's result depends on nothing else in
the batch. Scores and the hash have the bits of the torch code; `exp` is that of the GPU, which differs from torch's by
2e-6 at most, so an id with a mass that small at the end of top-p may be kept by one of them alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.reductions.kernels.keys import (
    BLOCK,
    LEAST_ORDER,
    column_of,
    in_order,
    join_keys,
    keys_of_parts,
    largest_key,
    number_of,
)

_BINS = tl.constexpr(4096)
_PER_UNIT = tl.constexpr(128.0)
"""Bins of equal width, down to a score of -32. Masses are 0 from -27.8 on. The last bin has all lower scores: its ids
are never sampled, as noise is between -2.9 and 16.7, and the likeliest id is always kept."""
_STATE = tl.constexpr(8)
"""Numbers of a position's state: the largest logit's key, then those of `window_kernel`, then the list's length."""
_LISTED = 4096
"""Ids that the list holds. Of more, as with many equal logits, `choose_kernel` reads the whole vocabulary."""
_MANY = tl.constexpr(2**63 - 1)
_LAST_ID = tl.constexpr(2**23)


@triton.jit
def _scores(logits, ids, mask, largest, temperature, min_p):
    """Float32 scores, at most 0; -inf below min-p and outside the mask."""
    logit = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
    score = tl.div_rn(logit - largest, temperature)
    return tl.where(score < tl.log(min_p), -float("inf"), score)


@triton.jit
def _bins(score):
    """The bin of each score, in the order of falling scores; of -inf one that is never read."""
    return tl.where(
        score == -float("inf"), _BINS + 1, tl.minimum(score * -_PER_UNIT, _BINS - 1.0).to(tl.int32)
    )


@triton.jit
def _masses(score):
    """As in the torch code."""
    return (tl.exp(score) * 1099511627776.0).to(tl.int64)


@triton.jit
def _mix(x):
    """As in the torch code, in uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _noised(score, ids, seed, position):
    """The order of `score + noise`; `seed` and `position` are int64 scalars."""
    hashed = _mix(_mix(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
    hashed = _mix(hashed ^ position.to(tl.uint32))
    bits = _mix(hashed ^ _mix(ids.to(tl.uint32) + 0x3C6EF372))
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return in_order(score - tl.log(-tl.log(uniform)))


@triton.jit
def _samples(largest, temperature):
    """Whether a position samples: others take the largest logit's id."""
    return (temperature != 0.0) & (tl.abs(largest) < float("inf"))


@triton.jit(do_not_specialize=["n", "parts", "blocks"])
def histogram_kernel(
    logits,  # [positions, VOCAB], strides (stride, 1)
    keys,  # int64 [positions, parts], of the largest logits
    histograms,  # int64 [positions, 2, _BINS], zeros: counts and masses
    temperature,  # [rows]; a row has n positions
    top_k,
    top_p,
    min_p,
    stride,
    n,
    parts,
    blocks,  # blocks per part
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts with top-k, masses with top-p. Grid `[positions, parts]`."""
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = at // n
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    if (k > 0) | (p < 1.0):
        largest = number_of(join_keys(keys + at * parts, parts))
        if _samples(largest, t):
            least = tl.load(min_p + row)
            counts = histograms + at * 2 * _BINS
            rest = tl.zeros([BLOCK], tl.int64)
            for block in range(part * blocks, (part + 1) * blocks):
                ids = block * BLOCK + tl.arange(0, BLOCK)
                score = _scores(logits + at * stride, ids, ids < VOCAB, largest, t, least)
                bin = _bins(score)
                if k > 0:
                    tl.atomic_add(counts + bin, 1, mask=bin < _BINS, sem="relaxed")
                if p < 1.0:
                    mass = _masses(score)
                    # All masses below (1 - p) / VOCAB add up to less than a share of 1 - p, as the largest has 1. So
                    # top-p ends before them: their sum is enough. With top-k, masses of the ids that it keeps count.
                    few = (k <= 0) & (tl.exp(score) * VOCAB < 0.99 * (1.0 - p))
                    rest += tl.where(few, mass, 0)
                    tl.atomic_add(
                        counts + _BINS + bin, mass, mask=(bin < _BINS) & (mass > 0) & ~few, sem="relaxed"
                    )
            tl.atomic_add(counts + 2 * _BINS - 1, tl.sum(rest, 0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "parts"])
def window_kernel(
    keys,  # int64 [positions, parts], of the largest logits
    histograms,  # int64 [positions, 2, _BINS]
    states,  # int64 [positions, _STATE]
    top_k,
    top_p,
    n,
    parts,
):
    """The bins in which top-k and top-p may end. Grid `[positions]`.

    Top-p is a share of the mass of top-k, which is known but for the mass of top-k's last bin: so its end is in one of
    several bins.
    """
    at = tl.program_id(0).to(tl.int64)
    row = at // n
    k, p = tl.load(top_k + row).to(tl.int64), tl.load(top_p + row).to(tl.float64)
    bin = tl.arange(0, _BINS)
    counts = tl.cumsum(tl.load(histograms + at * 2 * _BINS + bin), 0)
    masses = tl.cumsum(tl.load(histograms + (at * 2 + 1) * _BINS + bin), 0)
    before_k = counts < tl.where(k > 0, k, _MANY)
    last_k = tl.sum(before_k.to(tl.int32), 0)
    last_k = tl.where(last_k == _BINS - 1, _BINS, last_k)  # top-k drops nothing that could be sampled
    count_k = tl.max(tl.where(before_k, counts, 0), 0)
    mass_k = tl.max(tl.where(before_k, masses, 0), 0)
    most = tl.minimum(tl.min(tl.where(before_k, _MANY, masses), 0), tl.max(masses, 0))
    before_p = masses.to(tl.float64) < p * mass_k.to(tl.float64)
    first_p = tl.where(p < 1.0, tl.sum(before_p.to(tl.int32), 0), _BINS)
    last_p = tl.where(
        p < 1.0, tl.sum((masses.to(tl.float64) < p * most.to(tl.float64)).to(tl.int32), 0), _BINS
    )
    state = states + at * _STATE
    tl.store(state, join_keys(keys + at * parts, parts))
    tl.store(state + 1, tl.minimum(first_p, last_k).to(tl.int64))
    tl.store(state + 2, tl.minimum(last_p, last_k).to(tl.int64))
    tl.store(state + 3, last_k.to(tl.int64))
    tl.store(state + 4, count_k)
    tl.store(state + 5, mass_k)
    tl.store(state + 6, tl.max(tl.where(before_p, masses, 0), 0))
    tl.store(state + 7, tl.zeros([], tl.int64))


@triton.jit(do_not_specialize=["n", "blocks"])
def collect_kernel(
    logits,  # [positions, VOCAB], strides (stride, 1)
    states,  # int64 [positions, _STATE]
    listed,  # int32 [positions, LISTED], ids in any order
    keys,  # int64 [positions, parts], of `score + noise`
    position,  # int64 [positions]
    seed,  # int64 [rows]
    temperature,
    min_p,
    stride,
    n,
    blocks,
    VOCAB: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lists the ids of the window, and finds the best of the ids before it. Grid `[positions, parts]`."""
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = at // n
    state = states + at * _STATE
    t, largest = tl.load(temperature + row), number_of(tl.load(state))
    best = tl.full([BLOCK], LEAST_ORDER, tl.int32)
    best_at = tl.zeros([BLOCK], tl.int32)
    if _samples(largest, t):
        first, last, last_k = tl.load(state + 1), tl.load(state + 2), tl.load(state + 3)
        least, seeded, place = tl.load(min_p + row), tl.load(seed + row), tl.load(position + at)
        for block in range(part * blocks, (part + 1) * blocks):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            score = _scores(logits + at * stride, ids, ids < VOCAB, largest, t, least)
            bin = _bins(score)
            kept = bin < first
            if tl.max(kept.to(tl.int32), 0) > 0:
                order = tl.where(kept, _noised(score, ids, seeded, place), LEAST_ORDER)
                best_at = tl.where(order > best, ids, best_at)
                best = tl.maximum(best, order)
            in_window = (bin >= first) & ((bin <= last) | (bin == last_k)) & (bin < _BINS)
            found = tl.sum(in_window.to(tl.int32), 0)
            if found > 0:
                start = tl.atomic_add(state + 7, found.to(tl.int64), sem="relaxed")
                to = start + tl.cumsum(in_window.to(tl.int32), 0) - 1
                tl.store(listed + at * LISTED + to, ids, mask=in_window & (to < LISTED))
    tl.store(keys + at * tl.num_programs(1) + part, largest_key(best, best_at))


@triton.jit
def _block(source, low, high, start, BLOCK: tl.constexpr):
    """Ids and scores of a block of a position's ids, and which are in the bins `low` to `high`.

    source: the position's logits and list, the number of ids, whether the list has all of them (else the vocabulary is
        read), and what scores depend on.
    """
    logits, listed, length, is_listed, largest, temperature, min_p = source
    ids = start + tl.arange(0, BLOCK)
    mask = ids < length
    if is_listed:
        ids = tl.load(listed + ids, mask=mask, other=0)
    score = _scores(logits, ids, mask, largest, temperature, min_p)
    bin = _bins(score)
    return ids, score, (bin >= low) & (bin <= high)


@triton.jit
def _until(score, ids, cut, last_id):
    """Whether ids are kept by a filter that ends with the id `last_id` of the order `cut`."""
    order = in_order(score)
    return (order > cut) | ((order == cut) & (ids <= last_id))


@triton.jit
def _sum(source, low, high, by_mass, cut, last_id, BLOCK: tl.constexpr):
    """The sum of the masses, or the number, of the ids of some bins until an end."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, source[2], BLOCK):
        ids, score, inside = _block(source, low, high, start, BLOCK)
        weight = tl.where(by_mass, _masses(score), 1)
        total += tl.where(inside & _until(score, ids, cut, last_id), weight, 0)
    return tl.sum(total, 0)


@triton.jit
def _end(source, low, high, by_mass, before, target, BLOCK: tl.constexpr):
    """The first end until which `before + _sum` reaches a target: by bisection, first of scores, then of ids."""
    cut = in_order((high + 1).to(tl.float32) / -_PER_UNIT) + 1
    above = in_order(low.to(tl.float32) / -_PER_UNIT)
    while cut < above:
        middle = cut + ((above - cut + 1) >> 1)
        reached = before + _sum(source, low, high, by_mass, middle, _LAST_ID, BLOCK)
        if reached.to(tl.float64) >= target:
            cut = middle
        else:
            above = middle - 1
    lows, highs = tl.full([BLOCK], _LAST_ID, tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, source[2], BLOCK):
        ids, score, inside = _block(source, low, high, start, BLOCK)
        equal = inside & (in_order(score) == cut)
        lows = tl.where(equal, tl.minimum(lows, ids), lows)
        highs = tl.where(equal, tl.maximum(highs, ids), highs)
    first_id, last_id = tl.min(lows, 0), tl.max(highs, 0)
    while first_id < last_id:
        middle = (first_id + last_id) >> 1
        reached = before + _sum(source, low, high, by_mass, cut, middle, BLOCK)
        if reached.to(tl.float64) >= target:
            last_id = middle
        else:
            first_id = middle + 1
    return cut, last_id


@triton.jit(do_not_specialize=["n", "parts"])
def choose_kernel(
    logits,  # [positions, VOCAB], strides (stride, 1)
    states,  # int64 [positions, _STATE]
    listed,  # int32 [positions, LISTED]
    keys,  # int64 [positions, parts], of `score + noise`
    tokens,  # int64 [positions]
    position,  # int64 [positions]
    seed,  # int64 [rows]
    temperature,
    top_k,
    top_p,
    min_p,
    stride,
    n,
    parts,
    VOCAB: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Finds the ends of top-k and top-p in the window, and the best of all kept ids. Grid `[positions]`."""
    at = tl.program_id(0).to(tl.int64)
    row = at // n
    state = states + at * _STATE
    best = tl.load(state)
    t, largest, found = tl.load(temperature + row), number_of(best), tl.load(state + 7)
    if _samples(largest, t):
        best = join_keys(keys + at * parts, parts)
        if found > 0:
            first, last = tl.load(state + 1).to(tl.int32), tl.load(state + 2).to(tl.int32)
            last_k = tl.load(state + 3).to(tl.int32)
            p, least = tl.load(top_p + row).to(tl.float64), tl.load(min_p + row)
            is_listed = found <= LISTED
            length = tl.where(is_listed, found, VOCAB).to(tl.int32)
            source = (logits + at * stride, listed + at * LISTED, length, is_listed, largest, t, least)
            cut_k, last_id_k = tl.full([], LEAST_ORDER, tl.int32), tl.zeros([], tl.int32)
            cut_p, last_id_p = cut_k, last_id_k
            total = tl.load(state + 5)
            if last_k < _BINS:
                k, before = tl.load(top_k + row).to(tl.float64), tl.load(state + 4)
                cut_k, last_id_k = _end(source, last_k, last_k, False, before, k, LISTED)
                total += _sum(source, last_k, last_k, True, cut_k, last_id_k, LISTED)
            if p < 1.0:
                target, before = p * total.to(tl.float64), tl.load(state + 6)
                cut_p, last_id_p = _end(source, first, last, True, before, target, LISTED)
            seeded, place = tl.load(seed + row), tl.load(position + at)
            for start in range(0, length, LISTED):
                ids, score, inside = _block(source, first, last, start, LISTED)
                kept = inside & _until(score, ids, cut_k, last_id_k) & _until(score, ids, cut_p, last_id_p)
                order = tl.where(kept, _noised(score, ids, seeded, place), LEAST_ORDER)
                best = tl.maximum(best, largest_key(order, ids))
    tl.store(tokens + at, column_of(best))


def sample_triton(
    logits: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """`sample_tokens` on the GPU or in Triton's interpreter."""
    x, n = logits.flatten(0, 1), logits.shape[1]
    keys, blocks = keys_of_parts(x)
    (positions, vocab), parts = x.shape, keys.shape[1]
    histograms = x.new_zeros(positions, 2, _BINS.value, dtype=torch.int64)
    states = x.new_empty(positions, _STATE.value, dtype=torch.int64)
    listed = x.new_empty(positions, _LISTED, dtype=torch.int32)
    tokens = x.new_empty(positions, dtype=torch.int64)
    position, seed, top_k = (p.contiguous() for p in (position, seed, top_k))
    temperature, top_p, min_p = (p.float().contiguous() for p in (temperature, top_p, min_p))
    grid, stride = (positions, parts), x.stride(0)
    histogram_kernel[grid](
        x,
        keys,
        histograms,
        temperature,
        top_k,
        top_p,
        min_p,
        stride,
        n,
        parts,
        blocks,
        VOCAB=vocab,
        BLOCK=BLOCK,
    )
    window_kernel[(positions,)](keys, histograms, states, top_k, top_p, n, parts, num_warps=8)
    collect_kernel[grid](
        x,
        states,
        listed,
        keys,
        position,
        seed,
        temperature,
        min_p,
        stride,
        n,
        blocks,
        VOCAB=vocab,
        LISTED=_LISTED,
        BLOCK=BLOCK,
    )
    choose_kernel[(positions,)](
        x,
        states,
        listed,
        keys,
        tokens,
        position,
        seed,
        temperature,
        top_k,
        top_p,
        min_p,
        stride,
        n,
        parts,
        VOCAB=vocab,
        LISTED=_LISTED,
        num_warps=16,
    )
    return tokens.view(logits.shape[:2])
