"""Scores of an indexer, in one launch that reads keys from their pages; the choice is torch's `topk`.

A program has a tile of keys and adds up heads. Its output are integers, ordered as `distinct_keys` orders scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.attention.kernels.latents import padded
from mla_compile.ops.attention.selection import NOT_SEEN, chosen_slots, highest, seen_in_parts
from mla_compile.ops.paging import slots_of, visible_keys

_NOT_SEEN = tl.constexpr(NOT_SEEN)
_WORKSPACE = 2**24
"""Scores of prompt chunks that exist at a time."""


@triton.jit
def _distinct(scores, place, last):
    """`distinct_keys` of float32 scores at their places; `last`: the highest place."""
    bits = tl.where(scores == 0.0, 0, scores.to(tl.int32, bitcast=True))
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (order << 32) | (last - place).to(tl.int64)


@triton.jit
def decode_scores_kernel(
    q,  # [rows * q_len, HEADS, DIM], contiguous
    weights,  # float32 [rows * q_len, HEADS], contiguous
    index_cache,  # [pages, PAGE_SIZE, DIM], contiguous
    block_table,  # int32 [rows, columns]
    seen,  # int32 [rows, q_len]
    out,  # int64 [rows * q_len, keys]
    q_len,
    keys,  # columns * PAGE_SIZE
    table_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The scores of one tile of a row's keys for all its query tokens; grid `[rows, tiles]`."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.arange(0, padded(HEADS))
    d = tl.arange(0, padded(DIM))
    most = 0
    for j in range(q_len):
        most = tl.maximum(most, tl.load(seen + row * q_len + j))
    live = key < tl.minimum(most, keys)
    page = tl.load(block_table + row * table_stride + key // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    at = index_cache + (page * PAGE_SIZE + key % PAGE_SIZE)[:, None] * DIM + d[None, :]
    k = tl.load(at, mask=live[:, None] & (d < DIM)[None, :], other=0.0)
    for j in range(q_len):
        token = row * q_len + j
        q_at = q + token * (HEADS * DIM) + h[:, None] * DIM + d[None, :]
        query = tl.load(q_at, mask=(h < HEADS)[:, None] & (d < DIM)[None, :], other=0.0)
        weight = tl.load(weights + token * HEADS + h, mask=h < HEADS, other=0.0)
        products = tl.maximum(tl.dot(k, tl.trans(query), input_precision="ieee"), 0.0)
        scores = tl.sum(products * weight[None, :], 1)
        found = tl.where(key < tl.load(seen + token), _distinct(scores, key, keys - 1), _NOT_SEEN)
        tl.store(out + token * keys + key, found, mask=key < keys)


@triton.jit
def prefill_scores_kernel(
    q,  # [tokens, HEADS, DIM], contiguous
    weights,  # float32 [tokens, HEADS], contiguous
    index_cache,  # [slots, DIM], contiguous
    key_slots,  # int64 [parts, count], contiguous
    begin,  # int32 [tokens, parts], contiguous
    end,
    out,  # int64 [tokens, parts * count]
    tokens,
    count,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The scores of one tile of a part's keys for a block of tokens; grid `[blocks of tokens, tiles, parts]`."""
    part, parts = tl.program_id(2), tl.num_programs(2)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = tl.minimum(t, tokens - 1).to(tl.int64)
    place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(begin + token * parts + part)[:, None]
    after = tl.load(end + token * parts + part)[:, None]
    is_seen = (place[None, :] >= first) & (place[None, :] < after) & (place < count)[None, :]
    d = tl.arange(0, padded(DIM))
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    if tl.max(is_seen.to(tl.int32)) > 0:
        slot = tl.load(key_slots + part.to(tl.int64) * count + place, mask=place < count, other=-1)
        live = (slot >= 0) & (tl.max(is_seen.to(tl.int32), 0) > 0)
        at = index_cache + tl.maximum(slot, 0)[:, None] * DIM + d[None, :]
        k = tl.trans(tl.load(at, mask=live[:, None] & (d < DIM)[None, :], other=0.0))
        for head in range(HEADS):
            q_at = q + (token * HEADS + head)[:, None] * DIM + d[None, :]
            query = tl.load(q_at, mask=(d < DIM)[None, :], other=0.0)
            weight = tl.load(weights + token * HEADS + head)
            acc += tl.maximum(tl.dot(query, k, input_precision="ieee"), 0.0) * weight[:, None]
    index = part * count + place
    found = tl.where(is_seen, _distinct(acc, index[None, :], parts * count - 1), _NOT_SEEN)
    target = out + t.to(tl.int64)[:, None] * (parts * count) + index[None, :]
    tl.store(target, found, mask=(t < tokens)[:, None] & (place < count)[None, :])


def _tiles(dtype: torch.dtype) -> tuple[int, int]:
    """Keys, or tokens, of a program, and its warps. Float32 runs on CUDA cores: tensor cores would round it."""
    return (16, 8) if dtype == torch.float32 else (64, 4)


def decode_select_triton(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    topk: int,
) -> Tensor:
    """`mla_decode_select` on the GPU or in Triton's interpreter. Nothing is read on the host."""
    (tokens, heads, dim), page_size = q.shape, index_cache.shape[1]
    rows, columns = block_table.shape
    seen = visible_keys(seq_lens, q_lens, q_len)
    keys = q.new_empty((tokens, columns * page_size), dtype=torch.int64)
    block, warps = _tiles(q.dtype)
    decode_scores_kernel[(rows, triton.cdiv(keys.shape[1], block))](
        q.contiguous(),
        weights.contiguous(),
        index_cache.contiguous(),
        block_table,
        seen,
        keys,
        q_len,
        keys.shape[1],
        block_table.stride(0),
        HEADS=heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        BLOCK_N=block,
        num_warps=warps,
    )
    row = torch.arange(rows, device=q.device).repeat_interleave(q_len, output_size=tokens)
    return slots_of(block_table, row[:, None], highest(keys, topk), page_size).to(torch.int32)


def prefill_select_triton(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    key_slots: Tensor,
    topk: int,
) -> Tensor:
    """`mla_prefill_select` on the GPU or in Triton's interpreter. The host reads nothing."""
    tokens, heads, dim = q.shape
    parts, count = key_slots.shape
    q, weights, slots = q.contiguous(), weights.contiguous(), key_slots.contiguous()
    begin, end = (x.contiguous() for x in seen_in_parts(tokens, cu_seqlens_q, cu_seqlens_k))
    block, warps = _tiles(q.dtype)
    step = max(block, _WORKSPACE // (parts * count))
    found = []
    for first in range(0, tokens, step):
        some = slice(first, first + step)
        n = q[some].shape[0]
        keys = q.new_empty((n, parts * count), dtype=torch.int64)
        prefill_scores_kernel[(triton.cdiv(n, block), triton.cdiv(count, block), parts)](
            q[some],
            weights[some],
            index_cache.contiguous(),
            slots,
            begin[some],
            end[some],
            keys,
            n,
            count,
            HEADS=heads,
            DIM=dim,
            BLOCK_T=block,
            BLOCK_N=block,
            num_warps=warps,
        )
        found.append(chosen_slots(slots, highest(keys, topk)))
    return torch.cat(found)
