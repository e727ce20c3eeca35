"""What expert kernels share: the (token, expert) pairs of a program, their sort, and the sum over a token's experts.

Grids depend on shapes only. Shared experts, which run on every token, add tiles before those of routed experts, and
terms with weight 1 to the sum.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.device import power_of_two
from mla_compile.ops.experts.kernels.experts import padding_of, runs
from mla_compile.ops.experts.operands import ExpertOperands

_MAX_SORTED_AT_ONCE = 1024
"""Pairs per iteration of the sort: eight per thread of four warps."""
_SHARES = 4
"""Programs that sort one expert's pairs if these are many. On an H200 eight were slower: each reads all pairs."""


class Choices(NamedTuple):
    """All (token, expert) pairs: the arguments of a kernel with these names."""

    topk_ids: Any
    pairs: Any
    row_lens: Any
    rows: Any
    q_len: Any


class Sort(NamedTuple):
    """Constants of a sort."""

    TOPK: int
    CHUNK: int  # pairs per iteration
    SHARES: int  # programs that sort one expert's pairs

    @classmethod
    def of(cls, topk_ids: Tensor) -> "Sort":
        pairs = topk_ids.numel()
        chunk = min(_MAX_SORTED_AT_ONCE, power_of_two(pairs))
        return cls(topk_ids.shape[1], chunk, _SHARES if chunk == _MAX_SORTED_AT_ONCE else 1)


class Sizes(NamedTuple):
    """Constants of a kernel."""

    TOPK: int
    SHARED: int
    HIDDEN: int
    INTERMEDIATE: int
    BY_PAIR: bool  # see `_expert`
    CHUNK: int  # pairs per iteration of the search
    BLOCK_E: int  # experts rounded up to a power of two


@triton.jit
def _chosen(choices, pair, TOPK: tl.constexpr):
    """The experts of pairs; -1 past the last pair and for padding."""
    inside = pair < choices.pairs
    if choices.row_lens is not None:
        inside &= runs(pair // TOPK, choices.row_lens, choices.rows, choices.q_len)
    return tl.load(choices.topk_ids + pair, mask=inside, other=-1)


@triton.jit
def _expert(choices, slot, S: tl.constexpr):
    """The expert of a slot, and the number of its pairs.

    A slot is an expert, or with BY_PAIR a pair, so that few pairs need few programs: the first pair of an expert gets
    the number of its pairs, and its other pairs get 0.
    """
    expert = slot
    if S.BY_PAIR:
        expert = _chosen(choices, slot, S.TOPK).to(tl.int32)
    count = 0
    earlier = 0
    for start in range(0, choices.pairs, S.CHUNK):
        pair = start + tl.arange(0, S.CHUNK)
        mine = _chosen(choices, pair, S.TOPK) == expert
        count += tl.sum(mine.to(tl.int32), 0)
        earlier += tl.sum((mine & (pair < slot)).to(tl.int32), 0)
    if S.BY_PAIR:
        count = tl.where((earlier > 0) | (expert < 0), 0, count)
    return expert, count


@triton.jit
def _members(choices, expert, wanted, S: tl.constexpr):
    """The `wanted[i]`-th pair of the expert, int64; 0 if it has fewer pairs."""
    result = tl.zeros_like(wanted)
    seen = 0
    for start in range(0, choices.pairs, S.CHUNK):
        pair = start + tl.arange(0, S.CHUNK)
        mine = (_chosen(choices, pair, S.TOPK) == expert).to(tl.int32)
        rank = tl.where(mine == 1, seen + tl.cumsum(mine, 0) - 1, -1)
        result += tl.sum(tl.where(rank[None, :] == wanted[:, None], pair[None, :], 0), 1)
        seen += tl.sum(mine, 0)
    return result.to(tl.int64)


@triton.jit
def sort_expert(choices, work, experts, starts, order, places, S: tl.constexpr):
    """A share of one expert's part of the results of `sort_pairs`; work: `expert * SHARES + share`, S: a `Sort`.

    Each program reads all pairs and waits for no other program, so one launch is enough and the order is fixed.
    """
    CHUNK: tl.constexpr = S.CHUNK
    SHARES: tl.constexpr = S.SHARES
    pairs = choices.pairs
    expert = work // SHARES
    share = tl.cdiv(tl.cdiv(pairs, CHUNK), SHARES) * CHUNK
    begin = work % SHARES * share
    earlier = tl.zeros([CHUNK], tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = _chosen(choices, pair, S.TOPK)
        is_earlier = (chosen < expert) | ((chosen == expert) & (pair < begin))
        earlier += ((chosen >= 0) & is_earlier).to(tl.int32)
    end = tl.sum(earlier, 0)
    tl.store(starts + expert, end, mask=begin == 0)
    for start in range(begin, tl.minimum(begin + share, pairs), CHUNK):
        pair = start + tl.arange(0, CHUNK)
        mine = (_chosen(choices, pair, S.TOPK) == expert).to(tl.int32)
        place = end + tl.cumsum(mine, 0) - 1
        tl.store(order + place, pair, mask=mine == 1)
        tl.store(places + pair, place, mask=mine == 1)
        end += tl.sum(mine, 0)
    tl.store(starts + experts, end, mask=work == experts * SHARES - 1)


@triton.jit(do_not_specialize=["pairs", "rows"])
def sort_kernel(
    topk_ids,  # int64 [pairs]
    starts,  # int32 [experts + 1]
    order,  # int32 [pairs]
    places,  # int32 [pairs]
    pairs,
    row_lens,
    rows,
    q_len,
    S: tl.constexpr,
):
    """`sort_expert`; grid `[experts * S.SHARES]`."""
    choices = Choices(topk_ids, pairs, row_lens, rows, q_len)
    sort_expert(choices, tl.program_id(0), tl.num_programs(0) // S.SHARES, starts, order, places, S)


@triton.jit
def _chosen_tile(
    choices, program, starts, experts, S: tl.constexpr, BLOCK_T: tl.constexpr, COLUMN_TILES: tl.constexpr
):
    """The work of a program for routed experts: an expert, a tile of its columns, and the range of its pairs.

    Sorted: the range is in sorted order, with at most BLOCK_T pairs. Programs of the same columns are consecutive, so
    all but the first find the weights in the cache. Programs past the last tile get an empty range.
    Unsorted: the range is in ranks within the expert, and a program gets all pairs of the expert.
    """
    if starts is None:
        expert, end = _expert(choices, program // COLUMN_TILES, S)
        column = program % COLUMN_TILES
        begin = 0
    else:
        e = tl.arange(0, S.BLOCK_E)
        start_of_e = tl.load(starts + e, mask=e < experts, other=0)
        end_of_e = tl.load(starts + e + 1, mask=e < experts, other=0)
        programs = (end_of_e - start_of_e + BLOCK_T - 1) // BLOCK_T * COLUMN_TILES
        before = tl.cumsum(programs, 0) <= program
        expert = tl.sum(before.to(tl.int32), 0)
        nth = program - tl.sum(tl.where(before, programs, 0), 0)
        begin = tl.load(starts + expert, mask=expert < experts, other=0)
        end = tl.load(starts + expert + 1, mask=expert < experts, other=0)
        tiles = tl.maximum((end - begin + BLOCK_T - 1) // BLOCK_T, 1)
        column = nth // tiles
        begin += nth % tiles * BLOCK_T
        end = tl.minimum(end, begin + BLOCK_T)
    return expert, column, begin, end


@triton.jit
def tile_of(
    choices,
    tokens,
    starts,
    experts,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
):
    """The work of a program: a routed expert, a shared expert (or -1), a tile of its columns, a range of its tokens.

    The first programs take shared experts, so that these do not end last. `_chosen_tile` gives the range of the others.
    """
    program = tl.program_id(0)
    if S.SHARED == 0:
        expert, column, begin, end = _chosen_tile(choices, program, starts, experts, S, BLOCK_T, COLUMN_TILES)
        shared = -1
    else:
        tiles = tl.cdiv(tokens, BLOCK_T)
        shared = program // (tiles * COLUMN_TILES)
        if shared < S.SHARED:
            expert = shared * 0
            column = program // tiles % COLUMN_TILES
            begin = program % tiles * BLOCK_T
            end = tl.minimum(tokens, begin + BLOCK_T)
        else:
            shared = -1 + shared * 0
            behind = program - S.SHARED * tiles * COLUMN_TILES
            expert, column, begin, end = _chosen_tile(
                choices, behind, starts, experts, S, BLOCK_T, COLUMN_TILES
            )
    return expert, shared, column, begin, end


@triton.jit
def rows_of(choices, t, end, expert, shared, tokens, starts, order, S: tl.constexpr):
    """The tokens at positions t of the range of a `tile_of`, and the matrix rows of their results; int64.

    order: None if the caller does not use the tokens.
    """
    token = t.to(tl.int64)
    row = token
    if starts is None:
        # A shared expert needs no search.
        pairs = choices.pairs if shared < 0 else 0
        searched = Choices(choices.topk_ids, pairs, choices.row_lens, choices.rows, choices.q_len)
        row = _members(searched, expert, t, S)
        token = row // S.TOPK
    elif order is not None:
        token = tl.load(order + t, mask=t < end, other=0).to(tl.int64) // S.TOPK
    if S.SHARED > 0:
        token = tl.where(shared >= 0, t, token)
        row = tl.where(shared >= 0, choices.pairs + tl.cast(shared, tl.int64) * tokens + t, row)
    return token, row


@triton.jit(do_not_specialize=["tokens", "rows"])
def weighted_sum_kernel(
    pair_outs,  # [tokens * (TOPK + SHARED), HIDDEN], `out` of `down_kernel`
    places,  # of `sort_pairs`; None if unsorted
    topk_weights,  # [tokens, TOPK]
    out,  # [tokens, HIDDEN]
    tokens,
    row_lens,
    rows,
    q_len,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`sum_k weight_k * out_k` of one token, in the order of k, then shared experts; 0 for padding.

    Grid `[tokens, column tiles]`.
    """
    wait_for_kernel_before(EARLY)
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    result = tl.zeros([BLOCK_C], tl.float32)
    there = c < HIDDEN
    if row_lens is not None:
        there &= runs(token, row_lens, rows, q_len)
    for k in tl.static_range(TOPK):
        pair = token * TOPK + k
        weight = tl.load(topk_weights + pair).to(tl.float32)
        row = pair if places is None else tl.load(places + pair).to(tl.int64)
        pair_out = tl.load(pair_outs + row * HIDDEN + c, mask=there, other=0.0).to(tl.float32)
        # Weights of padding may be NaN, so both factors are masked.
        result += tl.where(there, weight, 0.0) * pair_out
    for expert in tl.static_range(SHARED):
        row = tokens * (TOPK + expert) + token
        result += tl.load(pair_outs + row * HIDDEN + c, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + c, result.to(out.dtype.element_ty), mask=c < HIDDEN)


def sorted_like(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `sort_pairs`."""
    pairs = topk_ids.numel()
    starts, order, places = (topk_ids.new_empty(n, dtype=torch.int32) for n in (experts + 1, pairs, pairs))
    return starts, order, places


def sort_pairs(
    topk_ids: Tensor, experts: int, row_lens: Tensor | None = None, q_len: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert, and by pair within an expert.

    Args:
        topk_ids: int64 `[tokens, topk]`, contiguous.
        experts: the number of experts. Pairs with other ids are left out, and so is padding.
        row_lens, q_len: see `moe_experts_op`.

    Returns:
        starts: int32 `[experts + 1]`; expert e has `order[starts[e] : starts[e + 1]]`.
        order: int32 `[pairs]`, unwritten from `starts[experts]` on.
        places: int32 `[pairs]`, the index of a pair in `order`; unwritten for those left out.
    """
    pairs = topk_ids.numel()
    starts, order, places = sorted_like(topk_ids, experts)
    sizes = Sort.of(topk_ids)
    sort_kernel[(experts * sizes.SHARES,)](
        *(topk_ids, starts, order, places, pairs, *padding_of(row_lens, q_len), sizes), num_warps=4
    )
    return starts, order, places


def num_programs(operands: ExpertOperands, column_tiles: int, tile_tokens: int, is_sorted: bool) -> int:
    """The grid: an upper bound on the tiles of `tile_of` over all possible choices of experts."""
    tokens, pairs = operands.x.shape[0], operands.topk_ids.numel()
    token_tiles = chosen = min(pairs, operands.w_down.shape[0])
    if is_sorted:
        token_tiles = (pairs + chosen * (tile_tokens - 1)) // tile_tokens
    return column_tiles * (token_tiles + operands.num_shared * -(-tokens // tile_tokens))


def weighted_sum(operands: ExpertOperands, pair_outs: Tensor, places: Tensor | None) -> Tensor:
    """The result of a call, from the results of pairs and shared experts: see `weighted_sum_kernel`."""
    (tokens, hidden), topk = operands.x.shape, operands.topk_ids.shape[1]
    out = operands.x.new_empty((tokens, hidden))
    padding = padding_of(operands.row_lens, operands.q_len)
    # With few tokens a thread takes few columns, so it can issue the loads of all experts at once.
    block_c = 256 if tokens <= 64 else 1024
    weighted_sum_kernel[(tokens, triton.cdiv(hidden, block_c))](
        *(pair_outs, places, operands.topk_weights.contiguous(), out, tokens, *padding),
        TOPK=topk,
        SHARED=operands.num_shared,
        HIDDEN=hidden,
        BLOCK_C=block_c,
        num_warps=4,
        **early_options(operands.x),
    )
    return out
