"""Decode with up to 64 queries at a time: keys are the matrix rows of both products.

`S^T = K Q^T` and `O^T += K_c^T P^T`, as in `ops/attention/kernels/decode.py`: 16 queries cost a quarter of what 64
cost. Four warps gather tiles of any page size through the block table with `cp.async`, two tiles ahead; keys past a
row's end are zeros.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from mla_compile.ops.attention.kernels.gluon.split import (
    RANK,
    ROPE,
    TILE,
    Call,
    bounds_of,
    piece_of,
    plan,
    query_offsets,
    store_piece,
)
from mla_compile.ops.attention.kernels.softmax import LN_2, LOG2_E
from mla_compile.ops.gluon import barrier

MAX_ROWS = 64
"""The most queries of a unit."""
MAX_UNSPLIT_ROWS = 32
"""The most queries of a row of the batch for which this kernel is faster than `wide_kernel`."""
STAGES = gl.constexpr(2)
"""Tiles in shared memory, of 72 KB each."""


class _Shared(NamedTuple):
    """The buffers in shared memory; `loaded` and `used` are barriers, one for each stage."""

    kv_c: Any
    k_pe: Any
    queries: Any
    queries_pe: Any
    weights: Any
    loaded: Any
    used: Any


@gluon.jit
def _load(call, S: gl.constexpr, place, shared):
    """Load the program's tiles into shared memory; `place` is the result of `plan`."""
    unit, begin, at, end, piece = place
    inputs = call.inputs
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, RANK, layout=gl.SliceLayout(0, layout))
    p = gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))
    i = 0
    while at < end:
        row, _, _, stored, first, last, _, _, unit, begin, at = piece_of(call, S, unit, begin, at, end, piece)
        table = inputs.block_table + row.to(gl.int64) * inputs.table_stride
        for tile in range(first, last):
            key = tile * TILE + k
            live = key < stored
            page = gl.load(table + key // S.PAGE_SIZE, mask=live, other=0).to(gl.int64)
            latent = inputs.kv_cache + (page * S.PAGE_SIZE + key % S.PAGE_SIZE) * (RANK + ROPE)
            stage = i % STAGES
            mbarrier.wait(shared.used.index(stage), ((i // STAGES) & 1) ^ 1)
            # Latents past the end are zeros too, not only their scores masked: 0 x NaN is NaN.
            async_copy.async_copy_global_to_shared(
                shared.kv_c.index(stage), latent[:, None] + c[None, :], mask=live[:, None]
            )
            async_copy.async_copy_global_to_shared(
                shared.k_pe.index(stage), (latent + RANK)[:, None] + p[None, :], mask=live[:, None]
            )
            async_copy.mbarrier_arrive(shared.loaded.index(stage), increment_count=False)
            i += 1


@gluon.jit
def _attend(call, S: gl.constexpr, place, shared, BLOCK_R: gl.constexpr, WARPS: gl.constexpr):
    """Attention of the program's pieces."""
    unit, begin, at, end, piece = place
    inputs = call.inputs
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, BLOCK_R * 4 // WARPS, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_R, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    c = gl.arange(0, RANK, layout=gl.SliceLayout(0, q_layout))
    p = gl.arange(0, ROPE, layout=gl.SliceLayout(0, q_layout))
    k = gl.arange(0, TILE, layout=gl.SliceLayout(1, s_layout))
    o_c = gl.arange(0, RANK, layout=gl.SliceLayout(1, o_layout))
    scale = inputs.softmax_scale * LOG2_E
    i = 0
    held = -1  # the unit whose queries are in shared memory
    while at < end:
        current = unit
        row, block, length, stored, first, last, tiles, split, unit, begin, at = piece_of(
            call, S, unit, begin, at, end, piece
        )
        first_r = block * BLOCK_R
        if current != held:  # the splits of a unit share its queries
            r = first_r + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, q_layout))
            q_at, pe_at = query_offsets(call, S, row, r)
            inside = (r < S.Q_LEN * S.HEADS)[:, None]
            shared.queries.store(
                gl.load(inputs.q_latent + q_at[:, None] + c[None, :], mask=inside, other=0.0)
            )
            shared.queries_pe.store(
                gl.load(inputs.q_pe + pe_at[:, None] + p[None, :], mask=inside, other=0.0)
            )
            fence_async_shared()
            barrier()
        held = current

        s_r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, s_layout))
        bounds = bounds_of(call, S, row, first_r + s_r, length, stored)
        top = gl.full([BLOCK_R], -float("inf"), gl.float32, gl.SliceLayout(0, s_layout))
        # Each thread sums its own keys: only the row maximum must cross warps in every tile.
        total = gl.zeros([TILE, BLOCK_R], gl.float32, s_layout)
        acc = gl.zeros([RANK, BLOCK_R], gl.float32, o_layout)
        for tile in range(first, last):
            stage = i % STAGES
            mbarrier.wait(shared.loaded.index(stage), (i // STAGES) & 1)
            fence_async_shared()
            latents = shared.kv_c.index(stage)
            scores = gl.zeros([TILE, BLOCK_R], gl.float32, s_layout)
            scores = warpgroup_mma(
                latents, shared.queries.permute((1, 0)), scores, use_acc=False, is_async=True
            )
            scores = warpgroup_mma(
                shared.k_pe.index(stage), shared.queries_pe.permute((1, 0)), scores, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
            seen = (tile * TILE + k)[:, None] < bounds[None, :]
            scores = gl.where(seen, scores * scale, -float("inf"))
            new_top = gl.maximum(top, gl.max(scores, 0))
            base = gl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
            weights = gl.exp2(scores - base[None, :])
            decay = gl.exp2(top - base)
            total = total * decay[None, :] + weights
            top = new_top
            shared.weights.store(weights.to(gl.bfloat16))
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(0, o_layout))[None, :]
            fence_async_shared()
            barrier()
            acc = warpgroup_mma(latents.permute((1, 0)), shared.weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(shared.used.index(stage), count=1)
            i += 1

        sums = gl.sum(total, 0)
        filled = gl.where(sums == 0.0, 1.0, sums)
        log_sum = (top + gl.log2(sums)) * LN_2
        acc = acc * gl.convert_layout(1.0 / filled, gl.SliceLayout(0, o_layout))[None, :]
        o_r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, o_layout))
        store_piece(
            call, S, (row, split, first, last, tiles), first_r, acc, o_r[None, :], o_c[:, None],
            log_sum, s_r, True, BLOCK_R,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "most_keys"])
def narrow_kernel(
    inputs,
    results,
    rows,
    most_keys,
    S: gl.constexpr,
    BLOCK_R: gl.constexpr,
    num_warps: gl.constexpr,  # the computing warps
):
    """Attention of every unit, or of its pieces; one program per multiprocessor."""
    gdc_wait()  # for the previous kernel
    call = Call(inputs, results, rows, most_keys)
    place = plan(call, S, num_warps)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    kv_c = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, RANK], swizzled)
    k_pe = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, ROPE], swizzled)
    queries = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, RANK], swizzled)
    queries_pe = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, ROPE], swizzled)
    weights_shared = gl.allocate_shared_memory(
        gl.bfloat16, [TILE, BLOCK_R], gl.NVMMASharedLayout.get_default_for([TILE, BLOCK_R], gl.bfloat16)
    )
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=128)  # the threads that load
        mbarrier.init(used.index(stage), count=1)
    fence_async_shared()
    barrier()
    shared = _Shared(kv_c, k_pe, queries, queries_pe, weights_shared, loaded, used)
    gl.warp_specialize(
        [
            (_attend, (call, S, place, shared, BLOCK_R, num_warps)),
            (_load, (call, S, place, shared)),
        ],
        [4],
        [64],
    )
