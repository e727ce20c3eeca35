"""Experts with FP8 weights for many tokens that are quantised to FP8 too: the launches of `moe.py` with FP8 products.

A token is quantised with a scale for each block of 128 columns, before gate and up and again before down. Matrix
instructions multiply the values of a block, whose sum is scaled and added in float32.
"""

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

_TOKENS = 64
"""Tokens of a tile, which has BLOCK columns. On an H100, tiles of 128 tokens took a third more time in all; and so few
stages, with which two programs fit a multiprocessor, saved a fifth."""


@triton.jit(do_not_specialize=["pairs", "tokens", "x_scale_stride"])
def gate_up_fp8_kernel(
    x,  # float8 [tokens, HIDDEN], contiguous
    x_scale,  # float32 [HIDDEN / BLOCK, x_scale_stride]
    weights,  # `GateUp`
    scales,  # `GateUp`
    activated,  # float8 [pairs + SHARED * tokens, INTERMEDIATE]; sorted pairs are in sorted order
    activated_scale,  # float32 [INTERMEDIATE / BLOCK, pairs + SHARED * tokens]
    x_scale_stride,
    tokens,
    order,  # order and starts: of `sort_pairs`
    starts,
    pairs,
    experts,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`silu(gate) * up` of one `tile_of` with BLOCK columns, quantised."""
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
        k = tl.arange(0, BLOCK)[None, :]
        x_at = x + (token * HIDDEN)[:, None] + k
        w_at = (c.to(tl.int64) * HIDDEN)[:, None] + k
        inside = t < end
        gate = tl.zeros([BLOCK_T, BLOCK], tl.float32)
        up = tl.zeros([BLOCK_T, BLOCK], tl.float32)
        for block in range(BLOCKS):
            of_tokens = tl.load(x_at + block * BLOCK, mask=inside[:, None], other=0.0)
            w_gate = tl.load(gate_of + w_at + block * BLOCK)
            w_up = tl.load(up_of + w_at + block * BLOCK)
            scale = tl.load(x_scale + block * x_scale_stride + token, mask=inside, other=0.0)
            of_gate = scale * tl.load(gate_scale + column * BLOCKS + block)
            of_up = scale * tl.load(up_scale + column * BLOCKS + block)
            gate = tl.fma(tl.dot(of_tokens, tl.trans(w_gate)), of_gate[:, None], gate)
            up = tl.fma(tl.dot(of_tokens, tl.trans(w_up)), of_up[:, None], up)
        values, scale = quantized(gate / (1.0 + tl.exp(-gate)) * up, activated.dtype.element_ty)
        tl.store(activated + (row * INTERMEDIATE)[:, None] + c[None, :], values, mask=inside[:, None])
        tl.store(
            activated_scale + column * (pairs + S.SHARED * tokens).to(tl.int64) + row, scale, mask=inside
        )


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
    BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The down projection of one `tile_of` with BLOCK columns."""
    wait_for_kernel_before(EARLY)
    choices = Choices(None, pairs, None, None, None)
    HIDDEN: tl.constexpr = S.HIDDEN
    INTERMEDIATE: tl.constexpr = S.INTERMEDIATE
    BLOCKS: tl.constexpr = INTERMEDIATE // BLOCK
    COLUMN_TILES: tl.constexpr = HIDDEN // BLOCK
    expert, shared, column, begin, end = tile_of(choices, tokens, starts, experts, S, BLOCK_T, COLUMN_TILES)
    if begin < end:
        w_of = weights.down + expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
        scale_of = weights.scale + expert.to(tl.int64) * (COLUMN_TILES * BLOCKS) + column * BLOCKS
        width = INTERMEDIATE
        if S.SHARED > 0:  # noqa: SIM102 - the outer condition is constexpr
            if shared >= 0:
                w_of = weights.shared_down + shared * INTERMEDIATE
                scale_of = weights.shared_scale + (column * S.SHARED + shared) * BLOCKS
                width = S.SHARED * INTERMEDIATE
        t = begin + tl.arange(0, BLOCK_T)
        _, row = rows_of(choices, t, end, expert, shared, tokens, starts, None, S)
        c = column * BLOCK + tl.arange(0, BLOCK)
        k = tl.arange(0, BLOCK)[None, :]
        row_at = activated + (row * INTERMEDIATE)[:, None] + k
        w_at = w_of + (c.to(tl.int64) * width)[:, None] + k
        inside = t < end
        total_rows = (pairs + S.SHARED * tokens).to(tl.int64)
        result = tl.zeros([BLOCK_T, BLOCK], tl.float32)
        for block in range(BLOCKS):
            inner = tl.load(row_at + block * BLOCK, mask=inside[:, None], other=0.0)
            w = tl.load(w_at + block * BLOCK)
            scale = tl.load(activated_scale + block * total_rows + row, mask=inside, other=0.0)
            scale *= tl.load(scale_of + block)
            result = tl.fma(tl.dot(inner, tl.trans(w)), scale[:, None], result)
        at = out + (row * HIDDEN)[:, None] + c[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=inside[:, None])


def moe_fp8_activations(operands: ExpertOperands) -> Tensor:
    """`moe_experts_op` for many tokens, with FP8 products; each expert's results are rounded to the dtype of x."""
    x, topk_ids, shared = operands.x, operands.topk_ids.contiguous(), operands.num_shared
    (tokens, hidden), (experts, _, intermediate) = x.shape, operands.w_down.shape
    pairs = topk_ids.numel()
    results = pairs + shared * tokens
    sizes = Sizes(topk_ids.shape[1], shared, hidden, intermediate, False, 0, power_of_two(experts))
    early = early_options(x)

    values, scales = quantize_triton(x)
    starts, order, places = sort_pairs(topk_ids, experts, operands.row_lens, operands.q_len)
    activated = x.new_empty((results, intermediate), dtype=fp8.DTYPE)
    activated_scale = scales.new_empty((intermediate // fp8.BLOCK, results))
    pair_outs = x.new_empty((results, hidden))
    work = starts, pairs, experts, sizes, _TOKENS
    gate_up_fp8_kernel[(num_programs(operands, intermediate // fp8.BLOCK, _TOKENS, True),)](
        *(values, scales, *GateUp.of(operands), activated, activated_scale),
        *(scales.shape[1], tokens, order, *work),
        **early,
        num_warps=4,
        num_stages=2,
    )
    down_fp8_kernel[(num_programs(operands, hidden // fp8.BLOCK, _TOKENS, True),)](
        *(activated, activated_scale, Down.of(operands), pair_outs, tokens, *work),
        **early,
        num_warps=4,
        num_stages=3,
    )
    return weighted_sum(operands, pair_outs, places)
