"""Experts of many tokens on Hopper, in Gluon: some warps load while others multiply.

A program runs on each multiprocessor and takes one tile after the other: 128 tokens of an expert by 128 columns of gate
and the same ones of up, or by 256 columns of down. Four warps load weights with the bulk copy engine and gathered
tokens with `cp.async`. Two groups of four warps multiply 64 tokens each. So no warp waits for a copy, and while one
group scales FP8 sums or writes results, the other one multiplies.

The launches and their results are those of `moe_rounded` in `moe.py`, for FP8 weights of `moe_fp8.py`, to the bit.
"""

from typing import Any, NamedTuple

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

from mla_compile.ops.dependent_launch import early_options, wait_for_kernel_before
from mla_compile.ops.device import aligned_rows, device_of, power_of_two
from mla_compile.ops.experts.kernels.experts import Down, GateUp
from mla_compile.ops.experts.kernels.pairs import sort_pairs, weighted_sum
from mla_compile.ops.experts.kernels.prepare import prepared
from mla_compile.ops.experts.operands import ExpertOperands
from mla_compile.ops.gluon import barrier
from mla_compile.ops.linear import fp8
from mla_compile.ops.linear.kernels.fp8 import BLOCK, quantized

TOKENS = gl.constexpr(128)
"""Tokens of a tile."""
COLUMNS = gl.constexpr(128)
"""Columns of each of its two products."""
_REGISTERS = gl.constexpr(224)
"""Of each thread that multiplies; 56 remain for loading."""


_WIDE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
"""Of results that are stored: a thread has four neighbouring columns, two more than of a product."""


class Constants(NamedTuple):
    """Constants of a launch."""

    K: int
    WIDTH: int  # of a matrix row of the result: INTERMEDIATE or HIDDEN
    TOPK: int
    SHARED: int
    BLOCK_E: int  # experts rounded up to a power of two
    GATE_UP: bool
    FP8: bool
    PARTS: int  # vectors of a token: two or one if FP8, else one
    DEPTH: int  # columns of tokens and weights in a buffer
    STAGES: int  # buffers


class Arguments(NamedTuple):
    """Arguments of a launch."""

    x: Any  # [rows, K], strides (x_stride, 1); FP8: vectors of `Tokens`, contiguous
    x_scales: Any  # of `Tokens`, this and all other scales: None if not FP8
    x_rows: Any  # of each vector if FP8
    x_stride: Any
    scale: Any  # of the weights: `GateUp.both` or `Down.scale`
    shared_scale: Any
    shared_scale_2: Any
    out: Any  # [pairs + SHARED * tokens, WIDTH], in the order of `sort_pairs`; of gate and up if FP8: vectors
    out_scales: Any
    order: Any  # order and starts: of `sort_pairs`
    starts: Any
    tokens: Any
    pairs: Any
    experts: Any


class Buffers(NamedTuple):
    """Shared memory, and the barriers of its stages."""

    x: Any  # [vectors * STAGES, TOKENS, DEPTH]
    w: Any  # [STAGES, 2 * COLUMNS, DEPTH]: the columns of gate, then of up, or all of down
    loaded: Any
    used: Any


class Work(NamedTuple):
    """All tiles of a launch; those of shared experts come first."""

    ends: Any  # [BLOCK_E]: how many tiles the routed experts up to each one have
    shared: Any  # tiles of shared experts
    tiles: Any


class Tile(NamedTuple):
    """The work of a program at a time."""

    expert: Any  # or -1 - shared expert
    column: Any  # of its tiles of columns
    begin: Any  # positions in `order`, or tokens if shared
    end: Any
    row: Any  # of the first result


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _column_tiles(S: gl.constexpr):
    return S.WIDTH // COLUMNS if S.GATE_UP else S.WIDTH // (2 * COLUMNS)


@gluon.jit
def _work(call, S: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([S.BLOCK_E // 32], [32], [4], [0])
    expert = gl.arange(0, S.BLOCK_E, layout=layout)
    begin = gl.load(call.starts + expert, mask=expert < call.experts, other=0)
    end = gl.load(call.starts + expert + 1, mask=expert < call.experts, other=0)
    ends = gl.associative_scan((end - begin + TOKENS - 1) // TOKENS * _column_tiles(S), 0, _plus)
    shared = S.SHARED * ((call.tokens + TOKENS - 1) // TOKENS) * _column_tiles(S)
    return Work(ends, shared, shared + gl.max(ends, 0))


@gluon.jit
def _tile(call, S: gl.constexpr, work, number):
    """Tiles of the same columns are consecutive: one read of the weights."""
    nth = number - work.shared
    expert = gl.sum((work.ends <= nth).to(gl.int32), 0)
    nth -= gl.max(gl.where(work.ends <= nth, work.ends, 0), 0)
    begin = gl.load(call.starts + expert)
    end = gl.load(call.starts + expert + 1)
    tiles = gl.maximum((end - begin + TOKENS - 1) // TOKENS, 1)
    column = nth // tiles
    begin += nth % tiles * TOKENS
    end = gl.minimum(end, begin + TOKENS)
    row = begin
    if S.SHARED > 0:
        each = (call.tokens + TOKENS - 1) // TOKENS
        which = number // (each * _column_tiles(S))
        is_shared = number < work.shared
        expert = gl.where(is_shared, -1 - which, expert)
        column = gl.where(is_shared, number // each % _column_tiles(S), column)
        begin = gl.where(is_shared, number % each * TOKENS, begin)
        end = gl.where(is_shared, gl.minimum(call.tokens, begin + TOKENS), end)
        row = gl.where(is_shared, call.pairs + which * call.tokens + begin, begin)
    return Tile(expert, column, begin, end, row)


@gluon.jit
def _matrix_rows(call, S: gl.constexpr, tile, i):
    """The matrix rows of x for tokens i of a tile, and whether these exist."""
    inside = tile.begin + i < tile.end
    row = tile.row + i
    if S.GATE_UP:
        chosen = gl.load(call.order + tile.begin + i, mask=inside & (tile.expert >= 0), other=0) // S.TOPK
        row = gl.where(tile.expert >= 0, chosen, tile.begin + i)
    return row, inside


@gluon.jit
def _next(stage, phase, S: gl.constexpr):
    """The next buffer, and the phase of its barriers."""
    at_end = stage == S.STAGES - 1
    return gl.where(at_end, 0, stage + 1), gl.where(at_end, phase ^ 1, phase)


@gluon.jit
def _before(stage, S: gl.constexpr):
    """The previous buffer. Triton 3.6 and 3.7 do not update a variable that keeps a loop's last stage."""
    return gl.where(stage == 0, S.STAGES - 1, stage - 1)


@gluon.jit
def _load(call, S: gl.constexpr, weights, buffers):
    """Load the tokens and weights of all tiles, as buffers become free."""
    w, shared_w, shared_w_2 = weights
    PARTS: gl.constexpr = S.PARTS
    BYTES: gl.constexpr = 2 * COLUMNS * S.DEPTH * (1 if S.FP8 else 2)
    layout: gl.constexpr = gl.BlockedLayout([1, 16 if S.FP8 else 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, S.DEPTH, layout=gl.SliceLayout(0, layout))
    i = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    work = _work(call, S)
    number = gl.program_id(0)
    stage = 0
    phase = 1
    while number < work.tiles:
        tile = _tile(call, S, work, number)
        row, inside = _matrix_rows(call, S, tile, i)
        at = call.x + (row.to(gl.int64) * call.x_stride)[:, None] + k[None, :]
        shared = -1 - tile.expert
        if S.GATE_UP:
            first = tile.expert * (2 * S.WIDTH) + tile.column * COLUMNS
            second = first + S.WIDTH
        else:
            first = tile.expert * S.WIDTH + tile.column * (2 * COLUMNS)
            second = first + COLUMNS
        for start in range(0, S.K, S.DEPTH):
            mbarrier.wait(buffers.used.index(stage), phase)
            loaded = buffers.loaded.index(stage)
            mbarrier.expect(loaded, BYTES)
            left = buffers.w.index(stage).slice(0, COLUMNS, dim=0)
            right = buffers.w.index(stage).slice(COLUMNS, COLUMNS, dim=0)
            if S.SHARED == 0 or tile.expert >= 0:
                tma.async_copy_global_to_shared(w, [first, start], loaded, left)
                tma.async_copy_global_to_shared(w, [second, start], loaded, right)
            elif S.GATE_UP:
                at_shared = shared * S.WIDTH + tile.column * COLUMNS
                tma.async_copy_global_to_shared(shared_w, [at_shared, start], loaded, left)
                tma.async_copy_global_to_shared(shared_w_2, [at_shared, start], loaded, right)
            else:
                at_shared = tile.column * (2 * COLUMNS)
                tma.async_copy_global_to_shared(shared_w, [at_shared, shared * S.K + start], loaded, left)
                tma.async_copy_global_to_shared(
                    shared_w, [at_shared + COLUMNS, shared * S.K + start], loaded, right
                )
            for part in gl.static_range(PARTS):
                async_copy.async_copy_global_to_shared(
                    buffers.x.index(PARTS * stage + part),
                    at + (start + part * call.x_rows.to(gl.int64) * S.K),
                    mask=inside[:, None],
                )
            async_copy.mbarrier_arrive(loaded, increment_count=False)
            stage, phase = _next(stage, phase, S)
        number += gl.num_programs(0)


@gluon.jit
def _scales_of_weights(call, S: gl.constexpr, tile):
    """Pointers to the scales of the first block of both products' weights."""
    BLOCKS: gl.constexpr = S.K // BLOCK
    RESULTS: gl.constexpr = S.WIDTH // BLOCK
    shared = -1 - tile.expert
    if S.GATE_UP:
        first = call.scale + (tile.expert * (2 * RESULTS) + tile.column) * BLOCKS
        second = first + RESULTS * BLOCKS
    else:
        first = call.scale + (tile.expert * RESULTS + 2 * tile.column) * BLOCKS
        second = first + BLOCKS
    if S.SHARED > 0:  # noqa: SIM102 - the outer condition is constexpr
        if tile.expert < 0:
            if S.GATE_UP:
                first = call.shared_scale + (shared * RESULTS + tile.column) * BLOCKS
                second = call.shared_scale_2 + (shared * RESULTS + tile.column) * BLOCKS
            else:
                first = call.shared_scale + (2 * tile.column * S.SHARED + shared) * BLOCKS
                second = first + S.SHARED * BLOCKS
    return first, second


@gluon.jit
def _products_fp8(call, S: gl.constexpr, tile, row, inside, buffers, stage, phase, GROUP: gl.constexpr):
    """Both products of a group's 64 tokens by FP8 weights, float32 `[64, COLUMNS]` each; as `moe_fp8._add_product`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    of_first, of_second = _scales_of_weights(call, S, tile)
    first = gl.zeros([64, COLUMNS], gl.float32, layout)
    second = gl.zeros([64, COLUMNS], gl.float32, layout)
    # Scales are loaded a block early.
    next_token = gl.load(call.x_scales + row, mask=inside, other=0.0)
    next_first = gl.load(of_first)
    next_second = gl.load(of_second)
    BLOCKS: gl.constexpr = S.K // BLOCK
    for block in range(BLOCKS):
        scale_first = next_token * next_first
        scale_second = next_token * next_second
        more = block + 1 < BLOCKS
        next_token = gl.load(call.x_scales + (block + 1) * call.x_rows + row, mask=inside & more, other=0.0)
        next_first = gl.load(of_first + block + 1, mask=more, other=0.0)
        next_second = gl.load(of_second + block + 1, mask=more, other=0.0)
        mbarrier.wait(buffers.loaded.index(stage), phase)
        fence_async_shared()
        large = buffers.x.index(S.PARTS * stage).slice(GROUP * 64, 64, dim=0)
        last = buffers.x.index(S.PARTS * stage + S.PARTS - 1).slice(GROUP * 64, 64, dim=0)
        left = buffers.w.index(stage).slice(0, COLUMNS, dim=0).permute((1, 0))
        right = buffers.w.index(stage).slice(COLUMNS, COLUMNS, dim=0).permute((1, 0))
        product = gl.zeros([64, COLUMNS], gl.float32, layout)
        product = warpgroup_mma(last, left, product, use_acc=False, is_async=True)
        if S.PARTS == 2:
            product = warpgroup_mma(large, left, product, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        first = gl.fma(product, scale_first[:, None], first)
        product = warpgroup_mma(last, right, product, use_acc=False, is_async=True)
        if S.PARTS == 2:
            product = warpgroup_mma(large, right, product, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        barrier()
        mbarrier.arrive(buffers.used.index(stage), count=1)
        second = gl.fma(product, scale_second[:, None], second)
        stage, phase = _next(stage, phase, S)
    return first, second, stage, phase


@gluon.jit
def _products(S: gl.constexpr, buffers, stage, phase, GROUP: gl.constexpr):
    """`_products_fp8` in bfloat16: one instruction multiplies by both, so it reads the tokens once."""
    both: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    one: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    result = gl.zeros([64, 2 * COLUMNS], gl.float32, both)
    for start in range(0, S.K, S.DEPTH):
        mbarrier.wait(buffers.loaded.index(stage), phase)
        fence_async_shared()
        x = buffers.x.index(stage).slice(GROUP * 64, 64, dim=0)
        result = warpgroup_mma(x, buffers.w.index(stage).permute((1, 0)), result, is_async=True)
        result = warpgroup_mma_wait(1, deps=[result])  # the product before has ended
        if start > 0:
            barrier()
            mbarrier.arrive(buffers.used.index(_before(stage, S)), count=1)
        stage, phase = _next(stage, phase, S)
    result = warpgroup_mma_wait(0, deps=[result])
    barrier()
    mbarrier.arrive(buffers.used.index(_before(stage, S)), count=1)
    first, second = result.reshape([64, 2, COLUMNS]).permute((0, 2, 1)).split()
    first = gl.convert_layout(first, one, assert_trivial=True)
    second = gl.convert_layout(second, one, assert_trivial=True)
    return first, second, stage, phase


@gluon.jit
def _no_products(S: gl.constexpr, buffers, stage, phase):
    """`_products` of a group without tokens: give all buffers back."""
    for _ in range(0, S.K, S.DEPTH):
        mbarrier.wait(buffers.loaded.index(stage), phase)
        barrier()
        mbarrier.arrive(buffers.used.index(stage), count=1)
        stage, phase = _next(stage, phase, S)
    return stage, phase


@gluon.jit
def _store(at, result, inside):
    """Store `[64, COLUMNS]` to addresses in `_WIDE`, as their dtype."""
    gl.store(at, gl.convert_layout(result.to(at.dtype.element_ty), _WIDE), mask=inside[:, None])


@gluon.jit
def _multiply(call, S: gl.constexpr, buffers, GROUP: gl.constexpr):
    """The products of a group's 64 tokens of all tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32 if S.FP8 else 16])
    i = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    i_wide = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _WIDE))
    c_wide = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, _WIDE))
    work = _work(call, S)
    number = gl.program_id(0)
    stage = 0
    phase = 0
    while number < work.tiles:
        tile = _tile(call, S, work, number)
        if tile.begin + GROUP * 64 < tile.end:
            if S.FP8:
                row, inside = _matrix_rows(call, S, tile, i)
                first, second, stage, phase = _products_fp8(
                    call, S, tile, row, inside, buffers, stage, phase, GROUP
                )
            else:
                first, second, stage, phase = _products(S, buffers, stage, phase, GROUP)
            inside_wide = tile.begin + i_wide < tile.end
            at = call.out + ((tile.row + i_wide).to(gl.int64) * S.WIDTH)[:, None] + c_wide[None, :]
            if S.GATE_UP:
                at += tile.column * COLUMNS
                result = first / (1.0 + gl.exp(-first)) * second
                if S.FP8:
                    results = (call.pairs + S.SHARED * call.tokens).to(gl.int64)
                    large, small, scale = quantized(result, S.PARTS, gl.float8e4nv)
                    _store(at, large, inside_wide)
                    if S.PARTS == 2:
                        _store(at + results * S.WIDTH, small, inside_wide)
                    at_scales = call.out_scales + tile.column * results + tile.row
                    gl.store(at_scales + i, scale, mask=tile.begin + i < tile.end)
                else:
                    _store(at, result, inside_wide)
            else:
                at += tile.column * (2 * COLUMNS)
                _store(at, first, inside_wide)
                _store(at + COLUMNS, second, inside_wide)
        else:
            stage, phase = _no_products(S, buffers, stage, phase)
        number += gl.num_programs(0)


@gluon.jit(do_not_specialize=["x_rows", "tokens", "pairs"])
def grouped_kernel(
    w,  # boxes of the weights `[matrix rows, K]`: of all experts
    shared_w,  # of shared experts: gate, or down; None if there is none
    shared_w_2,  # up; None for down
    x,  # this and the others: `Arguments`
    x_scales,
    x_rows,
    x_stride,
    scale,
    shared_scale,
    shared_scale_2,
    out,
    out_scales,
    order,
    starts,
    tokens,
    pairs,
    experts,
    S: gl.constexpr,
    EARLY: gl.constexpr,
):
    """`silu(gate) * up` or the down projection of all tiles; a program for each multiprocessor."""
    gl.static_assert(COLUMNS == BLOCK)
    gl.static_assert(S.DEPTH == BLOCK or not S.FP8)
    gl.static_assert(S.K % S.DEPTH == 0)
    gl.static_assert(S.WIDTH % (COLUMNS if S.GATE_UP else 2 * COLUMNS) == 0)
    wait_for_kernel_before(EARLY)
    of_inputs = x, x_scales, x_rows, x_stride, scale, shared_scale, shared_scale_2
    call = Arguments(*of_inputs, out, out_scales, order, starts, tokens, pairs, experts)
    DTYPE: gl.constexpr = gl.float8e4nv if S.FP8 else gl.bfloat16
    STAGES: gl.constexpr = S.STAGES
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8 if S.FP8 else 16)
    of_tokens = gl.allocate_shared_memory(DTYPE, [S.PARTS * STAGES, TOKENS, S.DEPTH], swizzled)
    of_weights = gl.allocate_shared_memory(DTYPE, [STAGES, 2 * COLUMNS, S.DEPTH], swizzled)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=129)  # the threads that load, and `expect`
        mbarrier.init(used.index(stage), count=2)  # the groups that multiply
    fence_async_shared()
    barrier()
    buffers = Buffers(of_tokens, of_weights, loaded, used)
    gl.warp_specialize(
        [
            (_load, (call, S, (w, shared_w, shared_w_2), buffers)),
            (_multiply, (call, S, buffers, 0)),
            (_multiply, (call, S, buffers, 1)),
        ],
        [4, 4],
        [_REGISTERS, _REGISTERS],
    )


def _boxes(weight: Tensor | None, depth: int) -> TensorDescriptor | None:
    """A descriptor of a weight `[..., matrix rows, k]`, for bulk copies of a product's columns and `depth` of k."""
    if weight is None:
        return None
    swizzled = gl.NVMMASharedLayout(128, 8 * weight.element_size(), rank=2)
    return TensorDescriptor.from_tensor(weight.flatten(0, -2), [COLUMNS.value, depth], swizzled)


def moe_grouped(operands: ExpertOperands, *, parts: int = 2) -> Tensor:
    """`moe_experts_op` of bfloat16 tokens; hidden a multiple of 256, intermediate of 128.

    parts: the FP8 vectors of a token if the weights are FP8; see `quantized`.
    """
    x, topk_ids, shared = operands.x, operands.topk_ids.contiguous(), operands.num_shared
    (tokens, hidden), (experts, _, intermediate) = x.shape, operands.w_down.shape
    is_fp8 = operands.gate_up_scale is not None
    gate_up, gate_up_scales = GateUp.of(operands)
    down = Down.of(operands)
    pairs, programs = topk_ids.numel(), device_of(x).multiprocessors
    results = pairs + shared * tokens
    block_e = max(32, power_of_two(experts))
    parts, depth, stages = (parts, 128, 5 - parts) if is_fp8 else (1, 64, 4)
    topk = topk_ids.shape[1]
    of_gate_up = Constants(hidden, intermediate, topk, shared, block_e, True, is_fp8, parts, depth, stages)
    of_down = of_gate_up._replace(K=intermediate, WIDTH=hidden, GATE_UP=False)

    scales = activated_scales = None
    if is_fp8:
        x, scales, starts, order, places = prepared(operands, parts)
        rows, stride = x.shape[1], hidden
        activated = x.new_empty((parts, results, intermediate))
        activated_scales = scales.new_empty((intermediate // fp8.BLOCK, results))
    else:
        x, stride = aligned_rows(x)
        rows = tokens
        starts, order, places = sort_pairs(topk_ids, experts, operands.row_lens, operands.q_len)
        activated = x.new_empty((results, intermediate))
    out = operands.x.new_empty((results, hidden))
    work = order, starts, tokens, pairs, experts
    options = {**early_options(x), "num_warps": 4}
    grouped_kernel[(programs,)](
        *(_boxes(weight, depth) for weight in gate_up),
        *(x, scales, rows, stride, *gate_up_scales, activated, activated_scales, *work, of_gate_up),
        **options,
    )
    grouped_kernel[(programs,)](
        *(_boxes(weight, depth) for weight in (down.down, down.shared_down, None)),
        *(activated, activated_scales, results, intermediate, down.scale, down.shared_scale, None),
        *(out, None, *work, of_down),
        **options,
    )
    return weighted_sum(operands, out, places)


def moe_grouped_activations(operands: ExpertOperands) -> Tensor:
    """`moe_grouped` of tokens that are quantised to FP8."""
    return moe_grouped(operands, parts=1)
