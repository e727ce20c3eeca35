"""Decode over FP8 latents with up to 32 queries at a time: some warps score while others sum.

As in `narrow.py` keys are the matrix rows of both products. One warpgroup multiplies keys by queries and makes weights,
another multiplies latents by the weights of the tile before. Reading keys from shared memory limits both products, so
scores are computed once, for all queries.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from mla_compile.ops.attention.kernels.gluon.fp8 import HALF_WORDS, load_half
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

MAX_ROWS = 32
"""The most queries of a unit."""
STAGES = gl.constexpr(2)
"""Tiles in shared memory, of 72 KB each."""


class _Shared(NamedTuple):
    """The buffers in shared memory; from `loaded` on, barriers. `raw` holds what is in flight."""

    kv_c: Any
    k_pe: Any
    queries: Any
    queries_pe: Any
    weights: Any
    decay: Any
    final: Any
    raw: Any
    raw_pe: Any
    loaded: Any
    used: Any
    has_weights: Any
    has_final: Any


@gluon.jit
def _score(call, S: gl.constexpr, place, shared, BLOCK_R: gl.constexpr):
    """The weights of the program's pieces, and their sums."""
    unit, begin, at, end, piece = place
    inputs = call.inputs
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    c = gl.arange(0, RANK, layout=gl.SliceLayout(0, q_layout))
    p = gl.arange(0, ROPE, layout=gl.SliceLayout(0, q_layout))
    k = gl.arange(0, TILE, layout=gl.SliceLayout(1, s_layout))
    scale = inputs.softmax_scale * LOG2_E
    i = 0
    n = 0  # pieces so far
    held = -1  # the unit whose queries are in shared memory
    while at < end:
        current = unit
        row, block, length, stored, first, last, _, _, unit, begin, at = piece_of(
            call, S, unit, begin, at, end, piece
        )
        first_r = block * BLOCK_R
        if current != held:
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
        for tile in range(first, last):
            stage = i % STAGES
            mbarrier.wait(shared.loaded.index(stage), (i // STAGES) & 1)
            fence_async_shared()
            scores = gl.zeros([TILE, BLOCK_R], gl.float32, s_layout)
            scores = warpgroup_mma(
                shared.kv_c.index(stage), shared.queries.permute((1, 0)), scores, use_acc=False, is_async=True
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
            mbarrier.wait(shared.used.index((i + 1) % STAGES), (((i + 1) // STAGES) & 1) ^ 1)  # the last tile
            shared.weights.store(weights.to(gl.bfloat16))
            shared.decay.index(stage).store(decay)
            fence_async_shared()
            barrier()
            mbarrier.arrive(shared.has_weights.index(stage), count=1)
            i += 1

        sums = gl.sum(total, 0)
        mbarrier.wait(shared.has_final.index(1), (n & 1) ^ 1)  # those of the last piece are read
        shared.final.index(0).store(1.0 / gl.where(sums == 0.0, 1.0, sums))
        shared.final.index(1).store((top + gl.log2(sums)) * LN_2)
        barrier()
        mbarrier.arrive(shared.has_final.index(0), count=1)
        n += 1


@gluon.jit
def _sum(call, S: gl.constexpr, place, shared, BLOCK_R: gl.constexpr):
    """The sums of latents of the program's pieces."""
    unit, begin, at, end, piece = place
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_R, 16])
    o_c = gl.arange(0, RANK, layout=gl.SliceLayout(1, o_layout))
    o_r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, o_layout))
    i = 0
    n = 0
    while at < end:
        row, block, _, _, first, last, tiles, split, unit, begin, at = piece_of(
            call, S, unit, begin, at, end, piece
        )
        acc = gl.zeros([RANK, BLOCK_R], gl.float32, o_layout)
        for _ in range(first, last):
            stage = i % STAGES
            mbarrier.wait(shared.has_weights.index(stage), (i // STAGES) & 1)
            acc = acc * shared.decay.index(stage).load(gl.SliceLayout(0, o_layout))[None, :]
            fence_async_shared()
            acc = warpgroup_mma(shared.kv_c.index(stage).permute((1, 0)), shared.weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(shared.used.index(stage), count=1)
            i += 1

        mbarrier.wait(shared.has_final.index(0), n & 1)
        acc = acc * shared.final.index(0).load(gl.SliceLayout(0, o_layout))[None, :]
        log_sum = shared.final.index(1).load(gl.SliceLayout(0, o_layout))
        barrier()
        mbarrier.arrive(shared.has_final.index(1), count=1)
        n += 1
        store_piece(
            call, S, (row, split, first, last, tiles), block * BLOCK_R, acc, o_r[None, :], o_c[:, None],
            log_sum, o_r, True, BLOCK_R,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "most_keys"])
def narrow_fp8_kernel(
    inputs,
    results,
    rows,
    most_keys,
    S: gl.constexpr,
    BLOCK_R: gl.constexpr,
    num_warps: gl.constexpr,  # those that score
):
    """Attention of every unit, or of its pieces; one program per multiprocessor."""
    gdc_wait()  # for the previous kernel
    call = Call(inputs, results, rows, most_keys)
    place = plan(call, S, num_warps)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kv_c = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, RANK], swizzled)
    k_pe = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, ROPE], swizzled)
    queries = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, RANK], swizzled)
    queries_pe = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_R, ROPE], swizzled)
    weights = gl.allocate_shared_memory(
        gl.bfloat16, [TILE, BLOCK_R], gl.NVMMASharedLayout.get_default_for([TILE, BLOCK_R], gl.bfloat16)
    )
    decay = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_R], flat)
    final = gl.allocate_shared_memory(gl.float32, [2, BLOCK_R], flat)
    raw = gl.allocate_shared_memory(gl.int32, [2, TILE, HALF_WORDS], gl.NVMMASharedLayout(128, 32))
    raw_pe = gl.allocate_shared_memory(gl.bfloat16, [TILE, ROPE], swizzled)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    has_weights = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    has_final = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(2):
        mbarrier.init(loaded.index(j), count=2)  # two groups of warps load
        mbarrier.init(used.index(j), count=1)
        mbarrier.init(has_weights.index(j), count=1)
        mbarrier.init(has_final.index(j), count=1)
    fence_async_shared()
    barrier()
    shared = _Shared(
        kv_c,
        k_pe,
        queries,
        queries_pe,
        weights,
        decay,
        final,
        raw,
        raw_pe,
        loaded,
        used,
        has_weights,
        has_final,
    )
    gl.warp_specialize(
        [
            (_score, (call, S, place, shared, BLOCK_R)),
            (_sum, (call, S, place, shared, BLOCK_R)),
            (load_half, (call, S, place, shared, STAGES, 0)),
            (load_half, (call, S, place, shared, STAGES, 1)),
        ],
        [4, 4, 4],
        [192 if BLOCK_R == 32 else 128, 88, 88],  # registers per thread, chosen by spills
    )
