"""Prefill: expanded causal attention of ragged prompt chunks over all keys of their rows.

A program holds BLOCK_M queries of one head and reads the row's keys block after block, from its first key on. Blocks
that all its queries see need no mask, but are summed by the same operations, and a key that a query does not see weighs
0. So a query's bits depend on its own keys only, not on its chunk or its block of queries.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.attention.kernels.chunks import block_of, rows_block
from mla_compile.ops.attention.kernels.keys import expanded_keys
from mla_compile.ops.attention.kernels.softmax import LN_2, LOG2_E
from mla_compile.ops.attention.operands import PrefillOperands
from mla_compile.ops.attention.softmax import in_parts
from mla_compile.ops.attention.tiles import AttentionTiles, prefill_tiles, qk_blocks
from mla_compile.ops.device import device_of, power_of_two


class Widths(NamedTuple):
    """The widths of a head, which a kernel is compiled for."""

    QK: int
    QK_HEAD: int  # of the blocks that hold a query, see `qk_blocks`
    QK_TAIL: int
    VALUE: int
    VALUE_BLOCK: int


@triton.jit
def _attend(
    query,  # [BLOCK_M, QK_HEAD]
    query_tail,  # [BLOCK_M, QK_TAIL]; unread if QK_TAIL is 0
    key,
    value,
    first_key,
    n,  # keys of this step, counted from first_key
    keys,
    last_visible,  # [BLOCK_M]: the last key that each query sees
    top,
    total,
    acc,
    scale,
    heads,
    MASKED: tl.constexpr,
    W: tl.constexpr,
):
    """Add BLOCK_N keys to a running softmax as in `accumulate`, but with queries as matrix rows."""
    c = tl.arange(0, W.QK_HEAD)
    d = tl.arange(0, W.VALUE_BLOCK)
    token = (first_key + n).to(tl.int64)
    live = n < keys
    # Keys past the end are zeros too, not only their scores masked: 0 x NaN is NaN.
    k = tl.load(
        key + token[None, :] * (heads * W.QK) + c[:, None],
        mask=live[None, :] & (c < W.QK)[:, None],
        other=0.0,
    )
    v = tl.load(
        value + token[:, None] * (heads * W.VALUE) + d[None, :],
        mask=live[:, None] & (d < W.VALUE)[None, :],
        other=0.0,
    )
    scores = tl.dot(query, k, input_precision="ieee")
    if W.QK_TAIL > 0:
        t = W.QK_HEAD + tl.arange(0, W.QK_TAIL)
        k_tail = tl.load(
            key + token[None, :] * (heads * W.QK) + t[:, None],
            mask=live[None, :] & (t < W.QK)[:, None],
            other=0.0,
        )
        scores = tl.dot(query_tail, k_tail, scores, input_precision="ieee")
    # A separate product: without a mask it could be fused with the subtraction, and would not be rounded.
    scores = tl.fma(scores, scale, 0.0)
    if MASKED:
        scores = tl.where(n[None, :] <= last_visible[:, None], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = tl.fma(total, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit(do_not_specialize=["lse", "cu_seqlens_q", "cu_seqlens_k", "rows"])
def prefill_kernel(
    q,  # [tokens, heads, QK], any strides but the last
    key,  # [keys, heads, QK], contiguous
    value,  # [keys, heads, VALUE], contiguous
    out,  # [tokens, heads, VALUE], contiguous
    lse,  # float32 [tokens, heads]
    cu_seqlens_q,  # int32 [rows + 1]
    cu_seqlens_k,  # int32 [rows + 1]
    rows,
    softmax_scale,
    heads,
    q_strides,  # of tokens and heads
    CAUSAL: tl.constexpr,  # the last query of a row sees its last key; else all see all
    W: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid `[blocks of all chunks or more, heads]`; a program computes the row and block that it serves."""
    head = tl.program_id(1)
    row, m0 = block_of(cu_seqlens_q, rows, tl.program_id(0), 1, ROWS_BLOCK, BLOCK_M)
    if row >= rows:
        return
    first_q = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - first_q
    first_key = tl.load(cu_seqlens_k + row)
    keys = tl.load(cu_seqlens_k + row + 1) - first_key
    m = m0 + tl.arange(0, BLOCK_M)
    unmasked = keys
    last_visible = tl.full([BLOCK_M], 0, tl.int32) + keys - 1
    if CAUSAL:
        before = keys - q_len  # negative for a padding row, which has no keys
        last_visible = before + m
        unmasked = tl.minimum(keys, tl.maximum(0, before + m0 + 1))
        keys = tl.minimum(keys, tl.maximum(0, before + m0 + BLOCK_M))
    unmasked = unmasked // BLOCK_N * BLOCK_N

    c = tl.arange(0, W.QK_HEAD)
    VALUE_BLOCK: tl.constexpr = W.VALUE_BLOCK
    d = tl.arange(0, VALUE_BLOCK)
    token = (first_q + m).to(tl.int64)
    inside = (m < q_len)[:, None]
    q_at = (token * q_strides[0] + head * q_strides[1])[:, None]
    query = tl.load(q + q_at + c[None, :], mask=inside & (c < W.QK)[None, :], other=0.0)
    query_tail = query
    if W.QK_TAIL > 0:
        t = W.QK_HEAD + tl.arange(0, W.QK_TAIL)
        query_tail = tl.load(q + q_at + t[None, :], mask=inside & (t < W.QK)[None, :], other=0.0)
    key += head * W.QK
    value += head * W.VALUE

    scale = softmax_scale * LOG2_E
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    for masked in tl.static_range(2):
        for n0 in range(unmasked if masked else 0, keys if masked else unmasked, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            top, total, acc = _attend(
                query, query_tail, key, value, first_key, n, keys, last_visible, top, total, acc, scale, heads,
                masked, W,
            )  # fmt: skip

    seen = total != 0  # true for NaN; false if the row has no key in this part
    result = tl.where(seen[:, None], acc / tl.where(seen, total, 1.0)[:, None], 0.0)
    log_sum = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN_2, -float("inf"))
    at = token * heads + head
    tl.store(
        out + at[:, None] * W.VALUE + d[None, :],
        result.to(out.dtype.element_ty),
        mask=inside & (d < W.VALUE)[None, :],
    )
    tl.store(lse + at, log_sum, mask=m < q_len)


def prefill_triton(operands: PrefillOperands, *, tiles: AttentionTiles | None = None) -> Tensor:
    """`mla_prefill` over expanded keys, on the GPU or in Triton's interpreter."""
    q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, softmax_scale, _ = operands
    tokens, heads, qk = q.shape
    parts, rows, value_dim = key_slots.shape[0], cu_seqlens_q.shape[0] - 1, w_uv.shape[2]
    widths = Widths(qk, *qk_blocks(qk), value_dim, power_of_two(value_dim))
    tiles = tiles or prefill_tiles(qk, value_dim, q.dtype, device_of(q))
    q = q if q.stride(-1) == 1 else q.contiguous()
    result, of_new = operands.empty_result()

    def attend(part: int, causal: bool) -> tuple[Tensor, Tensor]:
        key, value, _, _ = expanded_keys(kv_cache, key_slots[part], cu_seqlens_k[part], w_uk, w_uv)
        # Parts that are joined stay in float32 until the last.
        out = torch.empty_like(of_new, dtype=torch.float32) if parts > 1 else of_new
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
        prefill_kernel[(triton.cdiv(tokens, tiles.queries) + rows, heads)](
            q,
            key,
            value,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k[part],
            rows,
            softmax_scale,
            heads,
            q.stride()[:2],
            CAUSAL=causal,
            W=widths,
            ROWS_BLOCK=rows_block(rows),
            BLOCK_M=tiles.queries,
            BLOCK_N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out, lse

    out = in_parts(attend, parts)
    if parts > 1:
        of_new.copy_(out)
    return result
