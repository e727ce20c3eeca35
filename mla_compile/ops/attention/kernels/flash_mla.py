"""FlashMLA's dense decode kernel for Hopper with `mla_decode`'s arguments. Written for sgl-flash-mla 1.0.0.

Its causal mask is that of rows with `q_len` query tokens each. So the tokens of a shorter row are moved to the row's
last places, where the mask is theirs, and their results are moved back. No key past the row's end is read.

    tokens    t0 t1  .  .
    places     .  . t0 t1
"""

import torch
import triton
import triton.language as tl
from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata, get_mla_metadata, has_legacy
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from mla_compile.ops.attention.decode_backends import Planner
from mla_compile.ops.attention.kernels.fixed_splits import with_unit_strides
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.dependent_launch import early_options
from mla_compile.ops.device import device_of
from mla_compile.ops.paging import check_alignment

if not has_legacy():
    raise ImportError("flash_mla was built without its kernels for Hopper, or they do not load")

_QUERIES_AT_ONCE = 64
"""Queries of a row, q_len x heads, that a program of FlashMLA computes at a time."""
_HEADS = 8
"""Heads of a token that a program of the kernels below copies."""


def plan_flash_mla(operands: DecodeOperands, place: int) -> list[Tensor]:
    """FlashMLA's division of the work by the rows' lengths, in one launch; the host reads nothing.

    Returns:
        The keys of each program, int32 `[programs, 8]`, and the sums of the rows' splits, int32 `[rows + 1]`.
    """
    heads, q_len = operands.q_latent.shape[1], operands.q_len
    seq_lens = operands.seq_lens.contiguous()
    return list(get_mla_decoding_metadata(seq_lens, q_len * heads, 1, heads, use_legacy=True))


def _like_plan(operands: DecodeOperands) -> list[Tensor]:
    blocks = -(-operands.q_len * operands.q_latent.shape[1] // _QUERIES_AT_ONCE)
    programs = torch.sym_max(device_of(operands.q_latent).multiprocessors // blocks, 1)
    seq_lens = operands.seq_lens
    sizes: tuple[tuple[int, ...], ...] = (programs, 8), (seq_lens.shape[0] + 1,)
    return [seq_lens.new_empty(size) for size in sizes]


PLANNER = Planner(plan_flash_mla, _like_plan)


@triton.jit
def pack_kernel(
    q_latent,  # [rows * Q_LEN, HEADS, RANK], last stride 1
    q_pe,  # [rows * Q_LEN, HEADS, ROPE], last stride 1
    q_lens,  # int32 [rows], or None
    packed,  # [rows, Q_LEN, HEADS, RANK + ROPE], contiguous
    latent_token_stride,
    latent_head_stride,
    pe_token_stride,
    pe_head_stride,
    Q_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Both parts of the query at a place; grid `[rows * Q_LEN, blocks of HEADS]`. Places without a token repeat one."""
    if EARLY:
        gdc_wait()  # and no `gdc_launch_dependents`: FlashMLA's kernel would start, and it does not wait for `packed`
    place = tl.program_id(0).to(tl.int64)
    row = place // Q_LEN
    count = Q_LEN if q_lens is None else tl.load(q_lens + row)
    token = row * Q_LEN + tl.maximum(place % Q_LEN - (Q_LEN - count), 0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    mine = head < HEADS
    target = packed + (place * HEADS + head) * (RANK + ROPE)
    column, rotary = tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
    latent = tl.load(q_latent + token * latent_token_stride + head * latent_head_stride + column, mask=mine)
    pe = tl.load(q_pe + token * pe_token_stride + head * pe_head_stride + rotary, mask=mine)
    tl.store(target + column, latent, mask=mine)
    tl.store(target + RANK + rotary, pe, mask=mine)


@triton.jit
def unpack_kernel(
    out,  # [rows, Q_LEN, HEADS, RANK], contiguous, by place; then by token
    lse_at,  # float32 [rows, HEADS, Q_LEN], by place
    lse,  # float32 [rows, Q_LEN, HEADS], contiguous
    seq_lens,  # int32 [rows]
    q_lens,  # int32 [rows], or None
    row_stride,  # of `lse_at`
    head_stride,
    place_stride,
    Q_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Results by token; grid `[rows, blocks of HEADS]`. `out` is written only where it changes.

    A place is read before a later token writes to it: tokens go in order, and none comes after its place.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + row)
    count = Q_LEN if q_lens is None else tl.load(q_lens + row)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mine = head < HEADS
    element = head[:, None] * RANK + tl.arange(0, RANK)[None, :]
    for token in range(Q_LEN):
        place = token + Q_LEN - count
        sees = mine & (token < count) & (length - (count - 1 - token) > 0)
        found = tl.load(
            lse_at + row * row_stride + head * head_stride + place * place_stride,
            mask=sees,
            other=-float("inf"),
        )
        tl.store(lse + (row * Q_LEN + token) * HEADS + head, found, mask=mine)
        if (length < Q_LEN) | (count < Q_LEN):
            source = out + (row * Q_LEN + place) * HEADS * RANK + element
            value = tl.load(source, mask=sees[:, None], other=0.0)
            tl.store(out + (row * Q_LEN + token) * HEADS * RANK + element, value, mask=mine[:, None])


def decode_flash_mla(operands: DecodeOperands, plan: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """`mla_decode` with FlashMLA. Without a plan it makes one: see `plan_flash_mla`.

    Raises:
        MLAError: the address of the cache is not a multiple of 16, as bulk copies require.
    """
    operands = with_unit_strides(operands)
    q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale = operands
    check_alignment(kv_cache)
    tokens, heads, rank = q_latent.shape
    rows, rope = seq_lens.shape[0], q_pe.shape[2]
    sizes = {"Q_LEN": q_len, "HEADS": heads, "RANK": rank, "BLOCK_H": _HEADS, "num_warps": 4}
    blocks = triton.cdiv(heads, _HEADS)

    packed = q_latent.new_empty((rows, q_len, heads, rank + rope))
    strides = *q_latent.stride()[:2], *q_pe.stride()[:2]
    options = {**sizes, "ROPE": rope, **early_options(q_latent)}
    pack_kernel[(tokens, blocks)](q_latent, q_pe, q_lens, packed, *strides, **options)

    schedule, _ = get_mla_metadata()
    schedule.tile_scheduler_metadata, schedule.num_splits = plan or plan_flash_mla(operands, 0)
    out, lse_at = flash_mla_with_kvcache(
        packed,
        kv_cache[:, :, None],
        block_table,
        seq_lens,
        rank,
        schedule,
        softmax_scale=softmax_scale,
        causal=True,
        use_legacy=True,
    )
    lse = lse_at.new_empty((tokens, heads))
    # Launched as usual: FlashMLA's last kernel may end before the one whose results it joins.
    unpack_kernel[(rows, blocks)](out, lse_at, lse, seq_lens, q_lens, *lse_at.stride(), **sizes)
    return out.view(tokens, heads, rank), lse
