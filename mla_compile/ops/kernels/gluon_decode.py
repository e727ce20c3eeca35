"""Decode for Hopper in bf16, kv_lora_rank 512, rope 64: warps that load beside warps that compute, a planned split.

A unit is a row and a block of up to 64 of its query rows (query tokens times heads); its keys are tiles of 64. One
program runs on each multiprocessor. Where to cut units into pieces for them follows from all rows' lengths, which every
program reads on the device (`_plan`): whole units or equal parts of them, so that a program has one piece and few
pieces are partial, unless lengths differ so much that an even cut through all tiles is quicker. So the grid can be
captured, but unlike `decode.py`'s a row's bits depend on the other rows' lengths. A second kernel joins units that were
cut; it starts while the first one ends (programmatic dependent launch).

Four warps gather tiles through the block table with `cp.async`, two ahead, any page size; zeros past a row's end. The
others compute, as in `decode.py` with keys as the rows of both products: `S^T = K Q^T` and `O^T += K_c^T P^T`, so 16
query rows cost a quarter of what 64 cost.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
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

from mla_compile.ops.kernels.decode import LN_2, LOG2_E
from mla_compile.ops.kernels.plan import device_of, power_of_two

RANK = gl.constexpr(512)
ROPE = gl.constexpr(64)
TILE = gl.constexpr(64)
"""Keys that a matrix instruction takes."""
STAGES = gl.constexpr(2)
"""Tiles of 72 KB in shared memory."""

_MOST_ROWS = 64
"""Query rows of a unit: what two warpgroups hold of the output, `[RANK, 64]` in float32, in registers."""

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name from Triton 3.7 on, and before


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _length(seq_lens, q_lens, row, live, most_keys, HAS_Q_LENS: gl.constexpr):
    """Keys of a row, 0 for an inactive one."""
    length = gl.minimum(gl.load(seq_lens + row, mask=live, other=0), most_keys)
    if HAS_Q_LENS:
        length = gl.where(gl.load(q_lens + row, mask=live, other=0) > 0, length, 0)
    return length


@gluon.jit
def _plan(
    seq_lens,
    q_lens,
    rows,
    most_keys,
    HAS_Q_LENS: gl.constexpr,
    Q_BLOCKS: gl.constexpr,
    UNITS_BLOCK: gl.constexpr,
    layout: gl.constexpr,
):
    """How units are cut: tiles of each, where each ends on a line of all tiles, tiles of a program and of a piece.

    On the line a unit takes a multiple of `piece` tiles; program p has those from `p * share` to `(p + 1) * share`.
    """
    row = gl.arange(0, UNITS_BLOCK, layout=layout) // Q_BLOCKS
    length = _length(seq_lens, q_lens, row, row < rows, most_keys, HAS_Q_LENS)
    tiles = (length + (TILE - 1)) // TILE
    programs = gl.num_programs(0)
    longest = gl.max(tiles, 0)
    units = gl.sum((tiles > 0).to(gl.int32), 0)
    even = gl.maximum((gl.sum(tiles, 0) + programs - 1) // programs, 1)
    pieces_each = gl.maximum(programs // gl.maximum(units, 1), 1)
    # As many equal pieces of the longest unit as each unit may have: one piece a program, whatever the lengths.
    piece = gl.maximum((longest + pieces_each - 1) // pieces_each, even)
    rounds = (units + programs - 1) // programs  # more units than programs: several whole ones each
    if rounds <= 1:
        rounds = 1
        spare = piece - even
        for i in gl.static_range(4):  # shorter pieces, where short units leave programs free
            shorter = even + spare * (3 - i) // 4
            used = gl.sum((tiles + shorter - 1) // shorter, 0)
            piece = gl.where(used <= programs, gl.minimum(piece, shorter), piece)
    # A few tiles more are quicker than two partial results a program.
    cut = piece * rounds > even + even // 8 + 4
    share = gl.where(cut, even, piece * rounds)
    piece = gl.where(cut, 1, piece)
    ends = gl.associative_scan((tiles + piece - 1) // piece * piece, 0, _add)
    return tiles, ends, share, piece


@gluon.jit
def _load(
    kv_cache,
    block_table,
    seq_lens,
    q_lens,
    table_stride,
    most_keys,
    unit,
    begin,
    at,
    end,
    piece,
    kv_c,
    k_pe,
    loaded,
    used,
    HAS_Q_LENS: gl.constexpr,
    Q_BLOCKS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Bring the program's tiles to shared memory; `unit` begins at `begin` on the line, the program at `at`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, RANK, layout=gl.SliceLayout(0, layout))
    p = gl.arange(0, ROPE, layout=gl.SliceLayout(0, layout))
    i = 0
    while at < end:
        row = unit // Q_BLOCKS
        length = _length(seq_lens, q_lens, row, True, most_keys, HAS_Q_LENS)
        tiles = (length + (TILE - 1)) // TILE
        next_begin = begin + (tiles + piece - 1) // piece * piece
        stop = gl.minimum(end, next_begin)
        table = block_table + row.to(gl.int64) * table_stride
        for tile in range(at - begin, gl.minimum(stop - begin, tiles)):
            key = tile * TILE + k
            live = key < length
            page = gl.load(table + key // PAGE_SIZE, mask=live, other=0).to(gl.int64)
            latent = kv_cache + (page * PAGE_SIZE + key % PAGE_SIZE) * (RANK + ROPE)
            stage = i % STAGES
            mbarrier.wait(used.index(stage), ((i // STAGES) & 1) ^ 1)
            # Zeros past the end, not only masked scores: 0 x NaN is NaN.
            async_copy.async_copy_global_to_shared(
                kv_c.index(stage), latent[:, None] + c[None, :], mask=live[:, None]
            )
            async_copy.async_copy_global_to_shared(
                k_pe.index(stage), (latent + RANK)[:, None] + p[None, :], mask=live[:, None]
            )
            async_copy.mbarrier_arrive(loaded.index(stage), increment_count=False)
            i += 1
        at = stop
        begin = next_begin
        unit += 1


@gluon.jit
def _attend(
    q_latent,
    q_pe,
    seq_lens,
    q_lens,
    out,
    lse,
    part_out,
    part_lse,
    softmax_scale,
    q_token_stride,
    q_head_stride,
    pe_token_stride,
    pe_head_stride,
    most_keys,
    unit,
    begin,
    at,
    end,
    piece,
    kv_c,
    k_pe,
    queries,
    queries_pe,
    weights_shared,
    loaded,
    used,
    HAS_Q_LENS: gl.constexpr,
    Q_LEN: gl.constexpr,
    HEADS: gl.constexpr,
    Q_BLOCKS: gl.constexpr,
    BLOCK_R: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Attention of the program's pieces: to `out` and `lse` where a piece is its whole unit, else to its two parts."""
    R: gl.constexpr = Q_LEN * HEADS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, BLOCK_R * 4 // WARPS, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_R, 16])
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    c = gl.arange(0, RANK, layout=gl.SliceLayout(0, q_layout))
    p = gl.arange(0, ROPE, layout=gl.SliceLayout(0, q_layout))
    k = gl.arange(0, TILE, layout=gl.SliceLayout(1, s_layout))
    o_c = gl.arange(0, RANK, layout=gl.SliceLayout(1, o_layout))
    scale = softmax_scale * LOG2_E
    i = 0
    while at < end:
        row = unit // Q_BLOCKS
        first_r = unit % Q_BLOCKS * BLOCK_R
        length = _length(seq_lens, q_lens, row, True, most_keys, HAS_Q_LENS)
        valid = Q_LEN
        if HAS_Q_LENS:
            valid = gl.load(q_lens + row)
        tiles = (length + (TILE - 1)) // TILE
        next_begin = begin + (tiles + piece - 1) // piece * piece
        stop = gl.minimum(end, next_begin)
        first = at - begin
        last = gl.minimum(stop - begin, tiles)

        r = first_r + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, q_layout))
        token = (row * Q_LEN + r // HEADS).to(gl.int64)
        q_at = token * q_token_stride + r % HEADS * q_head_stride
        pe_at = token * pe_token_stride + r % HEADS * pe_head_stride
        inside = (r < R)[:, None]
        queries.store(gl.load(q_latent + q_at[:, None] + c[None, :], mask=inside, other=0.0))
        queries_pe.store(gl.load(q_pe + pe_at[:, None] + p[None, :], mask=inside, other=0.0))
        fence_async_shared()
        _barrier()

        r = first_r + gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, s_layout))
        # `visible_keys`, for each query row; none for the rows that only fill the block.
        bounds = gl.where((r // HEADS < valid) & (r < R), length - (valid - 1 - r // HEADS), 0)
        top = gl.full([BLOCK_R], -float("inf"), gl.float32, gl.SliceLayout(0, s_layout))
        # A sum for each thread's keys: only the highest score must cross warps in every tile.
        total = gl.zeros([TILE, BLOCK_R], gl.float32, s_layout)
        acc = gl.zeros([RANK, BLOCK_R], gl.float32, o_layout)
        for tile in range(first, last):
            stage = i % STAGES
            mbarrier.wait(loaded.index(stage), (i // STAGES) & 1)
            fence_async_shared()
            latents = kv_c.index(stage)
            scores = gl.zeros([TILE, BLOCK_R], gl.float32, s_layout)
            scores = warpgroup_mma(latents, queries.permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(k_pe.index(stage), queries_pe.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            seen = (tile * TILE + k)[:, None] < bounds[None, :]
            scores = gl.where(seen, scores * scale, -float("inf"))
            new_top = gl.maximum(top, gl.max(scores, 0))
            base = gl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
            weights = gl.exp2(scores - base[None, :])
            decay = gl.exp2(top - base)
            total = total * decay[None, :] + weights
            top = new_top
            weights_shared.store(weights.to(gl.bfloat16))
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(0, o_layout))[None, :]
            fence_async_shared()
            _barrier()
            acc = warpgroup_mma(latents.permute((1, 0)), weights_shared, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()
            mbarrier.arrive(used.index(stage), count=1)
            i += 1

        sums = gl.sum(total, 0)
        filled = gl.where(sums == 0.0, 1.0, sums)
        log_sum = (top + gl.log2(sums)) * LN_2
        acc = acc * gl.convert_layout(1.0 / filled, gl.SliceLayout(0, o_layout))[None, :]
        o_r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, o_layout))
        s_r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, s_layout))
        if (first == 0) & (last == tiles):
            target = row.to(gl.int64) * R + first_r
            live = first_r + o_r < R
            at_out = out + ((target + o_r) * RANK)[None, :] + o_c[:, None]
            gl.store(at_out, acc.to(gl.bfloat16), mask=live[None, :])
            gl.store(lse + target + s_r, log_sum, mask=r < R)
        else:
            slot = _slot(gl.program_id(0), first == 0)
            gl.store(part_out + slot * (RANK * BLOCK_R) + (o_c * BLOCK_R)[:, None] + o_r[None, :], acc)
            gl.store(part_lse + slot * BLOCK_R + s_r, log_sum)
        at = stop
        begin = next_begin
        unit += 1


@triton.jit
def _slot(program, starts_unit):
    """Where a partial result is: of a program at most its first piece does not start a unit, its last not end one."""
    return (2 * program + starts_unit).to(tl.int64)


@gluon.jit(do_not_specialize=["rows", "most_keys"])
def decode_kernel(
    q_latent,  # [rows * Q_LEN, HEADS, RANK], any strides but the last
    q_pe,  # [rows * Q_LEN, HEADS, ROPE], likewise
    kv_cache,  # [pages, PAGE_SIZE, RANK + ROPE]
    block_table,  # int32 [rows, columns]
    seq_lens,  # int32 [rows]
    q_lens,  # int32 [rows], unread unless HAS_Q_LENS
    out,  # [rows * R, RANK], contiguous
    lse,  # float32 [rows * R]
    part_out,  # float32 [2 * programs, RANK, BLOCK_R]
    part_lse,  # float32 [2 * programs, BLOCK_R]
    pieces,  # int32 [units, 2]: the program that has a unit's first piece, and the number of pieces
    softmax_scale,
    rows,
    most_keys,
    q_token_stride,
    q_head_stride,
    pe_token_stride,
    pe_head_stride,
    table_stride,
    HAS_Q_LENS: gl.constexpr,
    Q_LEN: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_R: gl.constexpr,
    Q_BLOCKS: gl.constexpr,
    UNITS_BLOCK: gl.constexpr,  # units rounded up to a power of two
    num_warps: gl.constexpr,  # that compute
):
    """Attention of every unit, or of its pieces; one program a multiprocessor."""
    program = gl.program_id(0)
    # Every warp holds all units: sums over them then cross no warps.
    layout: gl.constexpr = gl.BlockedLayout([UNITS_BLOCK // 32], [32], [num_warps], [0])
    tiles, ends, share, piece = _plan(
        seq_lens, q_lens, rows, most_keys, HAS_Q_LENS, Q_BLOCKS, UNITS_BLOCK, layout
    )
    if program == 0:
        unit = gl.arange(0, UNITS_BLOCK, layout=layout)
        begins = ends - (tiles + piece - 1) // piece * piece
        count = gl.where(tiles > 0, (begins + tiles - 1) // share - begins // share + 1, 0)
        gl.store(pieces + 2 * unit, begins // share, mask=unit < rows * Q_BLOCKS)
        gl.store(pieces + 2 * unit + 1, count, mask=unit < rows * Q_BLOCKS)
    at = program * share
    end = gl.minimum(at + share, gl.max(ends, 0))
    unit = gl.sum((ends <= at).to(gl.int32), 0)
    begin = gl.max(gl.where(ends <= at, ends, 0), 0)

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
    _barrier()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_latent,
                    q_pe,
                    seq_lens,
                    q_lens,
                    out,
                    lse,
                    part_out,
                    part_lse,
                    softmax_scale,
                    q_token_stride,
                    q_head_stride,
                    pe_token_stride,
                    pe_head_stride,
                    most_keys,
                    unit,
                    begin,
                    at,
                    end,
                    piece,
                    kv_c,
                    k_pe,
                    queries,
                    queries_pe,
                    weights_shared,
                    loaded,
                    used,
                    HAS_Q_LENS,
                    Q_LEN,
                    HEADS,
                    Q_BLOCKS,
                    BLOCK_R,
                    num_warps,
                ),
            ),
            (
                _load,
                (
                    kv_cache,
                    block_table,
                    seq_lens,
                    q_lens,
                    table_stride,
                    most_keys,
                    unit,
                    begin,
                    at,
                    end,
                    piece,
                    kv_c,
                    k_pe,
                    loaded,
                    used,
                    HAS_Q_LENS,
                    Q_BLOCKS,
                    PAGE_SIZE,
                ),
            ),
        ],
        [4],
        [64],
    )


@triton.jit
def join_kernel(
    part_out,
    part_lse,
    pieces,
    out,
    lse,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Sum the pieces of a unit, BLOCK_E of its `RANK * BLOCK_R` elements, BLOCK_P pieces at a time.

    Nothing to do for a unit of one piece; 0 and -inf for one without keys. Grid `[units, RANK * BLOCK_R / BLOCK_E]`.
    """
    unit = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    r = e % BLOCK_R
    gdc_wait()  # for the kernel before
    first = tl.load(pieces + 2 * unit)
    count = tl.load(pieces + 2 * unit + 1)
    if count != 1:
        top = tl.full([BLOCK_E], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_E], tl.float32)
        acc = tl.zeros([BLOCK_E], tl.float32)
        for start in range(0, count, BLOCK_P):
            p = start + tl.arange(0, BLOCK_P)
            slot = _slot(first + p, p == 0)[:, None]
            live = (p < count)[:, None]
            part = tl.load(part_out + slot * (RANK * BLOCK_R) + e[None, :], mask=live, other=0.0)
            logs = tl.load(part_lse + slot * BLOCK_R + r[None, :], mask=live, other=-float("inf"))
            new_top = tl.maximum(top, tl.max(logs, 0))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            weights = tl.exp(logs - base[None, :])
            decay = tl.exp(top - base)
            total = total * decay + tl.sum(weights, 0)
            acc = acc * decay + tl.sum(part * weights, 0)
            top = new_top
        filled = tl.where(total == 0.0, 1.0, total)
        target = (unit // Q_BLOCKS).to(tl.int64) * R + unit % Q_BLOCKS * BLOCK_R + r
        live_r = unit % Q_BLOCKS * BLOCK_R + r < R
        tl.store(out + target * RANK + e // BLOCK_R, (acc / filled).to(out.dtype.element_ty), mask=live_r)
        tl.store(lse + target, top + tl.log(total), mask=live_r & (e < BLOCK_R))


def decode_gluon(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """What `mla_decode` computes, with its arguments, on a Hopper GPU. Nothing is read on the host."""
    tokens, heads, _ = q_latent.shape
    rows, columns = block_table.shape
    page_size = kv_cache.shape[1]
    query_rows = q_len * heads
    q_latent, q_pe, block_table = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe, block_table)
    )
    block_r = min(_MOST_ROWS, power_of_two(query_rows))
    q_blocks = triton.cdiv(query_rows, block_r)
    units = rows * q_blocks
    programs = device_of(q_latent).multiprocessors

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((tokens, heads), dtype=torch.float32)
    part_out = lse.new_empty((2 * programs, RANK.value, block_r))
    part_lse = lse.new_empty((2 * programs, block_r))
    pieces = lse.new_empty((units, 2), dtype=torch.int32)
    with torch.cuda.device_of(q_latent):  # Triton launches on the current device
        decode_kernel[(programs,)](
            q_latent,
            q_pe,
            kv_cache,
            block_table,
            seq_lens.contiguous(),
            seq_lens if q_lens is None else q_lens.contiguous(),
            out,
            lse,
            part_out,
            part_lse,
            pieces,
            softmax_scale,
            rows,
            columns * page_size,
            *q_latent.stride()[:2],
            *q_pe.stride()[:2],
            block_table.stride(0),
            HAS_Q_LENS=q_lens is not None,
            Q_LEN=q_len,
            HEADS=heads,
            PAGE_SIZE=page_size,
            BLOCK_R=block_r,
            Q_BLOCKS=q_blocks,
            UNITS_BLOCK=max(32, triton.next_power_of_2(units)),
            num_warps=4 if block_r == 16 else 8,  # four would spill the wider outputs
        )
        # Few units are cut into many pieces each, many into few.
        elements, at_once = (512, 8) if units * block_r >= 128 else (64, 32)
        join_kernel[(units, RANK.value * block_r // elements)](
            part_out,
            part_lse,
            pieces,
            out,
            lse,
            R=query_rows,
            BLOCK_R=block_r,
            Q_BLOCKS=q_blocks,
            RANK=RANK.value,
            BLOCK_E=elements,
            BLOCK_P=at_once,
            num_warps=4,
            launch_pdl=True,
        )
    return out, lse
