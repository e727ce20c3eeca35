"""Prefill: expanded causal attention of ragged prompt chunks, and of their cached context a bounded part at a time.

A program holds BLOCK_M queries of one head and walks over keys. New tokens come first; each part of the context is
gathered from its pages, expanded by two matrix products, attended to, and joined with what is there already.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.plan import PrefillTiles, device_of, nope_blocks, power_of_two, prefill_tiles
from mla_compile.ops.kernels.softmax import LN_2, LOG2_E
from mla_compile.ops.paging import longest_lens

CONTEXT_TOKENS = 16_384
"""Tokens of context that are expanded at a time, over all rows: it bounds the workspace."""


@triton.jit
def _attend(
    query,  # [BLOCK_M, NOPE_HEAD]
    query_tail,  # [BLOCK_M, NOPE_TAIL]; unread where that is 0
    query_pe,  # [BLOCK_M, ROPE]
    k_nope,
    k_pe,
    v,
    first_key,
    n,  # keys of this step, counted from first_key
    keys,
    last_visible,  # [BLOCK_M]: the last key that each query sees
    top,
    total,
    acc,
    scale,
    k_token_stride,
    pe_token_stride,
    v_token_stride,
    MASKED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_HEAD: tl.constexpr,
    NOPE_TAIL: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Take BLOCK_N keys into the running softmax of `accumulate`, which has queries as columns."""
    c = tl.arange(0, NOPE_HEAD)
    p = tl.arange(0, ROPE_BLOCK)
    d = tl.arange(0, VALUE_BLOCK)
    token = (first_key + n).to(tl.int64)
    live = n < keys
    # Zeros past the end, not only masked scores: 0 x NaN is NaN.
    k = tl.load(
        k_nope + token[None, :] * k_token_stride + c[:, None],
        mask=live[None, :] & (c < NOPE)[:, None],
        other=0.0,
    )
    kp = tl.load(
        k_pe + token[None, :] * pe_token_stride + p[:, None],
        mask=live[None, :] & (p < ROPE)[:, None],
        other=0.0,
    )
    value = tl.load(
        v + token[:, None] * v_token_stride + d[None, :],
        mask=live[:, None] & (d < VALUE)[None, :],
        other=0.0,
    )
    scores = tl.dot(query, k, input_precision="ieee")
    if NOPE_TAIL > 0:
        t = NOPE_HEAD + tl.arange(0, NOPE_TAIL)
        k_tail = tl.load(
            k_nope + token[None, :] * k_token_stride + t[:, None],
            mask=live[None, :] & (t < NOPE)[:, None],
            other=0.0,
        )
        scores = tl.dot(query_tail, k_tail, scores, input_precision="ieee")
    scores = tl.dot(query_pe, kp, scores, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(n[None, :] <= last_visible[:, None], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def prefill_kernel(
    q_nope,  # [tokens, heads, NOPE], any strides but the last; the others likewise
    q_pe,  # [tokens, heads, ROPE]
    k_nope,  # [tokens of keys, heads, NOPE]
    k_pe,  # [tokens of keys, ROPE]
    v,  # [tokens of keys, heads, VALUE]
    out,  # [tokens, heads, VALUE], contiguous
    lse,  # float32 [tokens, heads]
    cu_seqlens_q,  # int32 [rows + 1]
    seq_lens,  # int32 [rows], unread where IS_NEW
    softmax_scale,
    start,  # of this part of the context
    heads,
    q_token_stride,
    q_head_stride,
    q_pe_token_stride,
    q_pe_head_stride,
    k_token_stride,
    k_head_stride,
    pe_token_stride,
    v_token_stride,
    v_head_stride,
    IS_NEW: tl.constexpr,  # keys are the new tokens, packed as the queries; else `width` tokens of context a row
    width,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_HEAD: tl.constexpr,
    NOPE_TAIL: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid `[blocks of the longest chunk, heads, rows]`. Context is joined with what `out` and `lse` hold."""
    row = tl.program_id(2)
    head = tl.program_id(1)
    first_q = tl.load(cu_seqlens_q + row)
    q_len = tl.load(cu_seqlens_q + row + 1) - first_q
    # The last block of a chunk has the most keys: it starts first.
    m0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if m0 >= q_len:
        return
    m = m0 + tl.arange(0, BLOCK_M)
    if IS_NEW:
        first_key = first_q
        keys = tl.minimum(q_len, m0 + BLOCK_M)
        last_visible = m
        unmasked = m0 // BLOCK_N * BLOCK_N
    else:
        first_key = row * width
        keys = tl.minimum(tl.load(seq_lens + row) - q_len - start, width)
        if keys <= 0:
            return
        last_visible = tl.full([BLOCK_M], 0, tl.int32) + keys - 1
        unmasked = keys // BLOCK_N * BLOCK_N

    c = tl.arange(0, NOPE_HEAD)
    p = tl.arange(0, ROPE_BLOCK)
    d = tl.arange(0, VALUE_BLOCK)
    token = (first_q + m).to(tl.int64)
    inside = (m < q_len)[:, None]
    q_at = token * q_token_stride + head * q_head_stride
    q_pe_at = token * q_pe_token_stride + head * q_pe_head_stride
    query = tl.load(q_nope + q_at[:, None] + c[None, :], mask=inside & (c < NOPE)[None, :], other=0.0)
    query_tail = query
    if NOPE_TAIL > 0:
        t = NOPE_HEAD + tl.arange(0, NOPE_TAIL)
        query_tail = tl.load(
            q_nope + q_at[:, None] + t[None, :], mask=inside & (t < NOPE)[None, :], other=0.0
        )
    query_pe = tl.load(q_pe + q_pe_at[:, None] + p[None, :], mask=inside & (p < ROPE)[None, :], other=0.0)
    k_nope += head.to(tl.int64) * k_head_stride
    v += head.to(tl.int64) * v_head_stride

    scale = softmax_scale * LOG2_E
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    for n0 in range(0, unmasked, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        top, total, acc = _attend(
            query, query_tail, query_pe, k_nope, k_pe, v, first_key, n, keys, last_visible, top, total, acc, scale,
            k_token_stride, pe_token_stride, v_token_stride,
            False, NOPE, ROPE, VALUE, NOPE_HEAD, NOPE_TAIL, ROPE_BLOCK, VALUE_BLOCK,
        )  # fmt: skip
    for n0 in range(unmasked, keys, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        top, total, acc = _attend(
            query, query_tail, query_pe, k_nope, k_pe, v, first_key, n, keys, last_visible, top, total, acc, scale,
            k_token_stride, pe_token_stride, v_token_stride,
            True, NOPE, ROPE, VALUE, NOPE_HEAD, NOPE_TAIL, ROPE_BLOCK, VALUE_BLOCK,
        )  # fmt: skip

    result = acc / total[:, None]  # every query sees a key: itself, or the first of the context
    log_sum = (top + tl.log2(total)) * LN_2
    lse_at = lse + token * heads + head
    out_at = out + (token * heads + head)[:, None] * VALUE + d[None, :]
    written = inside & (d < VALUE)[None, :]
    if not IS_NEW:
        # `ops.softmax.merge`
        before = tl.load(lse_at, mask=m < q_len, other=0.0)
        highest = tl.maximum(before, log_sum)
        share = tl.exp(log_sum - highest)
        share_before = tl.exp(before - highest)
        both = share + share_before
        earlier = tl.load(out_at, mask=written, other=0.0).to(tl.float32)
        result = (result * share[:, None] + earlier * share_before[:, None]) / both[:, None]
        log_sum = highest + tl.log(both)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=written)
    tl.store(lse_at, log_sum, mask=m < q_len)


@triton.jit
def gather_kernel(
    kv_cache,  # [pages, PAGE_SIZE, WIDTH], contiguous
    block_table,  # int32 [rows, pages], rows table_stride apart
    cu_seqlens_q,  # int32 [rows + 1]
    seq_lens,  # int32 [rows]
    latents,  # [rows, width, WIDTH]
    start,
    width,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A row's context from position `start` on, with zeros past its end; grid `[token blocks, rows]`."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, WIDTH_BLOCK)
    q_len = tl.load(cu_seqlens_q + row + 1) - tl.load(cu_seqlens_q + row)
    position = start + n
    live = (n < width) & (position < tl.load(seq_lens + row) - q_len)
    page = tl.load(block_table + row * table_stride + position // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    at = kv_cache + (page * PAGE_SIZE + position % PAGE_SIZE)[:, None] * WIDTH + c[None, :]
    in_row = (c < WIDTH)[None, :]
    found = tl.load(at, mask=live[:, None] & in_row, other=0.0)
    tl.store(
        latents + (row * width + n)[:, None] * WIDTH + c[None, :], found, mask=(n < width)[:, None] & in_row
    )


def prefill_triton(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    host_lens: Tensor,
    softmax_scale: float,
    *,
    tiles: PrefillTiles | None = None,
    context_tokens: int = CONTEXT_TOKENS,
) -> Tensor:
    """What `mla_prefill` computes, with its arguments, on the GPU or in Triton's interpreter.

    Sizes come from `host_lens`; nothing is read from the device.
    """
    tokens, heads, nope = q_nope.shape
    rope, value = q_pe.shape[2], v.shape[2]
    rows = seq_lens.shape[0]
    max_q, max_context = longest_lens(host_lens)
    nope_head, nope_tail = nope_blocks(nope)
    tiles = tiles or prefill_tiles(nope, rope, value, q_nope.dtype, device_of(q_nope))
    q_nope, q_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_nope, q_pe))
    # Parts that are joined stay in float32 until the last.
    out = v.new_empty(v.shape, dtype=torch.float32 if max_context > 0 else v.dtype)
    lse = v.new_empty((tokens, heads), dtype=torch.float32)

    def attend(k_nope: Tensor, k_pe: Tensor, v: Tensor, start: int, width: int, is_new: bool) -> None:
        k_nope, k_pe, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_nope, k_pe, v))
        prefill_kernel[(triton.cdiv(max_q, tiles.queries), heads, rows)](
            q_nope,
            q_pe,
            k_nope,
            k_pe,
            v,
            out,
            lse,
            cu_seqlens_q,
            seq_lens,
            softmax_scale,
            start,
            heads,
            *q_nope.stride()[:2],
            *q_pe.stride()[:2],
            *k_nope.stride()[:2],
            k_pe.stride(0),
            *v.stride()[:2],
            IS_NEW=is_new,
            width=width,
            NOPE=nope,
            ROPE=rope,
            VALUE=value,
            NOPE_HEAD=nope_head,
            NOPE_TAIL=nope_tail,
            ROPE_BLOCK=power_of_two(rope),
            VALUE_BLOCK=power_of_two(value),
            BLOCK_M=tiles.queries,
            BLOCK_N=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    with torch.cuda.device_of(q_nope):  # Triton launches on the current device
        attend(k_nope, k_pe, v, 0, 0, is_new=True)
        _, page_size, columns = kv_cache.shape
        rank = w_uk.shape[2]
        block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        step = max(1, context_tokens // rows)
        for start in range(0, max_context, step):
            width = min(step, max_context - start)
            latents = kv_cache.new_empty((rows * width, columns))
            gather_kernel[(triton.cdiv(width, 16), rows)](
                kv_cache,
                block_table,
                cu_seqlens_q,
                seq_lens,
                latents,
                start,
                width,
                block_table.stride(0),
                PAGE_SIZE=page_size,
                WIDTH=columns,
                WIDTH_BLOCK=power_of_two(columns),
                BLOCK_T=16,
            )
            kv_c = latents[:, :rank].expand(heads, -1, -1)
            keys, values = torch.bmm(kv_c, w_uk.transpose(1, 2)), torch.bmm(kv_c, w_uv)
            attend(
                keys.transpose(0, 1), latents[:, rank:], values.transpose(0, 1), start, width, is_new=False
            )
    return out.to(v.dtype)
