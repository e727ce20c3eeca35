"""Loads FP8 latents for the Hopper decode kernels: the loading warps convert them, and write tiles in bfloat16.

Two groups of four warps load. Each converts values in registers, and requests its next ones right after that: all waits
of a thread are for all of its loads, so a request before would be waited for. Eight threads convert 16 bytes of eight
keys each, so that their stores meet in no bank.

Values are words of four: the compiler would keep single bytes in a register each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from mla_compile import latents
from mla_compile.ops.attention.kernels.gluon.split import RANK, ROPE, TILE, piece_of
from mla_compile.ops.gluon import barrier

HALF_WORDS = gl.constexpr(RANK.value // 8)
"""Words of half of a token's values."""
_WIDTH = gl.constexpr(latents.fp8_width(RANK.value, ROPE.value))
_WORDS = gl.constexpr(latents.BLOCK // 4)
_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        [[8, 0], [16, 0]],
        [],
        [TILE.value, latents.BLOCK // 4],
    )
)
_PE_LAYOUT = gl.constexpr(  # the same keys
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [32, 0]],
        [[1, 0], [2, 0], [4, 0], [0, 8], [0, 16]],
        [[8, 0], [16, 0]],
        [],
        [TILE.value, ROPE.value],
    )
)
_COPY_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
_KEYS = gl.constexpr(gl.SliceLayout(1, _LAYOUT.value))
_KEYS_TO_COPY = gl.constexpr(gl.SliceLayout(1, _COPY_LAYOUT.value))


@gluon.jit
def _pages(S: gl.constexpr, table, tile, stop, layout: gl.constexpr):
    """The pages of a tile's keys; table entries from the key `stop` on are not read."""
    key = tile * TILE + gl.arange(0, TILE, layout=layout)
    return gl.load(table + key // S.PAGE_SIZE, mask=key < stop, other=0)


@gluon.jit
def _slots(S: gl.constexpr, pages, tile, stop, layout: gl.constexpr):
    """The slots of a tile's keys, int32; -1 from the key `stop` on."""
    key = tile * TILE + gl.arange(0, TILE, layout=layout)
    return gl.where(key < stop, pages * S.PAGE_SIZE + key % S.PAGE_SIZE, -1)


@gluon.jit
def _words_of(kv_cache, slot, OFFSET: gl.constexpr):
    """Pointers to a word of each token, at a place in bytes."""
    return (kv_cache + slot.to(gl.int64) * _WIDTH + OFFSET).to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _scales(kv_cache, slot, B: gl.constexpr):
    """The scales of a block of columns, as bits; zeros for a slot of -1."""
    return gl.load(_words_of(kv_cache, slot, RANK + 4 * B), mask=slot >= 0, other=0)


@gluon.jit
def _request(kv_cache, slot, B: gl.constexpr):
    """Request a block of columns, and its scales; zeros for a slot of -1."""
    c = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, _LAYOUT))
    words = _words_of(kv_cache, slot, 4 * _WORDS * B)[:, None] + c[None, :]
    return gl.load(words, mask=(slot >= 0)[:, None], other=0), _scales(kv_cache, slot, B)


@gluon.jit
def _copy_values(kv_cache, slot, raw, H: gl.constexpr):
    """Copy half H of the tokens' values as they are; zeros for a slot of -1."""
    c = gl.arange(0, HALF_WORDS, layout=gl.SliceLayout(0, _COPY_LAYOUT))
    words = _words_of(kv_cache, slot, 4 * HALF_WORDS * H)[:, None] + c[None, :]
    async_copy.async_copy_global_to_shared(raw, words, mask=(slot >= 0)[:, None])


@gluon.jit
def _copy_rope(kv_cache, slot, k_pe):
    """Copy the tokens' rotary keys; zeros for a slot of -1."""
    p = gl.arange(0, ROPE, layout=gl.SliceLayout(0, _PE_LAYOUT))
    slot = gl.convert_layout(slot, gl.SliceLayout(1, _PE_LAYOUT), assert_trivial=True)
    keys = kv_cache + slot.to(gl.int64) * _WIDTH + (_WIDTH - 2 * ROPE)
    keys = keys.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    async_copy.async_copy_global_to_shared(k_pe, keys[:, None] + p[None, :], mask=(slot >= 0)[:, None])


@gluon.jit
def _convert(values, scales, tile, B: gl.constexpr):
    """Convert a block of columns into its place in shared memory, `tile`, of words of two values."""
    scales = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x3232;", "=r,r", [scales], dtype=gl.int32, is_pure=True, pack=1
    )  # twice in bfloat16, which holds a power of two and NaN
    first, second = gl.inline_asm_elementwise(
        _CONVERT, "=r,=r,r,r", [values, scales[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    words = gl.join(first, second).reshape([TILE, 2 * _WORDS])
    tile.slice(2 * B * _WORDS, 2 * _WORDS, dim=1).store(words)


_CONVERT = gl.constexpr("""{
    .reg .b16 a, b, c, d;
    .reg .b32 low, high;
    .reg .f32 w, x, y, z;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 low, a;
    cvt.rn.f16x2.e4m3x2 high, b;
    mov.b32 {a, b}, low;
    mov.b32 {c, d}, high;
    cvt.f32.f16 w, a;
    cvt.f32.f16 x, b;
    cvt.f32.f16 y, c;
    cvt.f32.f16 z, d;
    cvt.rn.bf16x2.f32 low, x, w;
    cvt.rn.bf16x2.f32 high, z, y;
    mul.rn.bf16x2 $0, low, $3;
    mul.rn.bf16x2 $1, high, $3;
}""")
"""Four values in e4m3, and their scale twice in bfloat16, to two words of two in bfloat16. All steps are exact."""


@gluon.jit
def load_half(call, S: gl.constexpr, place, shared, STAGES: gl.constexpr, H: gl.constexpr):
    """Half H of the columns of every tile, for `narrow_fp8.py`; with half 1 the rotary keys.

    A tile is copied into `raw` while that before is converted: more is in flight than registers would hold.
    """
    unit, begin, at, end, piece = place
    inputs, kv_cache = call.inputs, call.inputs.kv_cache
    words = shared.kv_c._reinterpret(gl.int32, [STAGES, TILE, RANK // 2], gl.NVMMASharedLayout(128, 32))
    raw = shared.raw.index(H)
    i = 0
    while at < end:
        row, _, _, stored, first, last, _, _, unit, begin, at = piece_of(call, S, unit, begin, at, end, piece)
        table = inputs.block_table + row.to(gl.int64) * inputs.table_stride
        stop = gl.minimum(stored, last * TILE)
        slot = _slots(S, _pages(S, table, first, stop, _KEYS), first, stop, _KEYS)
        to_copy = _slots(S, _pages(S, table, first, stop, _KEYS_TO_COPY), first, stop, _KEYS_TO_COPY)
        async_copy.wait_group(0)  # what the last piece has copied past its end
        barrier()
        if H == 1:
            _copy_rope(kv_cache, slot, shared.raw_pe)
        _copy_values(kv_cache, to_copy, raw, H)
        async_copy.commit_group()
        scales, next_scales = _scales(kv_cache, slot, 2 * H), _scales(kv_cache, slot, 2 * H + 1)
        pages = _pages(S, table, first + 1, stop, _KEYS)
        pages_to_copy = _pages(S, table, first + 1, stop, _KEYS_TO_COPY)
        for tile in range(first, last):
            stage = i % STAGES
            async_copy.wait_group(0)
            barrier()
            values = raw.slice(0, _WORDS, dim=1).load(_LAYOUT)
            next_values = raw.slice(_WORDS, _WORDS, dim=1).load(_LAYOUT)
            k_pe = shared.raw_pe.load(_PE_LAYOUT) if H == 1 else None
            barrier()
            slot = _slots(S, pages, tile + 1, stop, _KEYS)
            if H == 1:
                _copy_rope(kv_cache, slot, shared.raw_pe)
            _copy_values(kv_cache, _slots(S, pages_to_copy, tile + 1, stop, _KEYS_TO_COPY), raw, H)
            async_copy.commit_group()
            mbarrier.wait(shared.used.index(stage), ((i // STAGES) & 1) ^ 1)
            if H == 1:
                shared.k_pe.index(stage).store(k_pe)
            _convert(values, scales, words.index(stage), 2 * H)
            _convert(next_values, next_scales, words.index(stage), 2 * H + 1)
            fence_async_shared()
            barrier()
            mbarrier.arrive(shared.loaded.index(stage), count=1)
            scales, next_scales = _scales(kv_cache, slot, 2 * H), _scales(kv_cache, slot, 2 * H + 1)
            pages = _pages(S, table, tile + 2, stop, _KEYS)
            pages_to_copy = _pages(S, table, tile + 2, stop, _KEYS_TO_COPY)
            i += 1
    async_copy.wait_group(0)


@gluon.jit
def load_tiles(call, S: gl.constexpr, place, shared):
    """All tiles, for `wide.py`, in the order in which the buffers of their halves become free.

    A half is loaded once all threads have copied, and one has arrived. Shared memory is full, so registers hold what is
    in flight.
    """
    unit, begin, at, end, piece = place
    inputs, kv_cache = call.inputs, call.inputs.kv_cache
    words = shared.kv_c._reinterpret(gl.int32, [2, TILE, RANK // 2], gl.NVMMASharedLayout(128, 32))
    i = 0
    while at < end:
        row, _, _, stored, first, last, _, _, unit, begin, at = piece_of(call, S, unit, begin, at, end, piece)
        table = inputs.block_table + row.to(gl.int64) * inputs.table_stride
        stop = gl.minimum(stored, last * TILE)
        slot_0 = _slots(S, _pages(S, table, first, stop, _KEYS), first, stop, _KEYS)
        slot_1 = _slots(S, _pages(S, table, first + 1, stop, _KEYS), first + 1, stop, _KEYS)
        values, scales = _request(kv_cache, slot_0, 0)
        next_values, next_scales = _request(kv_cache, slot_0, 1)
        for tile in range(first, last, 2):
            pages_0 = _pages(S, table, tile + 2, stop, _KEYS)
            pages_1 = _pages(S, table, tile + 3, stop, _KEYS)
            for h in gl.static_range(2):
                for w in gl.static_range(2):
                    loaded = shared.loaded.index(2 * w + (w ^ h))
                    mbarrier.wait(shared.used.index(2 * w + (w ^ h)), (i & 1) ^ 1)
                    if h == 1:  # this half stays in use longer
                        slot = slot_0 if w == 0 else slot_1
                        _copy_rope(kv_cache, slot, shared.k_pe.index(w))
                    async_copy.mbarrier_arrive(loaded, increment_count=False)
                    _convert(values, scales, words.index(w), 2 * (w ^ h))
                    _convert(next_values, next_scales, words.index(w), 2 * (w ^ h) + 1)
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(loaded, count=1)
                    if w == 1 and h == 1:
                        slot_0 = _slots(S, pages_0, tile + 2, stop, _KEYS)
                        slot_1 = _slots(S, pages_1, tile + 3, stop, _KEYS)
                    # the halves in their order: of tiles 0, 1, 0, 1 those 0, 1, 1, 0
                    slot = slot_1 if w == 0 else slot_0
                    values, scales = _request(kv_cache, slot, 2 * (1 ^ h))
                    next_values, next_scales = _request(kv_cache, slot, 2 * (1 ^ h) + 1)
            i += 1
