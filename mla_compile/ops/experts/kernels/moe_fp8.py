"""Experts with FP8 weights that are multiplied by FP8 tokens, so no weight is converted: the launches of `moe.py`.

A token is the sum of one or two FP8 vectors (`linear/kernels/fp8.py`). Two hold what bfloat16 holds; one is what
`fp8_activations` allows. Each block of 128 columns has a scale. Matrix instructions multiply the values of a block by
the weights, and their sum is scaled and added in float32. On an H200 all tiles gave a token the same bits.

Many tokens are quantised by a launch before, and gate and up write quantised results. Few tokens are quantised by each
program that multiplies them: that takes less time than another launch.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.device import power_of_two
from mla_compile.ops.experts.kernels.experts import Down, GateUp, gate_and_up, padding_of
from mla_compile.ops.experts.kernels.pairs import (
    PAIRS_AT_ONCE,
    Choices,
    Sizes,
    num_programs,
    rows_of,
    sort_pairs,
    tile_of,
    weighted_sum,
)
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.experts.tiles import MAX_UNSORTED_PAIRS, fp8_product_tiles
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.kernels.fp8 import BLOCK, quantize_triton, quantized
from mla_compile.ops.linear.tiles import ProductTiles


class Tokens(NamedTuple):
    """Tokens, as the arguments of a kernel with these names."""

    vectors: Any  # float8 [PARTS, rows, COLUMNS], contiguous; float [rows, COLUMNS] if not quantised yet
    scales: Any  # float32 [COLUMNS / BLOCK, rows]; None if not quantised yet
    rows: Any


class Weights(NamedTuple):
    """Two FP8 weights by which a program multiplies."""

    first: Any  # pointers [columns] to their matrix rows
    second: Any
    first_scale: Any  # pointers to the scales of the first block
    second_scale: Any


@triton.jit
def _scales(x, row, inside, weights, block, BLOCKS: tl.constexpr):
    """The factors of a block's sums: of each weight, and of the tokens `[tokens]` if they are quantised."""
    first = tl.load(weights.first_scale + block, mask=block < BLOCKS, other=0.0)
    second = tl.load(weights.second_scale + block, mask=block < BLOCKS, other=0.0)
    if x.scales is not None:
        of_token = tl.load(x.scales + block * x.rows + row, mask=inside & (block < BLOCKS), other=0.0)
        first = of_token * first
        second = of_token * second
    return first, second


@triton.jit
def _add_product(result, large, small, w, scale, PARTS: tl.constexpr, COLUMNS_FIRST: tl.constexpr):
    """`result` plus the scaled product of tokens and weights, `[tokens, columns]`, or transposed with COLUMNS_FIRST.

    The small parts are added first, as the sum of matrix instructions loses the last bits of what it adds to.
    """
    if COLUMNS_FIRST:
        if PARTS == 1:
            product = tl.dot(w, tl.trans(large))
        else:
            product = tl.dot(w, tl.trans(large), tl.dot(w, tl.trans(small)))
        return tl.fma(product, scale[None, :], result)
    else:
        if PARTS == 1:
            product = tl.dot(large, tl.trans(w))
        else:
            product = tl.dot(large, tl.trans(w), tl.dot(small, tl.trans(w)))
        return tl.fma(product, scale[:, None], result)


@triton.jit
def _two_products(x, row, inside, weights, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """The tokens of matrix rows `row` of x, of COLUMNS columns, by both weights: float32 `[tokens, columns]` each."""
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    BLOCK_T: tl.constexpr = row.shape[0]
    BLOCK_C: tl.constexpr = weights.first.shape[0]
    COLUMNS_FIRST: tl.constexpr = BLOCK_T < 64  # the fewest matrix rows of Hopper's instructions
    k = tl.arange(0, BLOCK)[None, :]
    first = tl.zeros([BLOCK_C, BLOCK_T] if COLUMNS_FIRST else [BLOCK_T, BLOCK_C], tl.float32)
    second = tl.zeros_like(first)
    # Loaded an iteration early, as only what matrix instructions read is pipelined.
    next_first, next_second = _scales(x, row, inside, weights, 0, BLOCKS)
    for block in range(BLOCKS):
        of_first = next_first
        of_second = next_second
        next_first, next_second = _scales(x, row, inside, weights, block + 1, BLOCKS)
        at = x.vectors + (row * COLUMNS)[:, None] + block * BLOCK + k
        if x.scales is None:
            of_tokens = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
            large, small, of_token = quantized(of_tokens, PARTS, weights.first.dtype.scalar.element_ty)
            of_first = of_token * of_first
            of_second = of_token * of_second
        else:
            large = tl.load(at, mask=inside[:, None], other=0.0)
            small = large
            if PARTS == 2:
                small = tl.load(at + x.rows.to(tl.int64) * COLUMNS, mask=inside[:, None], other=0.0)
        w_first = tl.load(weights.first[:, None] + block * BLOCK + k)
        w_second = tl.load(weights.second[:, None] + block * BLOCK + k)
        first = _add_product(first, large, small, w_first, of_first, PARTS, COLUMNS_FIRST)
        second = _add_product(second, large, small, w_second, of_second, PARTS, COLUMNS_FIRST)
    if COLUMNS_FIRST:
        first = tl.trans(first)
        second = tl.trans(second)
    return first, second


@triton.jit
def _store_gate_up(
    x,
    token,
    row,
    inside,
    weights,
    activated,
    column,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`silu(gate) * up` of tokens at a tile of columns, in matrix rows `row` of `activated`, which has COLUMNS."""
    BLOCK_C: tl.constexpr = weights.first.shape[0]
    gate, up = _two_products(x, token, inside, weights, HIDDEN, PARTS)
    result = gate / (1.0 + tl.exp(-gate)) * up
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    at = activated.vectors + (row * COLUMNS)[:, None] + c[None, :]
    if activated.scales is None:
        tl.store(at, result, mask=inside[:, None])
    else:
        tl.static_assert(BLOCK_C == BLOCK)
        large, small, scale = quantized(result, PARTS, activated.vectors.dtype.element_ty)
        tl.store(at, large, mask=inside[:, None])
        if PARTS == 2:
            tl.store(at + activated.rows.to(tl.int64) * COLUMNS, small, mask=inside[:, None])
        tl.store(activated.scales + column * activated.rows.to(tl.int64) + row, scale, mask=inside)


@triton.jit(do_not_specialize=["pairs", "tokens", "rows"])
def gate_up_fp8_kernel(
    x,  # vectors and scales of `Tokens`, of the tokens
    x_scales,
    weights,  # `GateUp`
    scales,  # `GateUp`
    activated,  # vectors and scales of `Tokens`, of pairs in sorted order, then of shared experts; float32 if unsorted
    activated_scales,
    tokens,
    order,  # order and starts: of `sort_pairs`; None if each program searches for its pairs
    topk_ids,  # int64 [tokens, TOPK]
    starts,
    pairs,  # tokens * TOPK
    experts,
    row_lens,  # int32 [rows], see `runs`; None if no token is padding
    rows,
    q_len,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`silu(gate) * up` of one `tile_of` with BLOCK_C columns; BLOCK columns if the result is quantised."""
    wait_for_kernel_before(EARLY)
    tl.static_assert(BLOCK_K == BLOCK)
    choices = Choices(topk_ids, pairs, row_lens, rows, q_len)
    HIDDEN: tl.constexpr = S.HIDDEN
    COLUMNS: tl.constexpr = S.INTERMEDIATE
    COLUMN_TILES: tl.constexpr = COLUMNS // BLOCK_C
    BLOCKS: tl.constexpr = HIDDEN // BLOCK
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    gate_at, up_at = gate_and_up(weights, expert, shared, shared >= 0, S.SHARED, COLUMNS * HIDDEN)
    gate_scale, up_scale = gate_and_up(
        scales, expert, shared, shared >= 0, S.SHARED, COLUMNS // BLOCK * BLOCKS
    )
    of_column = (column * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64) * HIDDEN
    of_block = column * BLOCK_C // BLOCK * BLOCKS
    two = Weights(gate_at + of_column, up_at + of_column, gate_scale + of_block, up_scale + of_block)
    of_tokens = Tokens(x, x_scales, (tokens + 3) // 4 * 4)  # the rows of `quantize_triton`
    results = Tokens(activated, activated_scales, pairs + S.SHARED * tokens)
    if starts is None:
        for first in range(begin, end, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            token, row = rows_of(choices, t, end, expert, shared, tokens, starts, order, S)
            _store_gate_up(of_tokens, token, row, t < end, two, results, column, HIDDEN, COLUMNS, PARTS)
    elif begin < end:  # one tile: for a loop around that of the blocks there are too few registers
        t = begin + tl.arange(0, BLOCK_T)
        token, row = rows_of(choices, t, end, expert, shared, tokens, starts, order, S)
        _store_gate_up(of_tokens, token, row, t < end, two, results, column, HIDDEN, COLUMNS, PARTS)


@triton.jit
def _store_down(
    activated,
    row,
    inside,
    weights,
    out,
    left,
    right,
    INTERMEDIATE: tl.constexpr,
    HIDDEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The down projection of matrix rows `row` at the columns from `left` and from `right` on."""
    of_left, of_right = _two_products(activated, row, inside, weights, INTERMEDIATE, PARTS)
    at = out + (row * HIDDEN)[:, None] + tl.arange(0, weights.first.shape[0])[None, :]
    tl.store(at + left, of_left.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(at + right, of_right.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["pairs", "tokens", "rows"])
def down_fp8_kernel(
    activated,  # this and the others as in `gate_up_fp8_kernel`
    activated_scales,
    weights,  # `Down`
    out,  # [pairs + SHARED * tokens, HIDDEN], in the order of `activated`
    tokens,
    topk_ids,
    starts,
    pairs,
    experts,
    row_lens,
    rows,
    q_len,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The down projection of one `tile_of` with 2 * BLOCK_C columns, of which the last tile may have half."""
    wait_for_kernel_before(EARLY)
    tl.static_assert(BLOCK_K == BLOCK)
    choices = Choices(topk_ids, pairs, row_lens, rows, q_len)
    HIDDEN: tl.constexpr = S.HIDDEN
    INTERMEDIATE: tl.constexpr = S.INTERMEDIATE
    COLUMN_TILES: tl.constexpr = (HIDDEN + 2 * BLOCK_C - 1) // (2 * BLOCK_C)
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    w_at = weights.down + expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
    scale_at = weights.scale + expert.to(tl.int64) * (HIDDEN // BLOCK * (INTERMEDIATE // BLOCK))
    width = INTERMEDIATE
    if S.SHARED > 0:  # noqa: SIM102 - the outer condition is constexpr
        if shared >= 0:
            w_at = weights.shared_down + shared * INTERMEDIATE
            scale_at = weights.shared_scale + shared * (INTERMEDIATE // BLOCK)
            width = S.SHARED * INTERMEDIATE
    left = column * 2 * BLOCK_C
    right = tl.minimum(left + BLOCK_C, HIDDEN - BLOCK_C)  # of half a tile the left columns once more
    c = tl.arange(0, BLOCK_C)
    two = Weights(
        w_at + (left + c).to(tl.int64) * width,
        w_at + (right + c).to(tl.int64) * width,
        scale_at + left // BLOCK * (width // BLOCK),
        scale_at + right // BLOCK * (width // BLOCK),
    )
    of_pairs = Tokens(activated, activated_scales, pairs + S.SHARED * tokens)
    if starts is None:
        for first in range(begin, end, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            _, row = rows_of(choices, t, end, expert, shared, tokens, starts, None, S)
            _store_down(of_pairs, row, t < end, two, out, left, right, INTERMEDIATE, HIDDEN, PARTS)
    elif begin < end:
        t = begin + tl.arange(0, BLOCK_T)
        _, row = rows_of(choices, t, end, expert, shared, tokens, starts, None, S)
        _store_down(of_pairs, row, t < end, two, out, left, right, INTERMEDIATE, HIDDEN, PARTS)


def moe_fp8(
    operands: ExpertOperands, *, parts: int = 2, tiles: tuple[ProductTiles, ProductTiles] | None = None
) -> Tensor:
    """`moe_experts_op` of bfloat16 tokens by FP8 weights, with FP8 products.

    parts: the FP8 vectors of a token; see `quantized`. 1 is for more than `MAX_UNSORTED_PAIRS` pairs.
    tiles: of gate and up, and of down with half of its columns; by default from `tiles.py`.
    """
    x, topk_ids, shared = operands.x.contiguous(), operands.topk_ids.contiguous(), operands.num_shared
    (tokens, hidden), (experts, _, intermediate) = x.shape, operands.w_down.shape
    pairs, topk = topk_ids.numel(), topk_ids.shape[1]
    results = pairs + shared * tokens
    is_sorted = pairs > MAX_UNSORTED_PAIRS
    gate_up, down = tiles or fp8_product_tiles(pairs, experts, parts)
    chunk = min(PAIRS_AT_ONCE, power_of_two(pairs))
    sizes = Sizes(topk, shared, hidden, intermediate, pairs < experts, chunk, power_of_two(experts))
    padding, early = padding_of(operands.row_lens, operands.q_len), early_options(x)

    def programs(columns: int, tiles: ProductTiles) -> tuple[int]:
        return (num_programs(operands, triton.cdiv(columns, tiles.columns), tiles.tokens, is_sorted),)

    scales = starts = order = places = activated_scale = None
    if is_sorted:
        x, scales = quantize_triton(x, parts)
        starts, order, places = sort_pairs(topk_ids, experts, operands.row_lens, operands.q_len)
        activated = x.new_empty((parts, results, intermediate), dtype=fp8.DTYPE)
        activated_scale = scales.new_empty((intermediate // fp8.BLOCK, results))
    else:
        activated = x.new_empty((results, intermediate), dtype=torch.float32)
    pair_outs = x.new_empty((results, hidden), dtype=operands.x.dtype)
    work = topk_ids, starts, pairs, experts, *padding, sizes, parts
    gate_up_fp8_kernel[programs(intermediate, gate_up)](
        *(x, scales, *GateUp.of(operands), activated, activated_scale, tokens, order, *work),
        **early,
        **gate_up.options(hidden),
    )
    halves = ProductTiles(down.tokens, 2 * down.columns, down.depth, down.warps, down.stages)
    down_fp8_kernel[programs(hidden, halves)](
        *(activated, activated_scale, Down.of(operands), pair_outs, tokens, *work),
        **early,
        **down.options(intermediate),
    )
    return weighted_sum(operands, pair_outs, places)


moe_fp8_activations = partial(moe_fp8, parts=1)
