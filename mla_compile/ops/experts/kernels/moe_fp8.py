"""Experts with FP8 weights that are multiplied by FP8 tokens, so no weight is converted: the launches of `moe.py`.

A token is the sum of one or two FP8 vectors (`linear/kernels/fp8.py`): two hold what bfloat16 holds, and one is what
`fp8_activations` allows. Each block of 128 columns has a scale. Matrix instructions multiply the values of a block by
the weights, and their sum is scaled and added in float32.
"""

from dataclasses import dataclass
from functools import partial

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
    sort_pairs,
    tile_of,
    weighted_sum,
)
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.kernels.fp8 import BLOCK, quantize_triton, quantized


@dataclass(frozen=True)
class Tiles:
    """The tiles of a call: tokens of both kernels, and columns of each of the two products of a down program."""

    tokens: int
    gate_up_warps: int
    gate_up_stages: int
    down_columns: int
    down_warps: int
    down_stages: int


@triton.jit
def _product(large, small, w, PARTS: tl.constexpr, COLUMNS_FIRST: tl.constexpr):
    """`[tokens, columns]`, with COLUMNS_FIRST transposed. The sum of the small products is rounded before it is large."""
    if COLUMNS_FIRST:
        if PARTS == 1:
            return tl.dot(w, tl.trans(large))
        else:
            return tl.dot(w, tl.trans(large), tl.dot(w, tl.trans(small)))
    elif PARTS == 1:
        return tl.dot(large, tl.trans(w))
    else:
        return tl.dot(large, tl.trans(w), tl.dot(small, tl.trans(w)))


@triton.jit
def _scales(x_scale, block, BLOCKS: tl.constexpr, scale_stride, inside, first_scale, second_scale):
    """The factors of a block's sums, `[tokens]`: of a token and of each weight."""
    of_tokens = tl.load(x_scale + block * scale_stride, mask=inside & (block < BLOCKS), other=0.0)
    of_first = tl.load(first_scale + block, mask=block < BLOCKS, other=0.0)
    of_second = tl.load(second_scale + block, mask=block < BLOCKS, other=0.0)
    return of_tokens * of_first, of_tokens * of_second


@triton.jit
def _two_products(
    x_at,  # pointers [tokens] to the rows of x
    part_stride,  # elements from the large parts to the small ones
    x_scale,  # pointers [tokens] to the scales of the first block
    scale_stride,
    inside,  # [tokens]
    first_at,  # pointers [columns] to the rows of a weight
    second_at,
    first_scale,  # pointer to the scale of the first block
    second_scale,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS_FIRST: tl.constexpr,
):
    """Tokens multiplied by two weights, float32 `[tokens, columns]` each."""
    k = tl.arange(0, BLOCK)[None, :]
    shape: tl.constexpr = (
        [first_at.shape[0], x_at.shape[0]] if COLUMNS_FIRST else [x_at.shape[0], first_at.shape[0]]
    )
    first = tl.zeros(shape, tl.float32)
    second = tl.zeros(shape, tl.float32)
    # One iteration early: the pipeline of loads has only those of matrix instructions.
    of_first, of_second = _scales(x_scale, 0, BLOCKS, scale_stride, inside, first_scale, second_scale)
    for block in range(BLOCKS):
        next_first, next_second = _scales(
            x_scale, block + 1, BLOCKS, scale_stride, inside, first_scale, second_scale
        )
        at = block * BLOCK + k
        large = tl.load(x_at[:, None] + at, mask=inside[:, None], other=0.0)
        small = large
        if PARTS == 2:
            small = tl.load(x_at[:, None] + part_stride + at, mask=inside[:, None], other=0.0)
        w_first = tl.load(first_at[:, None] + at)
        w_second = tl.load(second_at[:, None] + at)
        if COLUMNS_FIRST:
            first = tl.fma(_product(large, small, w_first, PARTS, True), of_first[None, :], first)
            second = tl.fma(_product(large, small, w_second, PARTS, True), of_second[None, :], second)
        else:
            first = tl.fma(_product(large, small, w_first, PARTS, False), of_first[:, None], first)
            second = tl.fma(_product(large, small, w_second, PARTS, False), of_second[:, None], second)
        of_first = next_first
        of_second = next_second
    if COLUMNS_FIRST:
        first = tl.trans(first)
        second = tl.trans(second)
    return first, second


@triton.jit(do_not_specialize=["pairs", "tokens", "x_rows"])
def gate_up_fp8_kernel(
    x,  # float8 [PARTS, x_rows, HIDDEN], contiguous
    x_scale,  # float32 [HIDDEN / BLOCK, x_rows]
    weights,  # `GateUp`
    scales,  # `GateUp`
    activated,  # float8 [PARTS, pairs + SHARED * tokens, INTERMEDIATE]; sorted pairs are in sorted order
    activated_scale,  # float32 [INTERMEDIATE / BLOCK, pairs + SHARED * tokens]
    x_rows,
    tokens,
    order,  # order and starts: of `sort_pairs`
    starts,
    pairs,
    experts,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`silu(gate) * up` of one `tile_of` with BLOCK columns, as PARTS vectors."""
    wait_for_kernel_before(EARLY)
    choices = Choices(None, pairs, None, None, None)
    HIDDEN: tl.constexpr = S.HIDDEN
    INTERMEDIATE: tl.constexpr = S.INTERMEDIATE
    BLOCKS: tl.constexpr = HIDDEN // BLOCK
    COLUMN_TILES: tl.constexpr = INTERMEDIATE // BLOCK
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    if begin < end:
        gate_of, up_of = gate_and_up(weights, expert, shared, shared >= 0, S.SHARED, INTERMEDIATE * HIDDEN)
        gate_scale, up_scale = gate_and_up(
            scales, expert, shared, shared >= 0, S.SHARED, COLUMN_TILES * BLOCKS
        )
        t = begin + tl.arange(0, BLOCK_T)
        token, row = rows_of(choices, t, end, expert, shared, tokens, starts, order, S)
        c = column * BLOCK + tl.arange(0, BLOCK)
        inside = t < end
        of_column = c.to(tl.int64) * HIDDEN
        gate, up = _two_products(
            x + token * HIDDEN,
            x_rows.to(tl.int64) * HIDDEN,
            x_scale + token,
            x_rows,
            inside,
            gate_of + of_column,
            up_of + of_column,
            gate_scale + column * BLOCKS,
            up_scale + column * BLOCKS,
            PARTS,
            BLOCKS,
            BLOCK_T < 64,
        )
        result = gate / (1.0 + tl.exp(-gate)) * up
        total_rows = (pairs + S.SHARED * tokens).to(tl.int64)
        large, small, scale = quantized(result, PARTS, activated.dtype.element_ty)
        at = activated + (row * INTERMEDIATE)[:, None] + c[None, :]
        tl.store(at, large, mask=inside[:, None])
        if PARTS == 2:
            tl.store(at + total_rows * INTERMEDIATE, small, mask=inside[:, None])
        tl.store(activated_scale + column * total_rows + row, scale, mask=inside)


@triton.jit(do_not_specialize=["pairs", "tokens"])
def down_fp8_kernel(
    activated,  # this and the others as in `gate_up_fp8_kernel`
    activated_scale,
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
    EARLY: tl.constexpr,
):
    """The down projection of one `tile_of` with 2 * BLOCK_C columns, of which the last tile may have half."""
    wait_for_kernel_before(EARLY)
    choices = Choices(None, pairs, None, None, None)
    HIDDEN: tl.constexpr = S.HIDDEN
    INTERMEDIATE: tl.constexpr = S.INTERMEDIATE
    BLOCKS: tl.constexpr = INTERMEDIATE // BLOCK
    COLUMN_TILES: tl.constexpr = (HIDDEN + 2 * BLOCK_C - 1) // (2 * BLOCK_C)
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    if begin < end:
        w_of = weights.down + expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
        scale_of = weights.scale + expert.to(tl.int64) * (HIDDEN // BLOCK * BLOCKS)
        width = INTERMEDIATE
        scale_width = BLOCKS
        if S.SHARED > 0:  # noqa: SIM102 - the outer condition is constexpr
            if shared >= 0:
                w_of = weights.shared_down + shared * INTERMEDIATE
                scale_of = weights.shared_scale + shared * BLOCKS
                width = S.SHARED * INTERMEDIATE
                scale_width = S.SHARED * BLOCKS
        t = begin + tl.arange(0, BLOCK_T)
        _, row = rows_of(choices, t, end, expert, shared, tokens, starts, None, S)
        inside = t < end
        total_rows = (pairs + S.SHARED * tokens).to(tl.int64)
        start = column * 2 * BLOCK_C
        start_second = tl.minimum(start + BLOCK_C, HIDDEN - BLOCK_C)
        c = tl.arange(0, BLOCK_C)
        first, second = _two_products(
            activated + row * INTERMEDIATE,
            total_rows * INTERMEDIATE,
            activated_scale + row,
            total_rows,
            inside,
            w_of + (start + c).to(tl.int64) * width,
            w_of + (start_second + c).to(tl.int64) * width,
            scale_of + start // BLOCK * scale_width,
            scale_of + start_second // BLOCK * scale_width,
            PARTS,
            BLOCKS,
            BLOCK_T < 64,
        )
        at = out + (row * HIDDEN)[:, None] + c[None, :]
        tl.store(at + start, first.to(out.dtype.element_ty), mask=inside[:, None])
        # The last tile may have one half only: both halves are then the same columns.
        tl.store(at + start_second, second.to(out.dtype.element_ty), mask=inside[:, None])


def moe_fp8(operands: ExpertOperands, parts: int = 2, tiles: Tiles | None = None) -> Tensor:
    """`moe_experts_op` of FP8 weights with FP8 products; each expert's results are rounded to the dtype of x.

    parts: the FP8 vectors of a token: 2 hold its bfloat16 numbers.
    tiles: by default from the number of pairs per expert.
    """
    x, topk_ids, shared = operands.x, operands.topk_ids.contiguous(), operands.num_shared
    (tokens, hidden), (experts, _, intermediate) = x.shape, operands.w_down.shape
    pairs = topk_ids.numel()
    results = pairs + shared * tokens
    sizes = Sizes(topk_ids.shape[1], shared, hidden, intermediate, False, 0, power_of_two(experts))
    early = early_options(x)
    tiles = tiles or _tiles(pairs, experts)

    values, scales = quantize_triton(x, parts)
    starts, order, places = sort_pairs(topk_ids, experts, operands.row_lens, operands.q_len)
    activated = x.new_empty((parts, results, intermediate), dtype=fp8.DTYPE)
    activated_scale = scales.new_empty((intermediate // fp8.BLOCK, results))
    pair_outs = x.new_empty((results, hidden))
    work = starts, pairs, experts, sizes, parts, tiles.tokens
    gate_up_fp8_kernel[(num_programs(operands, intermediate // fp8.BLOCK, tiles.tokens, True),)](
        *(values, scales, *GateUp.of(operands), activated, activated_scale),
        *(scales.shape[1], tokens, order, *work),
        **early,
        num_warps=tiles.gate_up_warps,
        num_stages=tiles.gate_up_stages,
    )
    column_tiles = triton.cdiv(hidden, 2 * tiles.down_columns)
    down_fp8_kernel[(num_programs(operands, column_tiles, tiles.tokens, True),)](
        *(activated, activated_scale, Down.of(operands), pair_outs, tokens, *work, tiles.down_columns),
        **early,
        num_warps=tiles.down_warps,
        num_stages=tiles.down_stages,
    )
    return weighted_sum(operands, pair_outs, places)


def _tiles(pairs: int, experts: int) -> Tiles:
    wanted = 5 * pairs // (4 * experts)  # tokens per expert: the average plus a quarter
    if wanted <= 16:
        return Tiles(16, 8, 3, 64, 4, 4)
    if wanted <= 32:
        return Tiles(32, 8, 3, 64, 4, 4)
    return Tiles(64, 8, 3, 64, 4, 3) if wanted <= 96 else Tiles(128, 8, 3, 128, 8, 3)


moe_fp8_activations = partial(moe_fp8, parts=1)
