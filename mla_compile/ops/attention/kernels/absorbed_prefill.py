"""Absorbed prefill: a few new tokens attend over many latents in their pages, and no key is expanded.

`w_uk` maps queries to the latent space, `w_uv` maps the result back. Between these two products are launches as in
`decode.py`: partial attention of each split of keys, then their sum. A program holds BLOCK_R queries of a chunk, its
tokens times all heads, and reads its share of the row's keys.

The keys that a program reads follow from shapes and from its own row's keys. So the grid can be captured, lengths may
change at replay, and a row's bits do not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.latents import FP8
from mla_compile.ops.attention.kernels.chunks import block_of, rows_block
from mla_compile.ops.attention.kernels.latents import padded
from mla_compile.ops.attention.kernels.softmax import (
    LOG2_E,
    attend_latents,
    combine,
    load_queries,
    split_of,
    split_results,
    store_split,
)
from mla_compile.ops.attention.operands import PrefillOperands
from mla_compile.ops.attention.softmax import in_parts
from mla_compile.ops.attention.tiles import MIN_KEYS, SPLIT_BLOCK, AttentionTiles, absorbed_tiles, num_splits
from mla_compile.ops.device import device_of


@triton.jit(do_not_specialize=["tokens", "rows"])
def absorbed_kernel(
    q_latent,  # [tokens, HEADS, RANK], any strides but the last
    q_pe,  # [tokens, HEADS, ROPE], any strides but the last
    kv_cache,  # [slots, WIDTH], contiguous; floats or FP8 latents
    key_slots,  # int64 [keys], contiguous; -1 for padding
    cu_seqlens_q,  # int32 [rows + 1]
    cu_seqlens_k,  # int32 [rows + 1]
    out,  # [splits, tokens * HEADS, RANK], contiguous
    lse,  # float32 [splits, tokens * HEADS]
    tokens,
    rows,
    softmax_scale,
    q_strides,  # of tokens and heads
    pe_strides,
    CAUSAL: tl.constexpr,  # the last token of a row sees its last key; else all see all
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
):
    """Attention of a block of queries over one split of its row's keys; grid `[blocks of all chunks, splits]`."""
    row, first = block_of(cu_seqlens_q, rows, tl.program_id(0), HEADS, ROWS_BLOCK, BLOCK_R)
    if row >= rows:
        return
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    first_q = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - first_q
    first_key = tl.load(cu_seqlens_k + row)
    keys = tl.load(cu_seqlens_k + row + 1) - first_key
    r = first + tl.arange(0, BLOCK_R)
    token = r // HEADS
    inside = token < q_len
    seen = keys
    if CAUSAL:
        seen = keys - (q_len - 1 - token)
    bounds = tl.where(inside, seen, 0)
    start, stop = split_of(keys, split, splits, BLOCK_N, MIN_KEYS)

    query = first_q.to(tl.int64) + token
    target = (split.to(tl.int64) * tokens + first_q) * HEADS + r
    if (start >= stop) & (splits > 1):  # The sum skips an empty split, so its `out` may stay unwritten.
        tl.store(lse + target, tl.full([BLOCK_R], -float("inf"), tl.float32), mask=inside)
        return

    q_at = q_latent + (query * q_strides[0] + (r % HEADS) * q_strides[1])
    pe_at = q_pe + (query * pe_strides[0] + (r % HEADS) * pe_strides[1])
    q, qp = load_queries(q_at, pe_at, inside, RANK, ROPE)

    scale = softmax_scale * LOG2_E
    top = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([padded(RANK), BLOCK_R], tl.float32)
    key_slots += first_key
    key = start + tl.arange(0, BLOCK_N)
    # Any slot fits an int32, which halves the registers of a tile.
    slot = tl.load(key_slots + key, mask=key < stop, other=-1).to(tl.int32)
    for n0 in range(start, stop, BLOCK_N):
        key = n0 + tl.arange(0, BLOCK_N)
        live = slot >= 0
        latent = kv_cache + slot.to(tl.int64)[:, None] * WIDTH
        # One tile ahead, so that the next iteration knows the latents' addresses.
        slot = tl.load(key_slots + key + BLOCK_N, mask=key < stop - BLOCK_N, other=-1).to(tl.int32)
        top, total, acc = attend_latents(
            q, qp, latent, live, key, bounds, scale, top, total, acc,
            RANK, ROPE,
        )  # fmt: skip
    store_split(out, lse, target, inside, inside, top, total, acc, RANK)


def prefill_absorbed(
    operands: PrefillOperands,
    *,
    tiles: AttentionTiles | None = None,
    splits: int | None = None,
    min_keys: int = MIN_KEYS,
) -> Tensor:
    """`mla_prefill` over latents, on the GPU or in Triton's interpreter.

    `tiles`, `splits` and `min_keys` are chosen by `tiles.py` unless given. Nothing is read on the host.
    """
    q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, softmax_scale, _ = operands
    tokens, heads, _ = q.shape
    _, nope, rank = w_uk.shape
    parts, rows, rope = key_slots.shape[0], cu_seqlens_q.shape[0] - 1, q.shape[2] - nope
    device = device_of(q)
    tiles = tiles or absorbed_tiles(tokens * heads, rank, q.dtype, device, fp8=kv_cache.dtype == FP8)
    # Each row has blocks of its own, and its last one may be nearly empty.
    blocks = (tokens * heads + rows * (tiles.queries - 1)) // tiles.queries
    splits = splits or num_splits(blocks, key_slots.shape[1], device)
    q = q if q.stride(-1) == 1 else q.contiguous()
    q_latent = torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    q_pe = q[..., nope:]

    def attend(part: int, causal: bool) -> tuple[Tensor, Tensor]:
        # Parts that are joined stay in float32 until the last.
        out = q.new_empty((tokens, heads, rank), dtype=torch.float32 if parts > 1 else q.dtype)
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
        part_out, part_lse = split_results(out, lse, splits)
        absorbed_kernel[(blocks, splits)](
            q_latent,
            q_pe,
            kv_cache,
            key_slots[part],
            cu_seqlens_q,
            cu_seqlens_k[part],
            part_out,
            part_lse,
            tokens,
            rows,
            softmax_scale,
            q_latent.stride()[:2],
            q_pe.stride()[:2],
            CAUSAL=causal,
            HEADS=heads,
            RANK=rank,
            ROPE=rope,
            WIDTH=kv_cache.shape[2],
            ROWS_BLOCK=rows_block(rows),
            BLOCK_R=tiles.queries,
            BLOCK_N=tiles.keys,
            MIN_KEYS=min_keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if splits > 1:
            combine(part_out, part_lse, out, lse, least=SPLIT_BLOCK)
        return out, lse

    latents = in_parts(attend, parts).to(q.dtype)
    result, out = operands.empty_result()
    torch.bmm(latents.transpose(0, 1), w_uv, out=out.transpose(0, 1))
    return result
