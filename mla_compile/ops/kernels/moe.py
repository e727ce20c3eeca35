"""Routed experts for a few tokens, in three launches: gate and up, down, the weighted sum over a token's experts.

With few tokens the time is that of reading the chosen experts' weights once. So nothing is sorted or gathered first:
each program takes one expert and a tile of its columns, finds the expert's tokens among all (token, choice) pairs by
itself, and streams the columns' weights past them. Grids follow from shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_compile.ops.kernels.plan import MoeTiles, device_of, moe_tiles, power_of_two

_MOST_AT_ONCE = 128
"""Pairs that a program looks at in one go while it finds its own: a tile of them times tokens is held in registers."""


@triton.jit
def _runs(token, row_lens, rows, q_len):
    """Whether a token is none of the padding in the first `rows * q_len` tokens."""
    row = token // q_len
    return token - row * q_len < tl.load(row_lens + row, mask=row < rows, other=q_len)


@triton.jit
def _chosen(topk_ids, pair, pairs, row_lens, rows, q_len, TOPK: tl.constexpr, PADDED: tl.constexpr):
    """The experts of pairs; -1 past the last pair and for those of padding."""
    inside = pair < pairs
    if PADDED:
        inside &= _runs(pair // TOPK, row_lens, rows, q_len)
    return tl.load(topk_ids + pair, mask=inside, other=-1)


@triton.jit
def _expert(
    topk_ids,
    slot,
    pairs,
    row_lens,
    rows,
    q_len,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The expert that a slot stands for, and how many pairs chose it.

    A slot is an expert, or with BY_PAIR a pair: then the first pair of an expert stands for it, and the count is 0
    for the others, so that few pairs make few programs.
    """
    expert = slot
    if BY_PAIR:
        expert = _chosen(topk_ids, slot, pairs, row_lens, rows, q_len, TOPK, PADDED).to(tl.int32)
    count = 0
    earlier = 0
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        mine = _chosen(topk_ids, pair, pairs, row_lens, rows, q_len, TOPK, PADDED) == expert
        count += tl.sum(mine.to(tl.int32), 0)
        earlier += tl.sum((mine & (pair < slot)).to(tl.int32), 0)
    if BY_PAIR:
        count = tl.where((earlier > 0) | (expert < 0), 0, count)
    return expert, count


@triton.jit
def _members(
    topk_ids,
    expert,
    pairs,
    wanted,
    row_lens,
    rows,
    q_len,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The pairs that are the `wanted[i]`-th of those that chose the expert, int64; 0 where there are fewer."""
    result = tl.zeros_like(wanted)
    seen = 0
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = _chosen(topk_ids, pair, pairs, row_lens, rows, q_len, TOPK, PADDED)
        mine = (chosen == expert).to(tl.int32)
        rank = tl.where(mine == 1, seen + tl.cumsum(mine, 0) - 1, -1)
        result += tl.sum(tl.where(rank[None, :] == wanted[:, None], pair[None, :], 0), 1)
        seen += tl.sum(mine, 0)
    return result.to(tl.int64)


@triton.jit
def gate_up_kernel(
    x,  # [tokens, HIDDEN], rows x_stride apart
    topk_ids,  # int64 [tokens, TOPK]
    w_gate_up,  # [experts, 2 * INTERMEDIATE, HIDDEN]
    activated,  # [tokens * TOPK, INTERMEDIATE], in the dtype of x
    pairs,  # tokens * TOPK
    row_lens,  # int32 [rows], unread unless PADDED
    rows,
    q_len,
    x_stride,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`silu(gate) * up` of one slot's pairs, BLOCK_C columns; grid `[column tiles, slots]`."""
    expert, count = _expert(
        topk_ids, tl.program_id(1), pairs, row_lens, rows, q_len, TOPK, PADDED, BY_PAIR, CHUNK
    )
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    gate_row = (expert.to(tl.int64) * (2 * INTERMEDIATE) + c) * HIDDEN
    gate_at = w_gate_up + gate_row[:, None]
    for first in range(0, count, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        pair = _members(topk_ids, expert, pairs, t, row_lens, rows, q_len, TOPK, PADDED, CHUNK)
        x_at = x + (pair // TOPK * x_stride)[:, None]
        gate = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        up = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for start in range(0, HIDDEN, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            in_row = (c < INTERMEDIATE)[:, None] & (k < HIDDEN)
            tokens = tl.load(x_at + k, mask=(t < count)[:, None] & (k < HIDDEN), other=0.0)
            w_gate = tl.load(gate_at + k, mask=in_row, other=0.0)
            w_up = tl.load(gate_at + INTERMEDIATE * HIDDEN + k, mask=in_row, other=0.0)
            gate = tl.dot(tokens, tl.trans(w_gate), gate, input_precision="ieee")
            up = tl.dot(tokens, tl.trans(w_up), up, input_precision="ieee")
        result = (gate / (1.0 + tl.exp(-gate)) * up).to(activated.dtype.element_ty)
        at = activated + pair[:, None] * INTERMEDIATE + c[None, :]
        tl.store(at, result, mask=(t < count)[:, None] & (c < INTERMEDIATE)[None, :])


@triton.jit
def down_kernel(
    activated,  # [pairs, INTERMEDIATE]
    topk_ids,  # int64 [pairs]
    w_down,  # [experts, HIDDEN, INTERMEDIATE]
    out,  # float32 [pairs, HIDDEN]
    pairs,
    row_lens,
    rows,
    q_len,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The down projection of one slot's pairs, BLOCK_C columns; grid `[column tiles, slots]`."""
    expert, count = _expert(
        topk_ids, tl.program_id(1), pairs, row_lens, rows, q_len, TOPK, PADDED, BY_PAIR, CHUNK
    )
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    w_at = w_down + ((expert.to(tl.int64) * HIDDEN + c) * INTERMEDIATE)[:, None]
    for first in range(0, count, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        pair = _members(topk_ids, expert, pairs, t, row_lens, rows, q_len, TOPK, PADDED, CHUNK)
        row_at = activated + (pair * INTERMEDIATE)[:, None]
        result = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for start in range(0, INTERMEDIATE, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            inner = tl.load(row_at + k, mask=(t < count)[:, None] & (k < INTERMEDIATE), other=0.0)
            w = tl.load(w_at + k, mask=(c < HIDDEN)[:, None] & (k < INTERMEDIATE), other=0.0)
            result = tl.dot(inner, tl.trans(w), result, input_precision="ieee")
        at = out + pair[:, None] * HIDDEN + c[None, :]
        tl.store(at, result, mask=(t < count)[:, None] & (c < HIDDEN)[None, :])


@triton.jit
def weighted_sum_kernel(
    pair_outs,  # float32 [tokens, TOPK, HIDDEN]
    topk_weights,  # [tokens, TOPK]
    out,  # [tokens, HIDDEN]
    row_lens,
    rows,
    q_len,
    TOPK: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """`sum_k weight_k * out_k` of one token, in the order of k, 0 for padding; grid `[tokens, column tiles]`."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    result = tl.zeros([BLOCK_C], tl.float32)
    there = c < HIDDEN
    if PADDED:
        there &= _runs(token, row_lens, rows, q_len)
    for k in tl.static_range(TOPK):
        weight = tl.load(topk_weights + token * TOPK + k).to(tl.float32)
        pair_out = tl.load(pair_outs + (token * TOPK + k) * HIDDEN + c, mask=there, other=0.0)
        # NaN weights of padding too: the mask is on both.
        result += tl.where(there, weight, 0.0) * pair_out
    tl.store(out + token * HIDDEN + c, result.to(out.dtype.element_ty), mask=c < HIDDEN)


def moe_triton(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    row_lens: Tensor | None = None,
    q_len: int = 1,
    *,
    gate_up: MoeTiles | None = None,
    down: MoeTiles | None = None,
) -> Tensor:
    """What `moe_experts_op` computes, with its arguments, on the GPU or in Triton's interpreter; sums in float32.

    The tiles are chosen by `plan.py` unless given. Nothing is read on the host.
    """
    tokens, hidden = x.shape
    experts, _, intermediate = w_down.shape
    topk = topk_ids.shape[1]
    pairs = tokens * topk
    x = x if x.stride(1) == 1 else x.contiguous()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()

    slots = min(pairs, experts)
    device = device_of(x)
    gate_up = gate_up or moe_tiles(pairs, experts, intermediate, x.dtype, device)
    down = down or moe_tiles(pairs, experts, hidden, x.dtype, device)
    shapes = {"HIDDEN": hidden, "INTERMEDIATE": intermediate, "BY_PAIR": pairs < experts}
    shapes["CHUNK"] = min(_MOST_AT_ONCE, power_of_two(pairs))
    padded = {"TOPK": topk, "PADDED": row_lens is not None}
    # A pointer that is not read: any will do.
    padding = (topk_ids, 0, 1) if row_lens is None else (row_lens.contiguous(), row_lens.shape[0], q_len)

    activated = x.new_empty((pairs, intermediate))
    pair_outs = x.new_empty((pairs, hidden), dtype=torch.float32)
    out = x.new_empty((tokens, hidden))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        gate_up_kernel[(triton.cdiv(intermediate, gate_up.columns), slots)](
            x,
            topk_ids,
            w_gate_up,
            activated,
            pairs,
            *padding,
            x.stride(0),
            **padded,
            **shapes,
            **gate_up.options(),
        )
        down_kernel[(triton.cdiv(hidden, down.columns), slots)](
            activated, topk_ids, w_down, pair_outs, pairs, *padding, **padded, **shapes, **down.options()
        )
        weighted_sum_kernel[(tokens, triton.cdiv(hidden, 1024))](
            pair_outs, topk_weights, out, *padding, **padded, HIDDEN=hidden, BLOCK_C=1024, num_warps=4
        )
    return out
