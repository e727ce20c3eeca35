"""Experts of one or two tokens in two launches on CUDA cores: gate and up, then down with the sum over the experts.

As in `gemv.py`, tensor cores would not help: a program computes a few columns of an expert over all of k. Each (token,
expert) pair has its own programs, so there is no sort and no search. An expert that both tokens chose is read twice,
the second time from the cache.

Unlike `gemv.py`, weights are not prefetched while the previous kernel runs. On an H200, prefetching the shared experts
and down, whose ids are known by then, gained nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.experts.kernels.experts import Down, GateUp, gate_and_up, padding_of, runs
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.linear.kernels.fp8 import BLOCK
from mla_compile.ops.linear.kernels.gemv_units import load_units, unit_places, unit_sums, unit_zeros


@triton.jit(do_not_specialize=["rows"])
def gate_up_kernel(
    x,  # [tokens, HIDDEN]
    weights,  # `GateUp`
    scales,  # `GateUp`
    activated,  # [tokens, SHARED + TOPK, INTERMEDIATE], in the dtype of x
    topk_ids,  # int64 [tokens, TOPK]
    row_lens,  # int32 [rows], see `runs`; None if no token is padding
    rows,
    q_len,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_C columns of `silu(gate) * up` of one pair; grid `[tiles of columns, tokens, SHARED + TOPK]`."""
    wait_for_kernel_before(EARLY)
    token = tl.program_id(1)
    nth = tl.program_id(2)
    there = True
    if row_lens is not None:
        there = runs(token, row_lens, rows, q_len)
    if there:
        expert = tl.load(topk_ids + token * TOPK + nth - SHARED, mask=nth >= SHARED, other=0)
        is_shared = nth < SHARED
        gate_of, up_of = gate_and_up(weights, expert, nth, is_shared, SHARED, INTERMEDIATE * HIDDEN)
        gate_scale = None
        up_scale = None
        if scales.both is not None:
            COLUMN_BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
            BLOCKS: tl.constexpr = (INTERMEDIATE + BLOCK - 1) // BLOCK * COLUMN_BLOCKS
            gate_scale, up_scale = gate_and_up(scales, expert, nth, is_shared, SHARED, BLOCKS)
            gate_scale += tl.program_id(0) * BLOCK_C // BLOCK * COLUMN_BLOCKS
            up_scale += tl.program_id(0) * BLOCK_C // BLOCK * COLUMN_BLOCKS
        c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        row_of_c = tl.minimum(c, INTERMEDIATE - 1).to(tl.int64) * HIDDEN
        gate = unit_zeros(BLOCK_C, BLOCK_K)
        up = unit_zeros(BLOCK_C, BLOCK_K)
        for start in range(0, HIDDEN, BLOCK_K):
            k = unit_places(start, BLOCK_K)
            w_gate = load_units(gate_of + row_of_c, k, HIDDEN, BLOCK_K)
            w_up = load_units(up_of + row_of_c, k, HIDDEN, BLOCK_K)
            h = load_units(x + token * HIDDEN, k, HIDDEN, BLOCK_K)
            gate += unit_sums(w_gate, h, gate_scale, start, HIDDEN, BLOCK_K)
            up += unit_sums(w_up, h, up_scale, start, HIDDEN, BLOCK_K)
        of_gate, of_up = tl.sum(gate, 1), tl.sum(up, 1)
        result = (of_gate / (1.0 + tl.exp(-of_gate)) * of_up).to(activated.dtype.element_ty)
        row = token * (SHARED + TOPK) + nth
        tl.store(activated + row * INTERMEDIATE + c, result, mask=c < INTERMEDIATE)


@triton.jit
def _down(inner, row_at, scale_at, total, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """`total` `[BLOCK_C, units]` plus the product of an expert's down weights and its activations `inner`."""
    for start in range(0, WIDTH, BLOCK_K):
        k = unit_places(start, BLOCK_K)
        w = load_units(row_at, k, WIDTH, BLOCK_K)
        h = load_units(inner, k, WIDTH, BLOCK_K)
        total += unit_sums(w, h, scale_at, start, WIDTH, BLOCK_K)
    return total


@triton.jit(do_not_specialize=["rows"])
def down_kernel(
    activated,  # [tokens, SHARED + TOPK, INTERMEDIATE]
    weights,  # `Down`
    topk_weights,  # [tokens, TOPK]
    out,  # [tokens, HIDDEN]
    topk_ids,  # this and the others as in `gate_up_kernel`
    row_lens,
    rows,
    q_len,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_C columns of the weighted sum of a token's down projections; grid `[tiles of columns, tokens]`."""
    wait_for_kernel_before(EARLY)
    token = tl.program_id(1)
    activated += token * ((SHARED + TOPK) * INTERMEDIATE)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = tl.minimum(c, HIDDEN - 1).to(tl.int64)
    ROW_BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    COLUMN_BLOCKS: tl.constexpr = (INTERMEDIATE + BLOCK - 1) // BLOCK
    row_block = tl.program_id(0) * BLOCK_C // BLOCK
    total = unit_zeros(BLOCK_C, BLOCK_K)
    there = True
    if row_lens is not None:
        there = runs(token, row_lens, rows, q_len)
    if there:
        for nth in tl.static_range(SHARED):
            row_at = weights.shared_down + nth * INTERMEDIATE + inside * (SHARED * INTERMEDIATE)
            scale_at = weights.shared_scale
            if scale_at is not None:
                scale_at += row_block * (SHARED * COLUMN_BLOCKS) + nth * COLUMN_BLOCKS
            total = _down(activated + nth * INTERMEDIATE, row_at, scale_at, total, INTERMEDIATE, BLOCK_K)
        for nth in tl.static_range(TOPK):
            expert = tl.load(topk_ids + token * TOPK + nth)
            weight = tl.load(topk_weights + token * TOPK + nth).to(tl.float32)
            row_at = weights.down + expert * (HIDDEN * INTERMEDIATE) + inside * INTERMEDIATE
            scale_at = weights.scale
            if scale_at is not None:
                scale_at += expert * (ROW_BLOCKS * COLUMN_BLOCKS) + row_block * COLUMN_BLOCKS
            inner = activated + (SHARED + nth) * INTERMEDIATE
            none = unit_zeros(BLOCK_C, BLOCK_K)
            total += weight * _down(inner, row_at, scale_at, none, INTERMEDIATE, BLOCK_K)
    tl.store(out + token * HIDDEN + c, tl.sum(total, 1).to(out.dtype.element_ty), mask=c < HIDDEN)


def moe_gemv(
    operands: ExpertOperands,
    *,
    gate_up: tuple[int, int, int] | None = None,
    down: tuple[int, int, int] | None = None,
) -> Tensor:
    """`moe_experts_op` for one or two tokens; sums in float32.

    gate_up, down: columns per program (a power of two up to 128), elements of k per iteration (a power of two from 128
        on), and warps. The defaults were the fastest for GLM-4.7-Flash on an H200.
    """
    x, topk_weights, topk_ids, _, w_down, row_lens, q_len, *_ = operands
    tokens, (hidden, intermediate) = x.shape[0], w_down.shape[1:]
    x, topk_ids, topk_weights = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    gate_up = gate_up or ((1, 2048, 1) if operands.gate_up_scale is None else (1, 1024, 1))
    down = down or ((4, 2048, 8) if operands.down_scale is None else (1, 512, 1))
    padding = padding_of(row_lens, q_len)
    constants = {"TOPK": topk_ids.shape[1], "SHARED": operands.num_shared}
    constants |= {"HIDDEN": hidden, "INTERMEDIATE": intermediate}
    early = early_options(x)

    def options(tiles: tuple[int, int, int]) -> dict[str, int]:
        return dict(zip(("BLOCK_C", "BLOCK_K", "num_warps"), tiles, strict=True))

    experts = operands.num_shared + topk_ids.shape[1]
    activated = x.new_empty((tokens, experts, intermediate))
    out = x.new_empty((tokens, hidden))
    gate_up_kernel[(triton.cdiv(intermediate, gate_up[0]), tokens, experts)](
        *(x, *GateUp.of(operands), activated, topk_ids, *padding),
        **constants,
        **early,
        **options(gate_up),
    )
    down_kernel[(triton.cdiv(hidden, down[0]), tokens)](
        *(activated, Down.of(operands), topk_weights, out, topk_ids, *padding),
        **constants,
        **early,
        **options(down),
    )
    return out
