"""An experiment: experts of many tokens with loading and computing warps, beside the package's kernels.

    python -m benchmarks.grouped_experts

A program per multiprocessor takes tile after tile: 128 tokens of one expert by 128 columns of two weights. Four warps
load, the bulk copy engine weights and `cp.async` the gathered tokens; two warpgroups multiply 64 tokens each. So no
warp waits for a copy, and with FP8 one warpgroup scales its sums while the other one multiplies. bfloat16, or FP8
tokens of two vectors by FP8 weights (`mla_compile/ops/experts/kernels/moe_fp8.py`). Each case is compared with the
package's kernel, then both are timed. Sizes must be multiples of 256.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from benchmarks.kernels import GLM, calls_of, graph_us, layer
from benchmarks.reporting import command_parser
from mla_compile.ops.attention.kernels.gluon.split import barrier
from mla_compile.ops.experts.kernels.moe import moe_rounded
from mla_compile.ops.experts.kernels.moe_fp8 import moe_fp8, prepared
from mla_compile.ops.experts.kernels.pairs import sort_pairs, weighted_sum
from mla_compile.ops.experts.operands import ExpertOperands

BT = gl.constexpr(128)
"""Tokens of a tile."""
BN = gl.constexpr(128)
"""Columns of each of its two products."""


class Sizes(NamedTuple):
    """Constants of a launch."""

    K: int
    COLUMNS: int  # of the result: INTERMEDIATE or HIDDEN
    TOPK: int
    SHARED: int
    BLOCK_E: int
    GATE_UP: bool
    FP8: bool
    STAGES: int
    DEPTH: int


class Call(NamedTuple):
    """Arguments of a launch."""

    x: Any
    x_scale: Any
    x_rows: Any
    scale: Any
    shared_scale: Any
    shared_scale_2: Any
    out: Any
    out_scale: Any
    order: Any
    starts: Any
    tokens: Any
    pairs: Any
    experts: Any


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _map(a, S: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([S.BLOCK_E // 32], [32], [WARPS], [0])
    e = gl.arange(0, S.BLOCK_E, layout=layout)
    first = gl.load(a.starts + e, mask=e < a.experts, other=0)
    last = gl.load(a.starts + e + 1, mask=e < a.experts, other=0)
    TILES: gl.constexpr = S.COLUMNS // (BN if S.GATE_UP else 2 * BN)
    ends = gl.associative_scan((last - first + BT - 1) // BT * TILES, 0, _add)
    shared = S.SHARED * ((a.tokens + BT - 1) // BT) * TILES
    return e, first, last, ends, shared, shared + gl.max(ends, 0)


@gluon.jit
def _tile(a, S: gl.constexpr, m, tile):
    """expert (or -1 - shared), column tile, begin, end of tokens (positions), the first row of the result."""
    e, first, last, ends, shared, _ = m
    behind = tile - shared
    expert = gl.sum((ends <= behind).to(gl.int32), 0)
    nth = behind - gl.max(gl.where(ends <= behind, ends, 0), 0)
    begin = gl.sum(gl.where(e == expert, first, 0), 0)
    end = gl.sum(gl.where(e == expert, last, 0), 0)
    tiles = gl.maximum((end - begin + BT - 1) // BT, 1)
    column = nth // tiles
    begin += nth % tiles * BT
    end = gl.minimum(end, begin + BT)
    row = begin
    if S.SHARED > 0:
        TILES: gl.constexpr = S.COLUMNS // (BN if S.GATE_UP else 2 * BN)
        each = (a.tokens + BT - 1) // BT
        which = tile // (each * TILES)
        is_shared = tile < shared
        expert = gl.where(is_shared, -1 - which, expert)
        column = gl.where(is_shared, tile // each % TILES, column)
        begin = gl.where(is_shared, tile % each * BT, begin)
        end = gl.where(is_shared, gl.minimum(a.tokens, begin + BT), end)
        row = gl.where(is_shared, a.pairs + which * a.tokens + begin, begin)
    return expert, column, begin, end, row


@gluon.jit
def _load(a, S: gl.constexpr, w, shared_w, shared_w2, xs, ws, loaded, used):
    V: gl.constexpr = 16 if S.FP8 else 8
    layout: gl.constexpr = gl.BlockedLayout([1, V], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, S.DEPTH, layout=gl.SliceLayout(0, layout))
    i = gl.arange(0, BT, layout=gl.SliceLayout(1, layout))
    m = _map(a, S, 4)
    tile = gl.program_id(0)
    stage = 0
    phase = 1
    PARTS: gl.constexpr = 2 if S.FP8 else 1
    BYTES: gl.constexpr = 2 * BN * S.DEPTH * (1 if S.FP8 else 2)
    while tile < m[5]:
        expert, column, begin, end, row = _tile(a, S, m, tile)
        inside = begin + i < end
        if S.GATE_UP:
            token = gl.load(a.order + begin + i, mask=inside & (expert >= 0), other=0) // S.TOPK
            token = gl.where(expert >= 0, token, begin + i)
        else:
            token = row + i
        at = a.x + token.to(gl.int64)[:, None] * S.K + k[None, :]
        # rows of the weights
        if S.GATE_UP:
            first = expert * (2 * S.COLUMNS) + column * BN
            second = first + S.COLUMNS
        else:
            first = expert * S.COLUMNS + column * (2 * BN)
            second = first + BN
        for block in range(S.K // S.DEPTH):
            mbarrier.wait(used.index(stage), phase)
            full = loaded.index(stage)
            mbarrier.expect(full, BYTES)
            left = ws.index(stage).slice(0, BN, dim=0)
            right = ws.index(stage).slice(BN, BN, dim=0)
            if S.SHARED > 0:
                if expert >= 0:
                    tma.async_copy_global_to_shared(w, [first, block * S.DEPTH], full, left)
                    tma.async_copy_global_to_shared(w, [second, block * S.DEPTH], full, right)
                else:
                    if S.GATE_UP:
                        r = (-1 - expert) * S.COLUMNS + column * BN
                        tma.async_copy_global_to_shared(shared_w, [r, block * S.DEPTH], full, left)
                        tma.async_copy_global_to_shared(shared_w2, [r, block * S.DEPTH], full, right)
                    else:
                        c = (-1 - expert) * S.K + block * S.DEPTH
                        tma.async_copy_global_to_shared(shared_w, [column * (2 * BN), c], full, left)
                        tma.async_copy_global_to_shared(shared_w, [column * (2 * BN) + BN, c], full, right)
            else:
                tma.async_copy_global_to_shared(w, [first, block * S.DEPTH], full, left)
                tma.async_copy_global_to_shared(w, [second, block * S.DEPTH], full, right)
            for part in gl.static_range(PARTS):
                async_copy.async_copy_global_to_shared(
                    xs.index(PARTS * stage + part),
                    at + (block * S.DEPTH + part * a.x_rows.to(gl.int64) * S.K),
                    mask=inside[:, None],
                )
            async_copy.mbarrier_arrive(full, increment_count=False)
            stage += 1
            if stage == S.STAGES:
                stage = 0
                phase ^= 1
        tile += gl.num_programs(0)


@gluon.jit
def _next(stage, phase, S: gl.constexpr):
    """The place of the next block in the buffers."""
    stage += 1
    at_end = stage == S.STAGES
    return gl.where(at_end, 0, stage), gl.where(at_end, phase ^ 1, phase)


@gluon.jit
def _before(stage, S: gl.constexpr):
    """The place of the last block. A variable with it would keep its first value: Triton 3.6 and 3.7 lose the others."""
    return gl.where(stage == 0, S.STAGES - 1, stage - 1)


@gluon.jit
def _scales_of_weights(a, S: gl.constexpr, expert, column):
    """Pointers to the scales of the first block of both weights."""
    SCALES: gl.constexpr = S.K // 128
    RESULTS: gl.constexpr = S.COLUMNS // 128
    if S.GATE_UP:
        first = a.scale + (expert * (2 * RESULTS) + column) * SCALES
        second = first + RESULTS * SCALES
    else:
        first = a.scale + (expert * RESULTS + 2 * column) * SCALES
        second = first + SCALES
    if S.SHARED > 0:  # noqa: SIM102 - the outer condition is constexpr
        if expert < 0:
            if S.GATE_UP:
                at = ((-1 - expert) * RESULTS + column) * SCALES
                first = a.shared_scale + at
                second = a.shared_scale_2 + at
            else:
                first = a.shared_scale + (2 * column * S.SHARED + -1 - expert) * SCALES
                second = first + S.SHARED * SCALES
    return first, second


@gluon.jit
def _products_fp8(a, S: gl.constexpr, buffers, where, scales, stage, phase, W: gl.constexpr):
    """Tokens by both weights. scales: those of the tokens and of both weights for the first block."""
    xs, ws, loaded, used = buffers
    of_tokens, of_first, of_second = scales
    token, inside = where
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    first = gl.zeros([64, BN], gl.float32, layout)
    second = gl.zeros([64, BN], gl.float32, layout)
    next_token = gl.load(of_tokens + token, mask=inside, other=0.0)
    next_first = gl.load(of_first)
    next_second = gl.load(of_second)
    BLOCKS: gl.constexpr = S.K // S.DEPTH
    for block in range(BLOCKS):
        scale_first = next_token * next_first
        scale_second = next_token * next_second
        more = block + 1 < BLOCKS
        next_token = gl.load(of_tokens + (block + 1) * a.x_rows + token, mask=inside & more, other=0.0)
        next_first = gl.load(of_first + block + 1, mask=more, other=0.0)
        next_second = gl.load(of_second + block + 1, mask=more, other=0.0)
        mbarrier.wait(loaded.index(stage), phase)
        fence_async_shared()
        large = xs.index(2 * stage).slice(W * 64, 64, dim=0)
        small = xs.index(2 * stage + 1).slice(W * 64, 64, dim=0)
        left = ws.index(stage).slice(0, BN, dim=0).permute((1, 0))
        right = ws.index(stage).slice(BN, BN, dim=0).permute((1, 0))
        product = gl.zeros([64, BN], gl.float32, layout)
        product = warpgroup_mma(small, left, product, use_acc=False, is_async=True)
        product = warpgroup_mma(large, left, product, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        first = gl.fma(product, scale_first[:, None], first)
        product = warpgroup_mma(small, right, product, use_acc=False, is_async=True)
        product = warpgroup_mma(large, right, product, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        barrier()
        mbarrier.arrive(used.index(stage), count=1)
        second = gl.fma(product, scale_second[:, None], second)
        stage, phase = _next(stage, phase, S)
    return first, second, stage, phase


@gluon.jit
def _products(S: gl.constexpr, buffers, stage, phase, W: gl.constexpr):
    """Tokens by both weights, in bfloat16: one instruction multiplies by both, so it reads the tokens once."""
    xs, ws, loaded, used = buffers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BN, 16])
    result = gl.zeros([64, 2 * BN], gl.float32, layout)
    for block in range(S.K // S.DEPTH):
        mbarrier.wait(loaded.index(stage), phase)
        fence_async_shared()
        x = xs.index(stage).slice(W * 64, 64, dim=0)
        result = warpgroup_mma(x, ws.index(stage).permute((1, 0)), result, is_async=True)
        result = warpgroup_mma_wait(1, deps=[result])  # that of the block before has ended
        if block > 0:
            barrier()
            mbarrier.arrive(used.index(_before(stage, S)), count=1)
        stage, phase = _next(stage, phase, S)
    result = warpgroup_mma_wait(0, deps=[result])
    barrier()
    mbarrier.arrive(used.index(_before(stage, S)), count=1)
    first, second = result.reshape([64, 2, BN]).permute((0, 2, 1)).split()
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    first = gl.convert_layout(first, half, assert_trivial=True)
    second = gl.convert_layout(second, half, assert_trivial=True)
    return first, second, stage, phase


@gluon.jit
def _store_activated(a, S: gl.constexpr, first, second, at, result_row, column, inside):
    """`silu(gate) * up`; FP8 as in `quantized` of `linear/kernels/fp8.py`."""
    result = first / (1.0 + gl.exp(-first)) * second
    if S.FP8:
        results = (a.pairs + S.SHARED * a.tokens).to(gl.int64)
        largest = gl.max(gl.abs(result), 1)
        exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 8) - 7
        scale = (exponent << 23).to(gl.float32, bitcast=True)
        scaled = result * ((254 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
        bits = scaled.to(gl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(gl.float32, bitcast=True)
        gl.store(at, rounded.to(gl.float8e4nv), mask=inside[:, None])
        gl.store(at + results * S.COLUMNS, (scaled - rounded).to(gl.float8e4nv), mask=inside[:, None])
        gl.store(a.out_scale + column * results + result_row, scale, mask=inside)
    else:
        gl.store(at, result.to(gl.bfloat16), mask=inside[:, None])


@gluon.jit
def _multiply(a, S: gl.constexpr, xs, ws, loaded, used, W: gl.constexpr):
    """The products of 64 tokens of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32 if S.FP8 else 16])
    i = W * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    m = _map(a, S, 4)
    buffers = xs, ws, loaded, used
    tile = gl.program_id(0)
    stage = 0
    phase = 0
    while tile < m[5]:
        expert, column, begin, end, row = _tile(a, S, m, tile)
        inside = begin + i < end
        if S.FP8:
            token = row + i
            if S.GATE_UP:
                chosen = gl.load(a.order + begin + i, mask=inside & (expert >= 0), other=0) // S.TOPK
                token = gl.where(expert >= 0, chosen, begin + i)
            of_first, of_second = _scales_of_weights(a, S, expert, column)
            scales = a.x_scale, of_first, of_second
            first, second, stage, phase = _products_fp8(
                a, S, buffers, (token, inside), scales, stage, phase, W
            )
        else:
            first, second, stage, phase = _products(S, buffers, stage, phase, W)
        result_row = (row + i).to(gl.int64)
        at = a.out + (result_row * S.COLUMNS)[:, None] + c[None, :]
        if S.GATE_UP:
            _store_activated(a, S, first, second, at + column * BN, result_row, column, inside)
        else:
            at += column * (2 * BN)
            gl.store(at, first.to(gl.bfloat16), mask=inside[:, None])
            gl.store(at + BN, second.to(gl.bfloat16), mask=inside[:, None])
        tile += gl.num_programs(0)


@gluon.jit(do_not_specialize=["tokens", "pairs", "x_rows"])
def grouped_kernel(
    w,
    shared_w,
    shared_w2,
    x,
    x_scale,
    x_rows,
    scale,
    shared_scale,
    shared_scale_2,
    out,
    out_scale,
    order,
    starts,
    tokens,
    pairs,
    experts,
    S: gl.constexpr,
    EARLY: gl.constexpr,
    num_warps: gl.constexpr,
):
    if EARLY:
        gdc_wait()
    a = Call(
        x,
        x_scale,
        x_rows,
        scale,
        shared_scale,
        shared_scale_2,
        out,
        out_scale,
        order,
        starts,
        tokens,
        pairs,
        experts,
    )
    DTYPE: gl.constexpr = gl.float8e4nv if S.FP8 else gl.bfloat16
    BITS: gl.constexpr = 8 if S.FP8 else 16
    PARTS: gl.constexpr = 2 if S.FP8 else 1
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, BITS)
    xs = gl.allocate_shared_memory(DTYPE, [PARTS * S.STAGES, BT, S.DEPTH], swizzled)
    ws = gl.allocate_shared_memory(DTYPE, [S.STAGES, 2 * BN, S.DEPTH], swizzled)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    loaded = gl.allocate_shared_memory(gl.int64, [S.STAGES, 1], one)
    used = gl.allocate_shared_memory(gl.int64, [S.STAGES, 1], one)
    STAGES: gl.constexpr = S.STAGES
    for j in gl.static_range(STAGES):
        mbarrier.init(loaded.index(j), count=129)
        mbarrier.init(used.index(j), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_load, (a, S, w, shared_w, shared_w2, xs, ws, loaded, used)),
            (_multiply, (a, S, xs, ws, loaded, used, 0)),
            (_multiply, (a, S, xs, ws, loaded, used, 1)),
        ],
        [4, 4],
        [224, 224],
    )


def _boxes(weight: Tensor | None, sizes: Sizes) -> TensorDescriptor | None:
    """A descriptor of a weight `[..., columns, k]` for bulk copies of BN columns and DEPTH of k."""
    if weight is None:
        return None
    swizzled = gl.NVMMASharedLayout(128, 8 if sizes.FP8 else 16, rank=2)
    return TensorDescriptor.from_tensor(weight.flatten(0, -2), [BN.value, sizes.DEPTH], swizzled)


def moe_grouped(operands: ExpertOperands, *, programs: int = 132, early: bool = True) -> Tensor:
    """`moe_experts_op` of bfloat16 tokens."""
    x, experts = operands.x.contiguous(), operands.w_down.shape[0]
    (tokens, hidden), inner = x.shape, operands.w_down.shape[2]
    pairs, shared, topk = operands.topk_ids.numel(), operands.num_shared, operands.topk_ids.shape[1]
    results, stride, block_e = pairs + shared * tokens, tokens, max(32, triton.next_power_of_2(experts))
    fp8 = operands.gate_up_scale is not None
    scales = activated_scales = None
    if fp8:
        x, scales, starts, order, places = prepared(operands, 2)
        stride = x.shape[1]
        activated = x.new_empty((2, results, inner))
        activated_scales = scales.new_empty((inner // 128, results))
    else:
        starts, order, places = sort_pairs(
            operands.topk_ids.contiguous(), experts, operands.row_lens, operands.q_len
        )
        activated = x.new_empty((results, inner))
    out = operands.x.new_empty((results, hidden))
    depth, stages = (128, 3) if fp8 else (64, 4)
    gate_up = Sizes(hidden, inner, topk, shared, block_e, True, fp8, stages, depth)
    down = gate_up._replace(K=inner, COLUMNS=hidden, GATE_UP=False)
    work, options = (
        (order, starts, tokens, pairs, experts),
        {"EARLY": early, "launch_pdl": early, "num_warps": 4},
    )
    grouped_kernel[(programs,)](
        *(_boxes(w, gate_up) for w in (operands.w_gate_up, operands.shared_gate, operands.shared_up)),
        *(x, scales, stride, operands.gate_up_scale, operands.shared_gate_scale, operands.shared_up_scale),
        *(activated, activated_scales, *work, gate_up),
        **options,
    )
    grouped_kernel[(programs,)](
        *(_boxes(operands.w_down, down), _boxes(operands.shared_down, down), None),
        *(activated, activated_scales, results, operands.down_scale, operands.shared_down_scale, None),
        *(out, None, *work, down),
        **options,
    )
    return weighted_sum(operands, out, places)


def main() -> None:
    parser = command_parser(__doc__)
    parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a GPU")
    torch.manual_seed(0)
    programs = torch.cuda.get_device_properties().multi_processor_count
    for fp8 in (False, True):
        layers = [layer(GLM, fp8=fp8) for _ in range(2)]
        known = moe_fp8 if fp8 else moe_rounded
        for tokens in (300, 1024, 2048, 4096, 8192, 16384):
            calls = calls_of(GLM, tokens, layers)
            got, expected = moe_grouped(calls[0], programs=programs), known(calls[0])
            error = (got.double() - expected).norm() / expected.double().norm()
            times = [
                graph_us([partial(run, call) for call in calls])
                for run in (known, partial(moe_grouped, programs=programs))
            ]
            print(
                f"{'FP8' if fp8 else 'bf16'}, {tokens:5} tokens: error {error:.5f}, "
                f"equal {torch.equal(got, expected)}; "
                f"now {times[0]:.1f} us, grouped {times[1]:.1f} us",
                flush=True,
            )
            assert error < 1e-2


if __name__ == "__main__":
    main()
