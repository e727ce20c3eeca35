"""Experts with FP8 weights that are multiplied by FP8 tokens, so no weight is converted: the launches of `moe.py`.

A token is the sum of one or two FP8 vectors (`linear/kernels/fp8.py`). Two hold what bfloat16 holds; one is what
`fp8_activations` allows. Each block of 128 columns has a scale. Matrix instructions multiply the values of a block by
the weights, and their sum is scaled and added in float32. On an H200 all tiles gave a token the same bits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.device import power_of_two
from mla_compile.ops.experts.kernels.experts import Down, GateUp, gate_and_up
from mla_compile.ops.experts.kernels.pairs import (
    Choices,
    Sizes,
    num_programs,
    rows_of,
    tile_of,
    weighted_sum,
)
from mla_compile.ops.experts.kernels.prepare import Tokens, prepared
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.experts.tiles import fp8_product_tiles
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.kernels.fp8 import (
    BLOCK,
    padded_tokens,
    quantized,
)
from mla_compile.ops.linear.tiles import ProductTiles


class Weights(NamedTuple):
    """Two FP8 weights by which a program multiplies."""

    first: Any  # pointers [columns] to their matrix rows
    second: Any
    first_scale: Any  # pointers to the scales of the first block
    second_scale: Any


@triton.jit
def _scales(x, row, inside, weights, block, BLOCKS: tl.constexpr):
    """The factors of a block's sums, `[tokens]`: of a token and of each weight."""
    of_token = tl.load(x.scales + block * x.stride + row, mask=inside & (block < BLOCKS), other=0.0)
    first = tl.load(weights.first_scale + block, mask=block < BLOCKS, other=0.0)
    second = tl.load(weights.second_scale + block, mask=block < BLOCKS, other=0.0)
    return of_token * first, of_token * second


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
        large = tl.load(at, mask=inside[:, None], other=0.0)
        small = large
        if PARTS == 2:
            small = tl.load(at + x.stride.to(tl.int64) * COLUMNS, mask=inside[:, None], other=0.0)
        w_first = tl.load(weights.first[:, None] + block * BLOCK + k)
        w_second = tl.load(weights.second[:, None] + block * BLOCK + k)
        first = _add_product(first, large, small, w_first, of_first, PARTS, COLUMNS_FIRST)
        second = _add_product(second, large, small, w_second, of_second, PARTS, COLUMNS_FIRST)
    if COLUMNS_FIRST:
        first = tl.trans(first)
        second = tl.trans(second)
    return first, second


@triton.jit(do_not_specialize=["pairs", "tokens"])
def gate_up_fp8_kernel(
    x,  # vectors and scales of `Tokens`
    x_scales,
    weights,  # `GateUp`
    scales,  # `GateUp`
    activated,  # vectors and scales of `Tokens`: those of pairs in sorted order, then those of shared experts
    activated_scales,
    tokens,
    order,  # order and starts: of `sort_pairs`
    starts,
    pairs,
    experts,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`silu(gate) * up` of one `tile_of` with BLOCK columns, quantised."""
    wait_for_kernel_before(EARLY)
    tl.static_assert(BLOCK_C == BLOCK)
    tl.static_assert(BLOCK_K == BLOCK)
    choices = Choices(None, pairs, None, None, None)
    HIDDEN: tl.constexpr = S.HIDDEN
    INTERMEDIATE: tl.constexpr = S.INTERMEDIATE
    BLOCKS: tl.constexpr = HIDDEN // BLOCK
    COLUMN_TILES: tl.constexpr = INTERMEDIATE // BLOCK
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    if begin < end:
        gate_at, up_at = gate_and_up(weights, expert, shared, shared >= 0, S.SHARED, INTERMEDIATE * HIDDEN)
        gate_scale, up_scale = gate_and_up(
            scales, expert, shared, shared >= 0, S.SHARED, COLUMN_TILES * BLOCKS
        )
        t = begin + tl.arange(0, BLOCK_T)
        inside = t < end
        token, row = rows_of(choices, t, end, expert, shared, tokens, starts, order, S)
        c = column * BLOCK + tl.arange(0, BLOCK)
        of_column = c.to(tl.int64) * HIDDEN
        of_block = column * BLOCKS
        two = Weights(gate_at + of_column, up_at + of_column, gate_scale + of_block, up_scale + of_block)
        of_tokens = Tokens(x, x_scales, padded_tokens(tokens))
        gate, up = _two_products(of_tokens, token, inside, two, HIDDEN, PARTS)
        result = gate / (1.0 + tl.exp(-gate)) * up
        large, small, scale = quantized(result, PARTS, activated.dtype.element_ty)
        results = (pairs + S.SHARED * tokens).to(tl.int64)
        at = activated + (row * INTERMEDIATE)[:, None] + c[None, :]
        tl.store(at, large, mask=inside[:, None])
        if PARTS == 2:
            tl.store(at + results * INTERMEDIATE, small, mask=inside[:, None])
        tl.store(activated_scales + column * results + row, scale, mask=inside)


@triton.jit(do_not_specialize=["pairs", "tokens"])
def down_fp8_kernel(
    activated,  # this and the others as in `gate_up_fp8_kernel`
    activated_scales,
    weights,  # `Down`
    out,  # [pairs + SHARED * tokens, HIDDEN], in the order of `activated`
    tokens,
    starts,
    pairs,
    experts,
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
    choices = Choices(None, pairs, None, None, None)
    HIDDEN: tl.constexpr = S.HIDDEN
    INTERMEDIATE: tl.constexpr = S.INTERMEDIATE
    COLUMN_TILES: tl.constexpr = (HIDDEN + 2 * BLOCK_C - 1) // (2 * BLOCK_C)
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    if begin < end:
        w_at = weights.down + expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
        scale_at = weights.scale + expert.to(tl.int64) * (HIDDEN // BLOCK * (INTERMEDIATE // BLOCK))
        width = INTERMEDIATE
        if S.SHARED > 0:  # noqa: SIM102 - the outer condition is constexpr
            if shared >= 0:
                w_at = weights.shared_down + shared * INTERMEDIATE
                scale_at = weights.shared_scale + shared * (INTERMEDIATE // BLOCK)
                width = S.SHARED * INTERMEDIATE
        t = begin + tl.arange(0, BLOCK_T)
        inside = t < end
        _, row = rows_of(choices, t, end, expert, shared, tokens, starts, None, S)
        left = column * 2 * BLOCK_C
        right = tl.minimum(left + BLOCK_C, HIDDEN - BLOCK_C)  # of half a tile the left columns once more
        c = tl.arange(0, BLOCK_C)
        two = Weights(
            w_at + (left + c).to(tl.int64) * width,
            w_at + (right + c).to(tl.int64) * width,
            scale_at + left // BLOCK * (width // BLOCK),
            scale_at + right // BLOCK * (width // BLOCK),
        )
        of_pairs = Tokens(activated, activated_scales, (pairs + S.SHARED * tokens).to(tl.int64))
        of_left, of_right = _two_products(of_pairs, row, inside, two, INTERMEDIATE, PARTS)
        at = out + (row * HIDDEN)[:, None] + c[None, :]
        tl.store(at + left, of_left.to(out.dtype.element_ty), mask=inside[:, None])
        tl.store(at + right, of_right.to(out.dtype.element_ty), mask=inside[:, None])


def moe_fp8(
    operands: ExpertOperands, *, parts: int = 2, tiles: tuple[ProductTiles, ProductTiles] | None = None
) -> Tensor:
    """`moe_experts_op` of bfloat16 tokens by FP8 weights, with FP8 products.

    Each expert's results are rounded to bfloat16 before they are weighted.

    parts: the FP8 vectors of a token; see `quantized`.
    tiles: of gate and up, and of down with half of its columns; by default from `tiles.py`.
    """
    x, topk_ids, shared = operands.x, operands.topk_ids, operands.num_shared
    (tokens, hidden), (experts, _, intermediate) = x.shape, operands.w_down.shape
    pairs, topk = topk_ids.numel(), topk_ids.shape[1]
    results = pairs + shared * tokens
    gate_up, down = tiles or fp8_product_tiles(pairs, experts, parts)
    sizes = Sizes(topk, shared, hidden, intermediate, False, 0, power_of_two(experts))
    early = early_options(x)

    vectors, scales, starts, order, places = prepared(operands, parts)
    activated = vectors.new_empty((parts, results, intermediate))
    activated_scales = scales.new_empty((intermediate // fp8.BLOCK, results))
    pair_outs = x.new_empty((results, hidden))
    work = starts, pairs, experts, sizes, parts
    gate_up_fp8_kernel[(num_programs(operands, intermediate // fp8.BLOCK, gate_up.tokens, True),)](
        *(vectors, scales, *GateUp.of(operands), activated, activated_scales, tokens, order, *work),
        **early,
        **gate_up.options(hidden),
    )
    column_tiles = triton.cdiv(hidden, 2 * down.columns)
    down_fp8_kernel[(num_programs(operands, column_tiles, down.tokens, True),)](
        *(activated, activated_scales, Down.of(operands), pair_outs, tokens, *work),
        **early,
        **down.options(intermediate),
    )
    return weighted_sum(operands, pair_outs, places)


def moe_fp8_activations(operands: ExpertOperands) -> Tensor:
    """`moe_fp8` of tokens that are quantised to FP8."""
    return moe_fp8(operands, parts=1)
