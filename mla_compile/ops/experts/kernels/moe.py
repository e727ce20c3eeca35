"""Routed experts in three launches: gate and up, down, the weighted sum over a token's experts.

A program takes one expert and a tile of its columns, gathers the expert's tokens and multiplies them by these columns.
With few (token, expert) pairs the time is one read of the chosen experts' weights, so there is no launch before: each
program searches all pairs for its own. With many pairs, one more launch sorts them by expert, and tokens are divided
among programs too. Grids depend on shapes only.

A token gets the same bits in any batch. Its result does not depend on the other tokens of its tile, and adds along k in
one order: 16 elements per matrix instruction, or in float32 one by one, at one depth for all tiles. Sorting and padding
change which program computes a token, not how. The sum over a token's experts is in the order of its `topk_ids`.

Shared experts, which run on every token, add tiles to the first two launches and terms with weight 1 to the sum, after
the chosen experts. They need no search.

FP8 weights are converted in registers: their values are multiplied, and the sum of each block is scaled
(`ops/linear/fp8.py`). A batch-invariant FP8 call needs tiles that add along k in one order (`linear/kernels/fp8.py`).
Every tile of tokens repeats the conversion; on Hopper `moe_fp8.py` needs none.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.device import device_of, power_of_two
from mla_compile.ops.experts.kernels.experts import Down, GateUp, gate_and_up, padding_of
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
from mla_compile.ops.experts.tiles import MAX_UNSORTED_PAIRS, fp8_moe_tiles, moe_tiles
from mla_compile.ops.linear.kernels.fp8 import BLOCK, add_product, zeros
from mla_compile.ops.linear.tiles import ProductTiles, has_one_order

_MAX_AT_ONCE = 128
"""Pairs per iteration of a program's search: it holds a tile of pairs by tokens in registers."""


@triton.jit(do_not_specialize=["pairs", "tokens", "rows"])
def gate_up_kernel(
    x,  # [tokens, HIDDEN], strides (x_stride, 1)
    weights,  # `GateUp`
    scales,  # `GateUp`
    activated,  # [pairs + SHARED * tokens, INTERMEDIATE], in the dtype of x; sorted pairs are in sorted order
    x_stride,
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
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`silu(gate) * up` of one `tile_of` with BLOCK_C columns."""
    wait_for_kernel_before(EARLY)
    choices = Choices(topk_ids, pairs, row_lens, rows, q_len)
    HIDDEN: tl.constexpr = S.HIDDEN
    INTERMEDIATE: tl.constexpr = S.INTERMEDIATE
    COLUMN_TILES: tl.constexpr = (INTERMEDIATE + BLOCK_C - 1) // BLOCK_C
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    COLUMN_BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    BLOCKS: tl.constexpr = (INTERMEDIATE + BLOCK - 1) // BLOCK * COLUMN_BLOCKS
    gate_of, up_of = gate_and_up(weights, expert, shared, shared >= 0, S.SHARED, INTERMEDIATE * HIDDEN)
    gate_scale = None
    up_scale = None
    if scales.both is not None:
        gate_scale, up_scale = gate_and_up(scales, expert, shared, shared >= 0, S.SHARED, BLOCKS)
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    for first in range(begin, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        token, row = rows_of(choices, t, end, expert, shared, tokens, starts, order, S)
        x_at = x + (token * x_stride)[:, None]
        if scales.both is None:
            row_of_c = (c.to(tl.int64) * HIDDEN)[:, None]
            gate = zeros(BLOCK_T, BLOCK_C, None)
            up = zeros(BLOCK_T, BLOCK_C, None)
            for start in range(0, HIDDEN, BLOCK_K):
                k = (start + tl.arange(0, BLOCK_K))[None, :]
                in_row = (c < INTERMEDIATE)[:, None] & (k < HIDDEN)
                of_tokens = tl.load(x_at + k, mask=(t < end)[:, None] & (k < HIDDEN), other=0.0)
                w_gate = tl.load(gate_of + row_of_c + k, mask=in_row, other=0.0)
                w_up = tl.load(up_of + row_of_c + k, mask=in_row, other=0.0)
                gate = add_product(gate, of_tokens, w_gate, None, IN_ORDER)
                up = add_product(up, of_tokens, w_up, None, IN_ORDER)
        else:
            # One product: 8 matrix rows of gate alternate with 8 of up, so that a thread gets both of a column.
            r = tl.arange(0, 2 * BLOCK_C)
            of_r = column * BLOCK_C + r // 16 * 8 + r % 8
            is_up = r // 8 % 2 == 1
            w_at = tl.where(is_up, up_of, gate_of) + of_r.to(tl.int64) * HIDDEN
            scale_at = tl.where(is_up, up_scale, gate_scale) + of_r // BLOCK * COLUMN_BLOCKS
            both = zeros(BLOCK_T, 2 * BLOCK_C, scales.both)
            for start in range(0, HIDDEN, BLOCK_K):
                k = (start + tl.arange(0, BLOCK_K))[None, :]
                of_tokens = tl.load(x_at + k, mask=(t < end)[:, None] & (k < HIDDEN), other=0.0)
                w = tl.load(w_at[:, None] + k, mask=(of_r < INTERMEDIATE)[:, None] & (k < HIDDEN), other=0.0)
                scale = tl.load(scale_at + start // BLOCK, mask=of_r < INTERMEDIATE, other=0.0)
                both = add_product(both, of_tokens, w, scale, IN_ORDER)
            gate, up = tl.split(tl.permute(tl.reshape(both, [BLOCK_C // 8, 2, 8, BLOCK_T]), 0, 2, 3, 1))
            gate = tl.trans(tl.reshape(gate, [BLOCK_C, BLOCK_T]))
            up = tl.trans(tl.reshape(up, [BLOCK_C, BLOCK_T]))
        result = (gate / (1.0 + tl.exp(-gate)) * up).to(activated.dtype.element_ty)
        at = activated + row[:, None] * INTERMEDIATE + c[None, :]
        tl.store(at, result, mask=(t < end)[:, None] & (c < INTERMEDIATE)[None, :])


@triton.jit(do_not_specialize=["pairs", "tokens", "rows"])
def down_kernel(
    activated,  # [pairs + SHARED * tokens, INTERMEDIATE]
    weights,  # `Down`
    out,  # float32, or the dtype of x; [pairs + SHARED * tokens, HIDDEN], in the order of `activated`
    tokens,
    topk_ids,  # this and the others as in `gate_up_kernel`
    starts,
    pairs,
    experts,
    row_lens,
    rows,
    q_len,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The down projection of one `tile_of` with BLOCK_C columns."""
    wait_for_kernel_before(EARLY)
    choices = Choices(topk_ids, pairs, row_lens, rows, q_len)
    HIDDEN: tl.constexpr = S.HIDDEN
    INTERMEDIATE: tl.constexpr = S.INTERMEDIATE
    COLUMN_TILES: tl.constexpr = (HIDDEN + BLOCK_C - 1) // BLOCK_C
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    w_of = weights.down + expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
    width = INTERMEDIATE
    COLUMN_BLOCKS: tl.constexpr = (INTERMEDIATE + BLOCK - 1) // BLOCK
    column_blocks = COLUMN_BLOCKS
    scale_of = weights.scale
    if scale_of is not None:
        scale_of += expert.to(tl.int64) * ((HIDDEN + BLOCK - 1) // BLOCK * COLUMN_BLOCKS)
    if S.SHARED > 0:  # noqa: SIM102
        if shared >= 0:
            w_of = weights.shared_down + shared * INTERMEDIATE
            width = S.SHARED * INTERMEDIATE
            column_blocks = S.SHARED * COLUMN_BLOCKS
            if scale_of is not None:
                scale_of = weights.shared_scale + shared * COLUMN_BLOCKS
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    w_at = w_of + (c.to(tl.int64) * width)[:, None]
    for first in range(begin, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        _, row = rows_of(choices, t, end, expert, shared, tokens, starts, None, S)
        row_at = activated + (row * INTERMEDIATE)[:, None]
        result = zeros(BLOCK_T, BLOCK_C, scale_of)
        for start in range(0, INTERMEDIATE, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            inner = tl.load(row_at + k, mask=(t < end)[:, None] & (k < INTERMEDIATE), other=0.0)
            w = tl.load(w_at + k, mask=(c < HIDDEN)[:, None] & (k < INTERMEDIATE), other=0.0)
            scale = scale_of
            if scale_of is not None:
                scale_at = scale_of + c // BLOCK * column_blocks + start // BLOCK
                scale = tl.load(scale_at, mask=c < HIDDEN, other=0.0)
            result = add_product(result, inner, w, scale, IN_ORDER)
        if scale_of is not None:
            result = tl.trans(result)
        at = out + row[:, None] * HIDDEN + c[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=(t < end)[:, None] & (c < HIDDEN)[None, :])


def moe_triton(
    operands: ExpertOperands,
    *,
    gate_up: ProductTiles | None = None,
    down: ProductTiles | None = None,
    rounded: bool = False,
    in_order: bool = False,
) -> Tensor:
    """`moe_experts_op` on the GPU or in Triton's interpreter; sums in float32. It reads no values on the host.

    gate_up, down: tiles, by default from `tiles.py`; for FP8 weights the depth is at most one block.
    rounded: whether each expert's result is rounded to the dtype of x before it is weighted.
    in_order: whether FP8 weights give a token the same bits in any batch.
    """
    x, _, topk_ids, _, w_down, row_lens, q_len, *_ = operands
    tokens, hidden = x.shape
    experts, _, intermediate = w_down.shape
    pairs = topk_ids.numel()
    shared = operands.num_shared
    x = x if x.stride(1) == 1 else x.contiguous()
    topk_ids = topk_ids.contiguous()

    device = device_of(x)
    plan = moe_tiles
    if operands.gate_up_scale is not None:
        plan = partial(fp8_moe_tiles, in_order=in_order)
    gate_up = gate_up or plan(pairs, experts, 2, x.dtype, device)
    down = down or plan(pairs, experts, 1, x.dtype, device)
    is_sorted = pairs > MAX_UNSORTED_PAIRS
    padding, topk = padding_of(row_lens, q_len), topk_ids.shape[1]
    chunk = min(_MAX_AT_ONCE, power_of_two(pairs))
    sizes = Sizes(topk, shared, hidden, intermediate, pairs < experts, chunk, power_of_two(experts))

    def programs(columns: int, tiles: ProductTiles) -> tuple[int]:
        return (num_programs(operands, triton.cdiv(columns, tiles.columns), tiles.tokens, is_sorted),)

    early = early_options(x)
    starts = order = places = None
    if is_sorted:
        starts, order, places = sort_pairs(topk_ids, experts, row_lens, q_len)
    activated = x.new_empty((pairs + shared * tokens, intermediate))
    pair_outs = x.new_empty((pairs + shared * tokens, hidden), dtype=x.dtype if rounded else torch.float32)
    routing = topk_ids, starts, pairs, experts, *padding
    gate_up_kernel[programs(intermediate, gate_up)](
        *(x, *GateUp.of(operands), activated, x.stride(0), tokens, order, *routing, sizes),
        IN_ORDER=in_order and not has_one_order(gate_up.tokens, 2 * gate_up.columns, device),
        **early,
        **gate_up.options(hidden),
    )
    down_kernel[programs(hidden, down)](
        *(activated, Down.of(operands), pair_outs, tokens, *routing, sizes),
        IN_ORDER=in_order and not has_one_order(down.tokens, down.columns, device),
        **early,
        **down.options(intermediate),
    )
    return weighted_sum(operands, pair_outs, places)


def moe_in_order(operands: ExpertOperands) -> Tensor:
    """Batch-invariant `moe_triton` for FP8 weights."""
    return moe_triton(operands, in_order=True)


def moe_rounded(operands: ExpertOperands) -> Tensor:
    """`moe_triton` for many tokens: each expert's results are rounded."""
    return moe_triton(operands, rounded=True)
