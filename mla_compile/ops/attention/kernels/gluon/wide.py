"""Decode with 64 queries at a time: two warpgroups, each with a tile of keys and half of the output's columns.

For every two tiles: warpgroup W scores tile W, the two exchange their row maxima, and each multiplies the weights of
both tiles by columns `[256 W, 256 W + 256)` of the latents, its own tile's first. The buffer of a half of a tile is
loaded again as soon as the warpgroup with these columns has used it, so four loads are in flight at different times.

If pages hold at least 8 adjacent keys, the bulk copy engine loads whole tiles. `cp.async` loads the others, with zeros
past a row's end.
"""

from typing import Any, NamedTuple

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
from triton.language.extra.cuda import gdc_wait

from mla_compile.ops.attention.kernels.gluon.fp8 import load_tiles
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

ROWS = gl.constexpr(64)
"""Queries of a unit."""
HALF = gl.constexpr(256)
"""Columns of the latents that a warpgroup multiplies weights by."""
QUARTER = gl.constexpr(128)


@gluon.jit
def _zero(x):
    """0, hidden from the compiler: it would hoist descriptors of constant places out of loops, and spill them."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


class _Shared(NamedTuple):
    """The buffers in shared memory; from `loaded` on, barriers."""

    kv_c: Any
    k_pe: Any
    queries: Any
    weights: Any
    row_stats: Any
    loaded: Any
    used: Any
    row_max_ready: Any
    has_weights: Any
    weights_consumed: Any
    has_queries: Any


@gluon.jit
def _gather_half(
    call, S: gl.constexpr, table, stored, tile, last, phase, shared, W: gl.constexpr, H: gl.constexpr
):
    """Load half H of warpgroup W's tile; zeros for keys and tiles that do not exist, as 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    c = H * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    p = RANK + gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))
    live = (key < stored) & (tile < last)
    page = gl.load(table + key // S.PAGE_SIZE, mask=live, other=0).to(gl.int64)
    latent = call.inputs.kv_cache + (page * S.PAGE_SIZE + key % S.PAGE_SIZE) * (RANK + ROPE)
    mbarrier.wait(shared.used.index(2 * W + H), phase)
    async_copy.async_copy_global_to_shared(
        shared.kv_c.index(W).slice(H * HALF, HALF, dim=1), latent[:, None] + c[None, :], mask=live[:, None]
    )
    if W != H:  # the half that stays in use longer has the rotary part
        async_copy.async_copy_global_to_shared(
            shared.k_pe.index(W), latent[:, None] + p[None, :], mask=live[:, None]
        )
    async_copy.mbarrier_arrive(shared.loaded.index(2 * W + H), increment_count=False)


@gluon.jit
def _load_half(
    boxes, call, S: gl.constexpr, table, stored, tile, last, phase, shared, W: gl.constexpr, H: gl.constexpr
):
    """`_gather_half`, with the bulk copy engine if the tile is whole."""
    if S.BOX == 0:
        _gather_half(call, S, table, stored, tile, last, phase, shared, W, H)
    else:
        if (tile < last) & (tile * TILE + TILE <= stored):
            kv_boxes, pe_boxes = boxes
            bytes_of_half: gl.constexpr = TILE * 2 * (HALF + (ROPE if W != H else 0))
            full = shared.loaded.index(2 * W + H)
            page = gl.load(table + tile * TILE // S.PAGE_SIZE)
            mbarrier.wait(shared.used.index(2 * W + H), phase)
            mbarrier.expect(full, bytes_of_half)
            for box in gl.static_range(TILE // S.BOX):
                key = tile * TILE + box * S.BOX
                if box > 0:
                    page = gl.load(table + key // S.PAGE_SIZE)
                where = page * S.PAGE_SIZE + key % S.PAGE_SIZE
                rows = shared.kv_c.index(W).slice(box * S.BOX, S.BOX, dim=0)
                tma.async_copy_global_to_shared(
                    kv_boxes, [where, H * HALF], full, rows.slice(H * HALF, HALF, dim=1)
                )
                if W != H:
                    tma.async_copy_global_to_shared(
                        pe_boxes, [where, RANK], full, shared.k_pe.index(W).slice(box * S.BOX, S.BOX, dim=0)
                    )
            mbarrier.arrive(full, count=127)  # with the arrival of `expect` as many as the gathering threads
        else:
            _gather_half(call, S, table, stored, tile, last, phase, shared, W, H)


@gluon.jit
def _load(boxes, call, S: gl.constexpr, place, shared):
    """Load the program's tiles into shared memory, in the order in which the buffers of their halves become free."""
    unit, begin, at, end, piece = place
    i = 0
    while at < end:
        row, _, _, stored, first, last, _, _, unit, begin, at = piece_of(call, S, unit, begin, at, end, piece)
        table = call.inputs.block_table + row.to(gl.int64) * call.inputs.table_stride
        for tile in range(first, last, 2):
            phase = (i & 1) ^ 1
            for other_half in gl.static_range(2):
                for w in gl.static_range(2):
                    _load_half(
                        boxes, call, S, table, stored, tile + w, last, phase, shared, w, w ^ other_half
                    )
            i += 1


@gluon.jit
def _attend(call, S: gl.constexpr, place, shared, W: gl.constexpr):
    """Attention of the program's pieces."""
    unit, begin, at, end, piece = place
    inputs = call.inputs
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    p = gl.arange(0, ROPE, layout=gl.SliceLayout(0, q_layout))
    k = gl.arange(0, TILE, layout=gl.SliceLayout(0, s_layout))
    o_c = W * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, o_layout))
    scale = inputs.softmax_scale * LOG2_E
    i = 0  # pairs of tiles so far
    n = 0  # pieces so far
    while at < end:
        row, block, length, stored, first, last, tiles, split, unit, begin, at = piece_of(
            call, S, unit, begin, at, end, piece
        )
        first_r = block * ROWS

        # Each warpgroup loads half of the queries. The other one has finished with the last piece's queries: it stored
        # its last weights, which both have used, after its last scores.
        zero = _zero(i)
        mine, other = W + zero, 1 - W + zero
        r = first_r + gl.arange(0, ROWS, layout=gl.SliceLayout(1, q_layout))
        q_at, pe_at = query_offsets(call, S, row, r)
        inside = (r < S.Q_LEN * S.HEADS)[:, None]
        for quarter in gl.static_range(2 * W, 2 * W + 2):  # a half at once would spill
            c = quarter * QUARTER + gl.arange(0, QUARTER, layout=gl.SliceLayout(0, q_layout))
            part = gl.load(inputs.q_latent + q_at[:, None] + c[None, :], mask=inside, other=0.0)
            shared.queries.index(zero).slice(quarter * QUARTER, QUARTER, dim=1).store(part)
        # The rotary part stays in registers, and is loaded through the buffer of the weights.
        mbarrier.wait(shared.weights_consumed.index(mine), (i & 1) ^ 1)
        shared.weights.index(mine).store(
            gl.load(inputs.q_pe + pe_at[:, None] + p[None, :], mask=inside, other=0.0)
        )
        barrier()
        queries_pe = shared.weights.index(mine).load(gl.DotOperandLayout(0, s_layout, 2))
        fence_async_shared()
        barrier()
        mbarrier.arrive(shared.has_queries.index(mine), count=1)
        mbarrier.wait(shared.has_queries.index(other), n & 1)
        fence_async_shared()

        s_r = gl.arange(0, ROWS, layout=s_rows)
        bounds = bounds_of(call, S, row, first_r + s_r, length, stored)
        top = gl.full([ROWS], -float("inf"), gl.float32, s_rows)
        total = gl.zeros([ROWS], gl.float32, s_rows)
        acc = gl.zeros([ROWS, HALF], gl.float32, o_layout)
        for pair in range(first, last, 2):
            tile = pair + W
            phase = i & 1
            zero = _zero(i)
            mine, other = W + zero, 1 - W + zero
            own, others = shared.kv_c.index(mine), shared.kv_c.index(other)
            q = shared.queries.index(zero)
            scores = gl.zeros([ROWS, TILE], gl.float32, s_layout)
            mbarrier.wait(shared.loaded.index(2 * mine + W), phase)
            fence_async_shared()
            scores = warpgroup_mma(
                q.slice(W * HALF, HALF, dim=1),
                own.slice(W * HALF, HALF, dim=1).permute((1, 0)),
                scores,
                use_acc=False,
                is_async=True,
            )
            mbarrier.wait(shared.loaded.index(2 * mine + 1 - W), phase)
            fence_async_shared()
            scores = warpgroup_mma(
                q.slice((1 - W) * HALF, HALF, dim=1),
                own.slice((1 - W) * HALF, HALF, dim=1).permute((1, 0)),
                scores,
                is_async=True,
            )
            scores = warpgroup_mma(queries_pe, shared.k_pe.index(mine).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            seen = ((tile * TILE + k)[None, :] < bounds[:, None]) & (tile < last)
            scores = gl.where(seen, scores * scale, -float("inf"))

            shared.row_stats.index(mine).store(gl.max(scores, 1))
            barrier()
            mbarrier.arrive(shared.row_max_ready.index(mine), count=1)
            mbarrier.wait(shared.row_max_ready.index(other), phase)
            new_top = gl.maximum(
                shared.row_stats.index(zero).load(s_rows), shared.row_stats.index(1 + zero).load(s_rows)
            )
            new_top = gl.maximum(top, new_top)
            base = gl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
            weights = gl.exp2(scores - base[:, None])
            decay = gl.exp2(top - base)
            total = total * decay + gl.sum(weights, 1)
            top = new_top

            mbarrier.wait(shared.weights_consumed.index(mine), phase ^ 1)
            shared.weights.index(mine).store(weights.to(gl.bfloat16))
            acc = acc * gl.convert_layout(decay, o_rows)[:, None]
            fence_async_shared()
            barrier()
            mbarrier.arrive(shared.has_weights.index(mine), count=1)
            acc = warpgroup_mma(
                shared.weights.index(mine), own.slice(W * HALF, HALF, dim=1), acc, is_async=True
            )
            mbarrier.wait(shared.loaded.index(2 * other + W), phase)
            mbarrier.wait(shared.has_weights.index(other), phase)
            fence_async_shared()
            acc = warpgroup_mma(
                shared.weights.index(other), others.slice(W * HALF, HALF, dim=1), acc, is_async=True
            )
            acc = warpgroup_mma_wait(1, deps=[acc])
            barrier()
            mbarrier.arrive(shared.used.index(2 * mine + W), count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(shared.used.index(2 * other + W), count=1)
            mbarrier.arrive(shared.weights_consumed.index(other), count=1)
            i += 1

        shared.row_stats.index(2 + mine).store(total)
        barrier()
        mbarrier.arrive(shared.row_max_ready.index(2 + mine), count=1)
        mbarrier.wait(shared.row_max_ready.index(2 + other), n & 1)
        sums = shared.row_stats.index(2 + zero).load(s_rows) + shared.row_stats.index(3 + zero).load(s_rows)
        n += 1
        filled = gl.where(sums == 0.0, 1.0, sums)
        log_sum = (top + gl.log2(sums)) * LN_2
        acc = acc * gl.convert_layout(1.0 / filled, o_rows)[:, None]
        o_r = gl.arange(0, ROWS, layout=o_rows)
        store_piece(
            call, S, (row, split, first, last, tiles), first_r, acc, o_r[:, None], o_c[None, :],
            log_sum, s_r, W == 0, ROWS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "most_keys"])
def wide_kernel(
    kv_boxes,  # a descriptor of `kv_cache` as [pages * PAGE_SIZE, RANK + ROPE], for boxes of [BOX, HALF]
    pe_boxes,  # the same for boxes of [BOX, ROPE]
    inputs,
    results,
    rows,
    most_keys,
    S: gl.constexpr,
    num_warps: gl.constexpr,  # the loading warps
):
    """Attention of every unit, or of its pieces; one program per multiprocessor."""
    gdc_wait()  # for the previous kernel
    call = Call(inputs, results, rows, most_keys)
    place = plan(call, S, num_warps)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    kv_c = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, RANK], swizzled)
    k_pe = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, ROPE], swizzled)
    queries = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, RANK], swizzled)
    weights_shared = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, TILE], swizzled)
    row_stats = gl.allocate_shared_memory(gl.float32, [4, ROWS], flat)  # maxima, then sums, of each warpgroup
    one_barrier: gl.constexpr = mbarrier.MBarrierLayout()
    loaded = gl.allocate_shared_memory(gl.int64, [4, 1], one_barrier)  # half H of tile W: 2 W + H
    used = gl.allocate_shared_memory(gl.int64, [4, 1], one_barrier)
    row_max_ready = gl.allocate_shared_memory(gl.int64, [4, 1], one_barrier)
    has_weights = gl.allocate_shared_memory(gl.int64, [2, 1], one_barrier)
    weights_consumed = gl.allocate_shared_memory(gl.int64, [2, 1], one_barrier)
    has_queries = gl.allocate_shared_memory(gl.int64, [2, 1], one_barrier)
    FP8: gl.constexpr = inputs.kv_cache.dtype.element_ty == gl.uint8
    for j in gl.static_range(4):
        mbarrier.init(loaded.index(j), count=129 if FP8 else 128)  # the threads that load; see `load_tiles`
        mbarrier.init(used.index(j), count=1)
        mbarrier.init(row_max_ready.index(j), count=1)
    for j in gl.static_range(2):
        mbarrier.init(has_weights.index(j), count=1)
        mbarrier.init(weights_consumed.index(j), count=1)
        mbarrier.init(has_queries.index(j), count=1)
    fence_async_shared()
    barrier()
    shared = _Shared(
        kv_c,
        k_pe,
        queries,
        weights_shared,
        row_stats,
        loaded,
        used,
        row_max_ready,
        has_weights,
        weights_consumed,
        has_queries,
    )
    if FP8:
        gl.warp_specialize(
            [
                (load_tiles, (call, S, place, shared)),
                (_attend, (call, S, place, shared, 0)),
                (_attend, (call, S, place, shared, 1)),
            ],
            [4, 4],
            [208, 208],
        )
    else:
        gl.warp_specialize(
            [
                (_load, ((kv_boxes, pe_boxes), call, S, place, shared)),
                (_attend, (call, S, place, shared, 0)),
                (_attend, (call, S, place, shared, 1)),
            ],
            [4, 4],
            [224, 224],  # registers per thread: the remaining 56 suffice for loading
        )
