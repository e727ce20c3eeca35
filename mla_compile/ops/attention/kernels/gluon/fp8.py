"""Loads FP8 latents for `narrow_kernel`: the loading warps convert them, and write tiles in bfloat16.

A thread reads 16 bytes at a time into registers, one tile ahead: a block of 128 columns of the next tile is requested
when that of this tile has been converted. Pages are read two tiles ahead. The rotary keys need no conversion, so
`cp.async` copies them.

Values are words of four: the compiler would keep single bytes in a register each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from mla_compile import latents
from mla_compile.ops.attention.kernels.gluon.split import RANK, ROPE, TILE, barrier, piece_of

LOADERS = gl.constexpr(8)
"""Warps that load."""
_BLOCK = gl.constexpr(latents.BLOCK)
_WIDTH = gl.constexpr(latents.fp8_width(RANK.value, ROPE.value))
_WORDS = gl.constexpr(latents.BLOCK // 4)
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [LOADERS.value, 1], [1, 0]))
_PE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [LOADERS.value, 1], [1, 0]))


@gluon.jit
def _slots(S: gl.constexpr, table, tile, stop):
    """The slots of a tile's keys, int32; -1 from the key `stop` on, where table entries are not read."""
    key = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, _LAYOUT))
    page = gl.load(table + key // S.PAGE_SIZE, mask=key < stop, other=0)
    return gl.where(key < stop, page * S.PAGE_SIZE + key % S.PAGE_SIZE, -1)


@gluon.jit
def _fetch(kv_cache, slot, B: gl.constexpr):
    """Request a block of columns, and its scales; zeros for a slot of -1."""
    live = slot >= 0
    token = kv_cache + slot.to(gl.int64) * _WIDTH
    c = B * _WORDS + gl.arange(0, _WORDS, layout=gl.SliceLayout(0, _LAYOUT))
    words = token.to(gl.pointer_type(gl.int32), bitcast=True)
    values = gl.load(words[:, None] + c[None, :], mask=live[:, None], other=0)
    scales = (token + RANK).to(gl.pointer_type(gl.float32), bitcast=True)
    return values, gl.load(scales + B, mask=live, other=0.0)


@gluon.jit
def _write(block, tile, B: gl.constexpr):
    """Convert a block of columns into its place in shared memory, `tile`, of words of two values."""
    values, scales = block
    first, second = gl.inline_asm_elementwise(
        _CONVERT, "=r,=r,r,f", [values, scales[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
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
    mul.f32 w, w, $3;
    mul.f32 x, x, $3;
    mul.f32 y, y, $3;
    mul.f32 z, z, $3;
    cvt.rn.bf16x2.f32 $0, x, w;
    cvt.rn.bf16x2.f32 $1, z, y;
}""")
"""Four values in e4m3, and their scale, to two words of two in bfloat16."""


@gluon.jit
def load_fp8(call, S: gl.constexpr, place, shared, STAGES: gl.constexpr):
    """`_load` of `narrow.py` for FP8 latents. A tile is loaded once all threads have copied, and one has arrived."""
    unit, begin, at, end, piece = place
    inputs, kv_cache = call.inputs, call.inputs.kv_cache
    p = gl.arange(0, ROPE, layout=gl.SliceLayout(0, _PE_LAYOUT))
    words = shared.kv_c._reinterpret(gl.int32, [STAGES, TILE, RANK // 2], gl.NVMMASharedLayout(128, 32))
    i = 0
    while at < end:
        row, _, _, stored, first, last, _, _, unit, begin, at = piece_of(call, S, unit, begin, at, end, piece)
        table = inputs.block_table + row.to(gl.int64) * inputs.table_stride
        stop = gl.minimum(stored, last * TILE)
        slot, next_slot = _slots(S, table, first, stop), _slots(S, table, first + 1, stop)
        block_0, block_1 = _fetch(kv_cache, slot, 0), _fetch(kv_cache, slot, 1)
        block_2, block_3 = _fetch(kv_cache, slot, 2), _fetch(kv_cache, slot, 3)
        for tile in range(first, last):
            later_slot = _slots(S, table, tile + 2, stop)
            stage = i % STAGES
            mbarrier.wait(shared.used.index(stage), ((i // STAGES) & 1) ^ 1)
            slot = gl.convert_layout(slot, gl.SliceLayout(1, _PE_LAYOUT))
            k_pe = (kv_cache + slot.to(gl.int64) * _WIDTH) + (_WIDTH - 2 * ROPE)
            async_copy.async_copy_global_to_shared(
                shared.k_pe.index(stage),
                k_pe.to(gl.pointer_type(gl.bfloat16), bitcast=True)[:, None] + p[None, :],
                mask=(slot >= 0)[:, None],
            )
            async_copy.mbarrier_arrive(shared.loaded.index(stage), increment_count=False)
            latent = words.index(stage)
            _write(block_0, latent, 0)
            block_0 = _fetch(kv_cache, next_slot, 0)
            _write(block_1, latent, 1)
            block_1 = _fetch(kv_cache, next_slot, 1)
            _write(block_2, latent, 2)
            block_2 = _fetch(kv_cache, next_slot, 2)
            _write(block_3, latent, 3)
            block_3 = _fetch(kv_cache, next_slot, 3)
            fence_async_shared()
            barrier()
            mbarrier.arrive(shared.loaded.index(stage), count=1)
            slot, next_slot = next_slot, later_slot
            i += 1
