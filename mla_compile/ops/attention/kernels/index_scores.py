"""Scores of an indexer: all keys of a row for a block of its query tokens, decode rows and prompt chunks alike.

A program holds the queries of some tokens, all heads, and reads its share of their row's keys: keys are the matrix rows
of its products. It writes integers of the order of the scores, at the keys' positions in the row.
"""

import triton
import triton.language as tl

from mla_compile.ops.attention.kernels.chunks import block_of
from mla_compile.ops.attention.kernels.latents import padded
from mla_compile.ops.attention.kernels.softmax import split_of
from mla_compile.ops.dependent_launch import wait_for_kernel_before
from mla_compile.ops.reductions.kernels.keys import in_order

VARYING = (
    "k_lens",
    "q_lens",
    "has_q_lens",
    "rows",
    "parts",
    "q_len",
    "columns",
    "table_stride",
    "first_block",
    "topk",
)
"""The arguments that change from call to call: compiled code is not specialised on them."""


@triton.jit
def tokens_of(
    block, k_lens, q_lens, has_q_lens, rows, parts, q_len, most_keys, PAGE_SIZE, ROWS_BLOCK, BLOCK_Q
):
    """A block's row, its first token in the row, the row's first token, its tokens, those that see keys, its keys."""
    if PAGE_SIZE > 0:
        blocks = tl.cdiv(q_len, BLOCK_Q)
        row = block // blocks
        valid = tl.load(q_lens + row, mask=has_q_lens != 0, other=q_len)
        keys = tl.minimum(tl.load(k_lens + row), most_keys)
        return row, (block % blocks) * BLOCK_Q, row * q_len, q_len, valid, keys
    else:
        row, first = block_of(q_lens, rows, block, 1, ROWS_BLOCK, BLOCK_Q)
        start = tl.load(q_lens + row, mask=row < rows, other=0)
        count = tl.load(q_lens + row + 1, mask=row < rows, other=0) - start
        keys = 0
        for part in range(parts):
            keys += part_of(k_lens, part, row, rows)[1]
        return row, tl.where(row < rows, first, 0), start, count, count, keys  # a surplus block has no tokens


@triton.jit
def part_of(cu_seqlens_k, part, row, rows):
    """The place of a row's first key in a part of the keys of prompt chunks, and the number of its keys there."""
    at = cu_seqlens_k + part * (rows + 1) + row
    begin = tl.load(at, mask=row < rows, other=0)
    return begin, tl.load(at + 1, mask=row < rows, other=0) - begin


@triton.jit
def slots(table, key, inside, PAGE_SIZE: tl.constexpr):
    """Slots of keys, int64, from a row's pages or its slots; a slot that exists for those that are not inside."""
    if PAGE_SIZE > 0:
        page = tl.load(table + key // PAGE_SIZE, mask=inside, other=0)
        return page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    else:
        return tl.maximum(tl.load(table + key, mask=inside, other=0), 0)


@triton.jit(do_not_specialize=VARYING)
def scores_kernel(
    q,  # [tokens, HEADS, DIM], contiguous
    weights,  # float32 [tokens, HEADS], contiguous
    index_cache,  # [slots, DIM], contiguous
    scores,  # int32 [blocks, BLOCK_Q, stride]
    table,  # decode: block_table, int32 [rows, columns]; prompts: key_slots, int64 [parts, columns]
    k_lens,  # seq_lens, int32 [rows]; cu_seqlens_k, int32 [parts, rows + 1]
    q_lens,  # int32 [rows], unread unless has_q_lens; cu_seqlens_q, int32 [rows + 1]
    has_q_lens,
    rows,
    parts,
    q_len,
    columns,
    table_stride,
    first_block,
    topk,
    stride,  # of a token's scores
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: prompts
    ROWS_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The scores of one split of a part's keys for a block of tokens; grid `[blocks, splits, parts]`."""
    wait_for_kernel_before(EARLY)
    HEADS_BLOCK: tl.constexpr = padded(HEADS)
    row, first, start, count, valid, keys = tokens_of(
        first_block + tl.program_id(0), k_lens, q_lens, has_q_lens, rows, parts, q_len, columns * PAGE_SIZE,
        PAGE_SIZE, ROWS_BLOCK, BLOCK_Q,
    )  # fmt: skip
    # Of the block's last token; earlier ones ignore the scores of later keys.
    seen = tl.where(valid > first, keys - tl.maximum(valid - first - BLOCK_Q, 0), 0)
    if seen <= topk:
        return  # all are selected
    low = 0
    if PAGE_SIZE > 0:
        table += row.to(tl.int64) * table_stride
    else:
        part = tl.program_id(2)
        for earlier in range(part):
            low += part_of(k_lens, earlier, row, rows)[1]
        begin, length = part_of(k_lens, part, row, rows)
        table += part * table_stride + begin - low
        seen = tl.minimum(seen, low + length)
    begin, stop = split_of(seen - low, tl.program_id(1), tl.num_programs(1), BLOCK_N, MIN_KEYS)
    begin, stop = low + begin, low + stop
    if begin >= stop:
        return

    r, d = tl.arange(0, BLOCK_Q * HEADS_BLOCK), tl.arange(0, padded(DIM))
    head = r % HEADS_BLOCK
    exists = (first + r // HEADS_BLOCK < count) & (head < HEADS)
    query = (start + first + r // HEADS_BLOCK).to(tl.int64) * HEADS + head
    query_at = q + query[:, None] * DIM + d[None, :]
    queries = tl.trans(tl.load(query_at, mask=exists[:, None] & (d < DIM)[None, :], other=0.0))
    weight = tl.load(weights + query, mask=exists, other=0.0)
    out = scores + (tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)).to(tl.int64) * stride
    n = tl.arange(0, BLOCK_N)
    slot = slots(table, begin + n, begin + n < stop, PAGE_SIZE)
    for tile in range(begin, stop, BLOCK_N):
        key = tile + n
        k = tl.load(index_cache + slot[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0)
        # One tile ahead, so that the next iteration knows the keys' addresses.
        slot = slots(table, key + BLOCK_N, key + BLOCK_N < stop, PAGE_SIZE)
        products = tl.maximum(tl.dot(k, queries, input_precision="ieee"), 0.0) * weight[None, :]
        found = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_Q, HEADS_BLOCK]), 2)
        tl.store(out[None, :] + key[:, None], in_order(found), mask=(key < stop)[:, None])
