"""FlashMLA's sparse kernels for Hopper with `mla_sparse_attention`'s arguments. Written for sgl-flash-mla 1.0.0.

It has one for latents in bfloat16, meant for prompts, and one for FP8 latents, meant for decode; here both serve both.
A token is a query of its own with its own slots, and -1 is no slot in either. They take both parts of a query in one
tensor, so a first launch packs them.

- The kernel for bfloat16 has a program for 64 heads of a token. Few tokens would leave multiprocessors idle, so a
  token's slots are divided: its queries are packed once for each part, and a last launch joins the parts.
- The kernel for FP8 latents divides slots itself, by a plan in its own format. The plan follows from sizes alone, so
  the packing launch writes it: equal parts of each token's slots.
"""

import torch
import triton
import triton.language as tl
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata, has_legacy
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from mla_compile.ops.dependent_launch import early_options
from mla_compile.ops.device import device_of
from mla_compile.ops.paging import check_alignment

if not has_legacy():
    raise ImportError("flash_mla was built without its kernels for Hopper, or they do not load")

_HEADS = 64
"""Heads of a token that a program of FlashMLA computes."""
_PACKED_HEADS = 8
"""Heads of a token that a program of `pack_kernel` copies."""
_BLOCK = 64
"""Slots that FlashMLA's programs read at a time; those for bfloat16 read pairs of blocks."""
_TOKENS = 1056
"""Tokens of a call with FP8 latents: FlashMLA allocates float32 results for twice as many. They are whole waves of
programs on 132 multiprocessors."""


@triton.jit
def pack_kernel(
    q_latent,  # [tokens, HEADS, RANK], last stride 1
    q_pe,  # [tokens, HEADS, ROPE], last stride 1
    selected,  # int32 [tokens, TOPK], contiguous
    packed,  # [tokens, PARTS, HEADS, RANK + ROPE], contiguous
    lens,  # int32 [tokens, PARTS], contiguous, or None
    plan,  # int32 [programs, 8], contiguous, or None
    plan_splits,  # int32 [2], or None
    latent_token_stride,
    latent_head_stride,
    pe_token_stride,
    pe_head_stride,
    programs,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    TOPK: tl.constexpr,
    WIDE_TOPK: tl.constexpr,  # TOPK, rounded up to a power of two
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Both parts of a token's queries, PARTS times; grid `[tokens, blocks of HEADS]`.

    lens: where the slots of each part end, as `-1` may stand anywhere. plan: FlashMLA's, see `sparse_flash_mla_fp8`.
    """
    if EARLY:
        gdc_wait()  # and no `gdc_launch_dependents`, as FlashMLA's kernels do not wait
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    mine = head < HEADS
    column, rotary = tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
    latent = tl.load(q_latent + token * latent_token_stride + head * latent_head_stride + column, mask=mine)
    pe = tl.load(q_pe + token * pe_token_stride + head * pe_head_stride + rotary, mask=mine)
    for part in tl.static_range(PARTS):
        target = packed + ((token * PARTS + part) * HEADS + head) * (RANK + ROPE)
        tl.store(target + column, latent, mask=mine)
        tl.store(target + RANK + rotary, pe, mask=mine)
    if tl.program_id(1) > 0:
        return
    if lens is not None:
        SHARE: tl.constexpr = TOPK // PARTS
        place = tl.arange(0, WIDE_TOPK)
        slots = tl.load(selected + token * TOPK + place, mask=place < TOPK, other=-1)
        end = tl.max(tl.where(slots >= 0, place + 1, 0), 0)
        part = tl.arange(0, PARTS)
        tl.store(lens + token * PARTS + part, tl.minimum(tl.maximum(end - part * SHARE, 0), SHARE))
    if plan is not None:
        BLOCKS: tl.constexpr = TOPK // BLOCK
        used = tl.minimum(programs, BLOCKS)
        i, row = tl.arange(0, 256), tl.arange(0, 2)
        at, is_divided = plan + i * 8, (used > 1).to(tl.int32)
        written = (i < programs) & (token == 0)
        # Its first and last row, its first block and the one after the last, its number among the parts of its row,
        # and whether its first and last row are divided. There is no row 1: nothing to do.
        tl.store(at, tl.where(i < used, 0, 1), mask=written)
        tl.store(at + 1, 0, mask=written)
        tl.store(at + 2, i * BLOCKS // used, mask=written)
        tl.store(at + 3, (i + 1) * BLOCKS // used, mask=written)
        tl.store(at + 4, i, mask=written)
        tl.store(at + 5, is_divided, mask=written)
        tl.store(at + 6, is_divided, mask=written)
        tl.store(plan_splits + row, row * used, mask=(row < 2) & (token == 0))


@triton.jit
def join_kernel(
    part_out,  # [tokens, PARTS, HEADS, RANK], contiguous; 0 for a part without slots
    part_lse,  # float32 [tokens, PARTS, HEADS], contiguous, natural log, inf for a part without slots
    out,  # [tokens, HEADS, RANK], contiguous
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join the parts of a head of a token: `sum_s exp(lse_s - lse) out_s`; grid `[tokens, HEADS]`."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = (token * PARTS + tl.arange(0, PARTS)) * HEADS + head
    lse = tl.load(part_lse + at)
    lse = tl.where(lse == float("inf"), -float("inf"), lse)
    top = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(top == -float("inf"), 0.0, top))  # -inf - -inf would be NaN
    total = tl.sum(weights, 0)
    column = tl.arange(0, RANK)
    part = tl.load(part_out + at[:, None] * RANK + column[None, :]).to(tl.float32)
    result = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (token * HEADS + head) * RANK + column, result.to(out.dtype.element_ty))


@triton.jit
def fence_kernel():
    """Nothing, after all kernels before it."""


def _pack(
    q_latent: Tensor,
    q_pe: Tensor,
    selected: Tensor,
    parts: int,
    lens: Tensor | None,
    plan: Tensor | None,
    plan_splits: Tensor | None,
) -> Tensor:
    """Packed queries `[tokens, parts, heads, rank + rope]`; see `pack_kernel`."""
    q_latent, q_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe))
    (tokens, heads, rank), rope, topk = q_latent.shape, q_pe.shape[2], selected.shape[1]
    packed = q_latent.new_empty((tokens, parts, heads, rank + rope))
    pack_kernel[(tokens, triton.cdiv(heads, _PACKED_HEADS))](
        *(q_latent, q_pe, selected, packed, lens, plan, plan_splits),
        *(*q_latent.stride()[:2], *q_pe.stride()[:2], 0 if plan is None else len(plan)),
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        TOPK=topk,
        WIDE_TOPK=triton.next_power_of_2(topk),
        PARTS=parts,
        BLOCK=_BLOCK,
        BLOCK_H=_PACKED_HEADS,
        num_warps=4,
        **early_options(q_latent),
    )
    return packed


def num_parts(tokens: int, heads: int, topk: int, multiprocessors: int) -> int:
    """The parts of each token's slots: as many as have a multiprocessor each, a power of two of pairs of blocks."""
    parts = 1
    while tokens * heads // _HEADS * parts * 2 <= multiprocessors and topk % (parts * 4 * _BLOCK) == 0:
        parts *= 2
    return parts


def sparse_flash_mla(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    selected: Tensor,
    softmax_scale: float,
    *,
    parts: int | None = None,
) -> Tensor:
    """`mla_sparse_attention` over latents in bfloat16. Nothing is read on the host.

    parts: of each token's slots, by default `num_parts`.

    Raises:
        MLAError: the address of the cache is not a multiple of 16, as bulk copies require.
    """
    check_alignment(kv_cache)
    (tokens, heads, rank), topk = q_latent.shape, selected.shape[1]
    parts = parts or num_parts(tokens, heads, topk, device_of(q_latent).multiprocessors)
    selected = selected.contiguous()
    lens = selected.new_empty(tokens * parts)
    packed = _pack(q_latent, q_pe, selected, parts, lens, None, None)
    part_out, _, part_lse = flash_mla_sparse_fwd(
        packed.flatten(0, 1),
        kv_cache.contiguous().view(-1, 1, kv_cache.shape[2]),
        selected.view(tokens * parts, 1, topk // parts),
        softmax_scale,
        rank,
        topk_length=lens,
        use_legacy=True,
        return_log2_lse=False if parts == 1 else None,
    )
    out: Tensor = part_out
    if parts == 1:
        return out
    out = q_latent.new_empty(q_latent.shape)
    join_kernel[(tokens, heads)](part_out, part_lse, out, HEADS=heads, RANK=rank, PARTS=parts, num_warps=4)
    return out


def sparse_flash_mla_fp8(
    q_latent: Tensor, q_pe: Tensor, kv_cache: Tensor, selected: Tensor, softmax_scale: float
) -> Tensor:
    """`mla_sparse_attention` over FP8 latents, `[pages, page_size, 656]` bytes. Nothing is read on the host.

    To FlashMLA all tokens are query tokens of one row: it then has `programs` for each token's 64 heads, and the plan
    says which of the token's blocks of slots each reads.

    Raises:
        MLAError: the address of the cache is not a multiple of 16, as bulk copies require.
    """
    check_alignment(kv_cache)
    tokens, heads, rank = q_latent.shape
    if tokens > _TOKENS:
        queries = zip(q_latent.split(_TOKENS), q_pe.split(_TOKENS), selected.split(_TOKENS), strict=True)
        return torch.cat([sparse_flash_mla_fp8(q, pe, kv_cache, of, softmax_scale) for q, pe, of in queries])
    selected = selected.contiguous()
    programs = max(device_of(q_latent).multiprocessors // tokens // (heads // _HEADS), 1)
    schedule, _ = get_mla_metadata()
    plan, splits = selected.new_empty(programs, 8), selected.new_empty(2)
    packed = _pack(q_latent, q_pe, selected, 1, None, plan, splits)
    schedule.tile_scheduler_metadata, schedule.num_splits = plan, splits
    rows, _ = flash_mla_with_kvcache(
        packed.transpose(0, 1),
        kv_cache.contiguous()[:, :, None],
        None,
        None,
        rank,
        schedule,
        softmax_scale=softmax_scale,
        is_fp8_kvcache=True,
        indices=selected[None],
        use_legacy=True,
    )
    if programs == 1:
        # FlashMLA's last kernel, which joins parts, ends before the one before it if there is nothing to join. Only a
        # kernel that is launched as usual waits for both.
        fence_kernel[(1,)](num_warps=1)
    out: Tensor = rows[0]
    return out
