"""Split-KV attention over dense latents under a mask; the products and the sum of splits are those of `decode.py`.

Tile t of the keys belongs to split `t % splits`, so that the visible keys of a causal prefix spread over all splits.
Keys that none of a program's queries sees are not read: the traffic follows the text, not the cache. The addresses of a
tile follow from shapes and the mask decides on the device whether it is read, so the grid can be captured.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.attention.kernels.latents import padded
from mla_compile.ops.attention.kernels.softmax import (
    LOG2_E,
    accumulate,
    combine,
    load_queries,
    split_results,
    store_split,
)
from mla_compile.ops.attention.tiles import AttentionTiles, decode_tiles, num_splits
from mla_compile.ops.device import device_of

_LOWEST = tl.constexpr(-3.0e38)
"""Replaces finite numbers of a mask, such as `finfo.min`, that would be -inf in units of powers of two. If a query sees
only such keys, torch returns the mean of all values; here each split does, and their sum is a weighted mean."""


@triton.jit
def _bias(mask_at, key, keys, key_stride):
    """The bias of a tile's scores, float32 `[keys, rows or 1]`: -inf for a key that is not seen.

    mask_at: pointers to the mask of key 0, `[1, rows or 1]`, or None.
    """
    if mask_at is None:
        bias = tl.where(key < keys, 0.0, -float("inf"))[:, None]
    else:
        at = mask_at + key.to(tl.int64)[:, None] * key_stride
        live = (key < keys)[:, None]
        if mask_at.dtype.element_ty == tl.int1:
            bias = tl.where(tl.load(at, mask=live, other=0) != 0, 0.0, -float("inf"))
        else:
            added = tl.load(at, mask=live, other=-float("inf")).to(tl.float32)
            bias = tl.where(added == -float("inf"), added, tl.maximum(added * LOG2_E, _LOWEST))
    return bias


@triton.jit
def masked_split_kernel(
    q_latent,  # [rows, HEADS, Q_LEN, RANK], any strides but the last
    q_pe,  # [rows, HEADS, Q_LEN, ROPE], any strides but the last
    kv_c,  # [rows, keys, RANK], any strides but the last
    k_pe,  # [rows, keys, ROPE], any strides but the last
    mask,  # bool or float [rows, HEADS, Q_LEN, keys], any strides; None: all keys are seen
    out,  # [splits, rows * HEADS * Q_LEN, RANK], contiguous
    lse,  # float32 [splits, rows * HEADS * Q_LEN]
    softmax_scale,
    keys,
    q_strides,  # of each of these, without the last dimension
    pe_strides,
    kv_strides,
    k_pe_strides,
    mask_strides,
    VARIES: tl.constexpr,  # whether the mask varies among the queries of a row
    Q_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of one block of queries over one split of a row's keys; grid `[rows * row blocks, splits]`."""
    R: tl.constexpr = HEADS * Q_LEN
    R_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    row = (tl.program_id(0) // R_BLOCKS).to(tl.int64)
    r = (tl.program_id(0) % R_BLOCKS) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(1)
    splits = tl.num_programs(1)

    inside = r < R
    # Queries that only fill the block repeat the last one.
    head = (tl.minimum(r, R - 1) // Q_LEN).to(tl.int64)
    token = (tl.minimum(r, R - 1) % Q_LEN).to(tl.int64)
    c = tl.arange(0, padded(RANK))
    p = tl.arange(0, padded(ROPE))
    q_at = row * q_strides[0] + head * q_strides[1] + token * q_strides[2]
    pe_at = row * pe_strides[0] + head * pe_strides[1] + token * pe_strides[2]
    q, qp = load_queries(q_latent + q_at, q_pe + pe_at, inside, RANK, ROPE)
    kv_c += row * kv_strides[0]
    k_pe += row * k_pe_strides[0]
    mask_at = mask
    if mask is not None:
        mask_at = mask + row * mask_strides[0] + tl.zeros([1, 1], tl.int64)
    if VARIES:
        mask_at += (head * mask_strides[1] + token * mask_strides[2])[None, :]

    scale = softmax_scale * LOG2_E
    top = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([padded(RANK), BLOCK_R], tl.float32)
    key = split * BLOCK_N + tl.arange(0, BLOCK_N)
    seen = tl.max(_bias(mask_at, key, keys, mask_strides[3]), 1) > -float("inf")
    # A hidden tile costs two products of zeros, but no reads. An `if` would save these too, but then Triton 3.6
    # pipelines no load, and on Hopper the latents spill.
    for first in range(split * BLOCK_N, keys, splits * BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        # Hidden keys are zeros too, not only their scores masked: 0 x NaN is NaN.
        at = key.to(tl.int64)[:, None]
        k = tl.load(
            kv_c + at * kv_strides[1] + c[None, :], mask=seen[:, None] & (c < RANK)[None, :], other=0.0
        )
        kp = tl.load(
            k_pe + at * k_pe_strides[1] + p[None, :], mask=seen[:, None] & (p < ROPE)[None, :], other=0.0
        )
        bias = _bias(mask_at, key, keys, mask_strides[3])
        # One tile ahead, so that the next iteration knows which latents to read.
        after = _bias(mask_at, key + splits * BLOCK_N, keys, mask_strides[3])
        seen = tl.max(after, 1) > -float("inf")

        scores = tl.dot(k, q, input_precision="ieee")
        scores = tl.dot(kp, qp, scores, input_precision="ieee") * scale
        scores = tl.where(bias == -float("inf"), -float("inf"), scores + bias)
        top, total, acc = accumulate(scores, k, top, total, acc)

    target = (split.to(tl.int64) * (tl.num_programs(0) // R_BLOCKS) + row) * R + r
    # The sum skips a split that sees nothing, so its `out` may stay unwritten.
    written = inside & ((total != 0.0) | (splits == 1))
    store_split(out, lse, target, inside, written, top, total, acc, RANK)


def masked_decode_triton(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    mask: Tensor | None,
    softmax_scale: float,
    *,
    tiles: AttentionTiles | None = None,
    splits: int | None = None,
) -> Tensor:
    """`mla_masked_decode` on the GPU or in Triton's interpreter.

    `tiles` and `splits` are chosen by `tiles.py` unless given. Nothing is read on the host.
    """
    rows, heads, q_len, rank = q_latent.shape
    keys, rope = k_pe.shape[1], k_pe.shape[2]
    num_queries = heads * q_len
    q_latent, q_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_pe))
    kv_c, k_pe = (x.expand(rows, -1, -1) for x in (kv_c, k_pe))
    seen = None if mask is None else mask.expand(rows, heads, q_len, keys)

    varies = seen is not None and any(seen.shape[dim] > 1 and seen.stride(dim) != 0 for dim in (1, 2))

    device = device_of(q_latent)
    tiles = tiles or decode_tiles(num_queries, rank, q_latent.dtype, device)
    blocks = rows * triton.cdiv(num_queries, tiles.queries)
    splits = splits or num_splits(blocks, keys, device)

    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty((rows * num_queries,), dtype=torch.float32)
    part_out, part_lse = split_results(out, lse, splits)
    masked_split_kernel[(blocks, splits)](
        q_latent,
        q_pe,
        kv_c,
        k_pe,
        seen,
        part_out,
        part_lse,
        softmax_scale,
        keys,
        q_latent.stride()[:3],
        q_pe.stride()[:3],
        kv_c.stride()[:2],
        k_pe.stride()[:2],
        (0, 0, 0, 0) if seen is None else seen.stride(),
        VARIES=varies,
        Q_LEN=q_len,
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        BLOCK_R=tiles.queries,
        BLOCK_N=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        combine(part_out, part_lse, out, lse)
    return out
