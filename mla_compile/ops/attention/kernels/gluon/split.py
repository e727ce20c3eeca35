"""The division of a decode call's work among multiprocessors, planned on the device, and the join of its parts.

A unit is a row of the batch and a block of its queries (query tokens times heads); its keys are tiles of 64. One
program runs on each multiprocessor. Every program reads all rows' lengths and cuts the units into pieces (`plan`):
whole units or equal parts of them, so that a program has one piece and few pieces are partial. If lengths differ so
much that it is faster, the tiles of all units are divided evenly instead. The grid does not depend on lengths and can
be captured. But unlike in `decode.py`, a row's bits depend on the other rows' lengths.

FIXED, for batch-invariant decode: the ends of a program's part are rounded to the nearest splits of
`attention/kernels/fixed_splits.py`, and each split is a piece of its own. So the plan decides which program computes a
split, and changes no bit.

The first blocks of all rows precede all second ones. So programs that share a row's keys read them at about the same
time, once from memory and otherwise from the L2 cache.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_compile.ops.attention.kernels.fixed_splits import first_key_of, splits_of
from mla_compile.ops.attention.tiles import SPLIT_UNIT
from mla_compile.ops.dependent_launch import wait_for_kernel_before

RANK = gl.constexpr(512)
ROPE = gl.constexpr(64)
TILE = gl.constexpr(64)
"""The keys of a matrix instruction."""
_UNIT = gl.constexpr(SPLIT_UNIT)


class Inputs(NamedTuple):
    """The inputs of a kernel."""

    q_latent: Any  # [rows * q_len, heads, RANK], any strides but the last
    q_pe: Any  # [rows * q_len, heads, ROPE], any strides but the last
    kv_cache: Any  # [pages, page_size, RANK + ROPE]
    block_table: Any  # int32 [rows, columns]
    seq_lens: Any  # int32 [rows]
    q_lens: Any  # int32 [rows]; None: all are q_len
    softmax_scale: Any
    q_token_stride: Any
    q_head_stride: Any
    pe_token_stride: Any
    pe_head_stride: Any
    table_stride: Any


class Results(NamedTuple):
    """The outputs of a kernel. R is `q_len * heads`, the queries of a row; `unit_rows` are those of a unit."""

    out: Any  # [rows * R, RANK], contiguous
    lse: Any  # float32 [rows * R]
    part_out: Any  # float32 [2 * programs, unit_rows, RANK]; if FIXED [splits, rows * R, RANK]
    part_lse: Any  # float32 [2 * programs, unit_rows]; if FIXED [splits, rows * R]
    pieces: Any  # int32 [units, 2], for `join_kernel`: the program of a unit's first piece, and the number of pieces


class Call(NamedTuple):
    """The arguments that all functions of a kernel share."""

    inputs: Any
    results: Any
    rows: Any
    most_keys: Any


class Sizes(NamedTuple):
    """The constants that a kernel is compiled for."""

    FIXED: bool  # over the splits of `attention/kernels/fixed_splits.py`
    Q_LEN: int
    HEADS: int
    PAGE_SIZE: int
    Q_BLOCKS: int  # units of a row of the batch
    UNITS_BLOCK: int  # all units, rounded up to a power of two
    BOX: int  # keys of a bulk copy, always adjacent in a page: 8 to 64; 0 if pages do not have 8


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _length(call, row, live):
    """Keys of a row, 0 for an inactive one; may exceed the capacity of its table."""
    length = gl.load(call.inputs.seq_lens + row, mask=live, other=0)
    if call.inputs.q_lens is not None:
        length = gl.where(gl.load(call.inputs.q_lens + row, mask=live, other=0) > 0, length, 0)
    return length


@gluon.jit
def _span(length, piece):
    """The tiles of a unit, rounded up to whole pieces."""
    tiles = (length + (TILE - 1)) // TILE
    return (tiles + piece - 1) // piece * piece


@gluon.jit
def plan(call, S: gl.constexpr, WARPS: gl.constexpr):
    """This program's part of the sequence of all units' tiles, with each unit rounded up to whole pieces.

    Returns `unit, begin, at, end, piece`: the part is from tile `at` to tile `end`; it begins in `unit`, whose first
    tile is `begin`. Each unit's span is a multiple of `piece` tiles.
    """
    # Every warp holds all units, so that sums over them cross no warps. More than 256 would spill and are divided.
    SHARE: gl.constexpr = 32 if S.UNITS_BLOCK <= 256 else 32 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([S.UNITS_BLOCK // SHARE], [32], [WARPS], [0])
    index = gl.arange(0, S.UNITS_BLOCK, layout=layout)
    length = _length(call, index % call.rows, index < call.rows * S.Q_BLOCKS)
    length = gl.minimum(length, call.most_keys)
    tiles = (length + (TILE - 1)) // TILE
    programs = gl.num_programs(0)
    longest = gl.max(tiles, 0)
    units = gl.sum((tiles > 0).to(gl.int32), 0)
    even = gl.maximum((gl.sum(tiles, 0) + programs - 1) // programs, 1)
    rounds = gl.maximum(
        (units + programs - 1) // programs, 1
    )  # with more units than programs: several whole ones each
    pieces_each = gl.maximum(programs // gl.maximum(units, 1), 1)
    # The longest unit is cut into as many equal pieces as each unit may have: one piece per program for any lengths.
    piece = gl.maximum((longest + pieces_each - 1) // pieces_each, (even + rounds - 1) // rounds)
    if rounds == 1:
        spare = piece - even
        for i in gl.static_range(4):  # shorter pieces, if short units leave programs free
            shorter = even + spare * (3 - i) // 4
            used = gl.sum((tiles + shorter - 1) // shorter, 0)
            piece = gl.where(used <= programs, gl.minimum(piece, shorter), piece)
    # A few more tiles cost less than two partial results per program.
    cut = piece * rounds > even + even // 8 + 4
    share = gl.where(cut, even, piece * rounds)
    piece = gl.where(cut, 1, piece)

    spans = _span(length, piece)
    ends = gl.associative_scan(spans, 0, _add)
    begins = ends - spans
    program = gl.program_id(0)
    if program == 0:
        count = gl.where(tiles > 0, (begins + tiles - 1) // share - begins // share + 1, 0)
        pieces = call.results.pieces + 2 * index
        gl.store(pieces, begins // share, mask=index < call.rows * S.Q_BLOCKS)
        gl.store(pieces + 1, count, mask=index < call.rows * S.Q_BLOCKS)
    at = program * share
    end = gl.minimum(at + share, gl.max(ends, 0))
    unit = gl.sum((ends <= at).to(gl.int32), 0)
    begin = gl.max(gl.where(ends <= at, ends, 0), 0)
    return unit, begin, at, end, piece


@gluon.jit
def _split_at(tile):
    """The split that contains a tile, and the first tiles of this split and of the next one."""
    split = splits_of(tile * TILE + 1, _UNIT) - 1
    return split, first_key_of(split, _UNIT) // TILE, first_key_of(split + 1, _UNIT) // TILE


@gluon.jit
def _nearest_split(tile):
    """The first tile of the split that begins nearest."""
    _, before, after = _split_at(tile)
    return gl.where(tile - before < after - tile, before, after)


@gluon.jit
def piece_of(call, S: gl.constexpr, unit, begin, at, end, piece):
    """The program's next piece, and the position after it.

    Returns `row, block, length, stored, first, last, tiles, split, next_unit, next_begin, next_at`. `stored` of the
    row's `length` keys are in its pages. The piece has the tiles from `first` to `last` of the unit's `tiles`; if FIXED
    these are `split`, or none. The program continues at tile `next_at`, in `next_unit`.
    """
    row = unit % call.rows
    length = _length(call, row, True)
    stored = gl.minimum(length, call.most_keys)
    tiles = (stored + (TILE - 1)) // TILE
    next_unit = unit + 1
    next_begin = begin + _span(stored, piece)
    next_at = gl.minimum(end, next_begin)
    first = at - begin
    last = gl.minimum(next_at - begin, tiles)
    split = 0
    if S.FIXED:
        stop = gl.where(last < tiles, gl.minimum(_nearest_split(last), tiles), tiles)
        first = gl.minimum(_nearest_split(first), tiles)
        split, _, after = _split_at(first)
        last = gl.minimum(after, stop)
        goes_on = last < stop
        next_unit = gl.where(goes_on, unit, next_unit)
        next_begin = gl.where(goes_on, begin, next_begin)
        next_at = gl.where(goes_on, begin + last, next_at)
    return row, unit // call.rows, length, stored, first, last, tiles, split, next_unit, next_begin, next_at


@triton.jit
def slot_of(program, starts_unit):
    """The index of a partial result. A program has at most two: its first piece, and its last if that starts a unit."""
    return (2 * program + starts_unit).to(tl.int64)


@gluon.jit
def query_offsets(call, S: gl.constexpr, row, r):
    """The offsets of a row's queries in `q_latent` and in `q_pe`."""
    token = (row * S.Q_LEN + r // S.HEADS).to(gl.int64)
    q_at = token * call.inputs.q_token_stride + r % S.HEADS * call.inputs.q_head_stride
    return q_at, token * call.inputs.pe_token_stride + r % S.HEADS * call.inputs.pe_head_stride


@gluon.jit
def bounds_of(call, S: gl.constexpr, row, r, length, stored):
    """`visible_keys` for each query; 0 for queries that only fill the block."""
    valid = S.Q_LEN
    if call.inputs.q_lens is not None:
        valid = gl.load(call.inputs.q_lens + row)
    bounds = gl.minimum(length - (valid - 1 - r // S.HEADS), stored)
    return gl.where((r // S.HEADS < valid) & (r < S.Q_LEN * S.HEADS), bounds, 0)


@gluon.jit
def store_piece(
    call,
    S: gl.constexpr,
    piece,  # row, split, first, last and tiles of `piece_of`
    first_r,
    acc,
    r,  # the queries of acc, relative to first_r, and its columns
    c,
    log_sum,
    s_r,  # the queries of log_sum
    WITH_LSE: gl.constexpr,
    BLOCK_R: gl.constexpr,
):
    """Write a whole unit to `out` and `lse`, other pieces to `part_out` and `part_lse`; FIXED: a split to its place."""
    row, split, first, last, tiles = piece
    results = call.results
    R: gl.constexpr = S.Q_LEN * S.HEADS
    live, s_live = first_r + r < R, first_r + s_r < R
    if S.FIXED:
        target = (split * call.rows + row).to(gl.int64) * R + first_r
        gl.store(results.part_out + (target + r) * RANK + c, acc, mask=live & (first < last))
        if WITH_LSE:
            gl.store(results.part_lse + target + s_r, log_sum, mask=s_live & (first < last))
    elif (first == 0) & (last == tiles):
        target = row.to(gl.int64) * R + first_r
        gl.store(results.out + (target + r) * RANK + c, acc.to(gl.bfloat16), mask=live)
        if WITH_LSE:
            gl.store(results.lse + target + s_r, log_sum, mask=s_live)
    else:
        target = slot_of(gl.program_id(0), first == 0) * BLOCK_R
        gl.store(results.part_out + (target + r) * RANK + c, acc, mask=live)
        if WITH_LSE:
            gl.store(results.part_lse + target + s_r, log_sum)


@triton.jit
def join_kernel(
    part_out,  # float32 [2 * programs, BLOCK_R, RANK]
    part_lse,  # float32 [2 * programs, BLOCK_R]
    pieces,
    out,  # [rows * R, RANK]
    lse,  # float32 [rows * R]
    rows,
    R: tl.constexpr,  # queries of a row of the batch
    BLOCK_R: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Sum the pieces of a unit, BLOCK_C of its columns, BLOCK_P pieces at a time; the last axis divides its queries.

    A unit of one piece is complete already; one without keys gets 0 and -inf. Grid `[units, RANK / BLOCK_C, any]`.
    """
    unit = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    wait_for_kernel_before(True)
    first = tl.load(pieces + 2 * unit)
    count = tl.load(pieces + 2 * unit + 1)
    if count != 1:
        first_r = unit // rows * BLOCK_R
        target = (unit % rows).to(tl.int64) * R + first_r
        for r in range(tl.program_id(2), min(BLOCK_R, R - first_r), tl.num_programs(2)):
            top = -float("inf")
            total = 0.0
            acc = tl.zeros([BLOCK_C], tl.float32)
            for start in range(0, count, BLOCK_P):
                p = start + tl.arange(0, BLOCK_P)
                place = slot_of(first + p, p == 0) * BLOCK_R + r
                logs = tl.load(part_lse + place, mask=p < count, other=-float("inf"))
                parts = part_out + place[:, None] * RANK + c[None, :]
                part = tl.load(parts, mask=(p < count)[:, None], other=0.0)
                new_top = tl.maximum(top, tl.max(logs, 0))
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
                weights = tl.exp(logs - base)
                decay = tl.exp(top - base)
                total = total * decay + tl.sum(weights, 0)
                acc = acc * decay + tl.sum(part * weights[:, None], 0)
                top = new_top
            filled = tl.where(total == 0.0, 1.0, total)
            tl.store(out + (target + r) * RANK + c, (acc / filled).to(out.dtype.element_ty))
            if tl.program_id(1) == 0:
                tl.store(lse + target + r, top + tl.log(total))
