"""Selection of keys in three launches: the scores of all keys, lists of long rows, and the choice of the highest.

All three read lengths on the device. What they read and compute follows from a row's own length, whatever the table's
width.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mla_compile.ops.attention.kernels.choose_keys import choose_kernel, list_kernel
from mla_compile.ops.attention.kernels.chunks import rows_block
from mla_compile.ops.attention.kernels.index_scores import scores_kernel
from mla_compile.ops.dependent_launch import early_options
from mla_compile.ops.device import device_of, power_of_two

_BLOCK = 8192
"""Scores that a program holds, and the room of its list: a power of two, at most 2**15."""
_SAMPLE = 4096
_SCAN = 2048
"""Scores whose places are added up at a time."""
_WORKSPACE = 2**25
"""Scores that exist at a time."""
_PROGRAMS = 8
"""Programs per multiprocessor that read keys: more than run at a time, as rows differ in length."""
_MIN_KEYS = 64


class _Rows(NamedTuple):
    """Arguments of both kernels, from `table` to `table_stride`."""

    table: Tensor
    k_lens: Tensor
    q_lens: Tensor
    has_q_lens: int
    rows: int
    parts: int
    q_len: int
    columns: int
    table_stride: int


def _select(
    q: Tensor, weights: Tensor, index_cache: Tensor, rows: _Rows, topk: int, *, page_size: int, most_keys: int
) -> Tensor:
    """Both launches, for as many tokens at a time as the workspace has room for."""
    (tokens, heads, dim), device = q.shape, device_of(q)
    q, weights, index_cache = q.contiguous(), weights.contiguous(), index_cache.contiguous()
    is_float = q.dtype == torch.float32  # runs on CUDA cores: tensor cores would round it
    room = 1 if is_float else (256 if device.capability[0] == 9 else 64) * 128 // power_of_two(dim)
    block_q = max(1, min(room // power_of_two(heads), triton.next_power_of_2(rows.q_len)))
    if page_size:
        blocks, selected = rows.rows * triton.cdiv(rows.q_len, block_q), rows.table.new_empty(tokens, topk)
    else:
        blocks = (
            tokens + rows.rows * (block_q - 1)
        ) // block_q  # the last one of each chunk may be nearly empty
        selected = rows.k_lens.new_full((tokens, topk), -1)  # tokens of no chunk select nothing
    width = triton.cdiv(most_keys, _BLOCK) * _BLOCK
    stride = width + (2 * _BLOCK + 16 if width > _BLOCK else 0)
    step = min(blocks, max(1, _WORKSPACE // (block_q * stride)))
    scores = rows.k_lens.new_empty(step, block_q, stride)
    programs = max(1, _PROGRAMS * device.multiprocessors // (step * rows.parts))
    splits = min(programs, triton.cdiv(most_keys, _MIN_KEYS * rows.parts))
    constants = {
        "PAGE_SIZE": page_size,
        "ROWS_BLOCK": rows_block(rows.rows),
        "BLOCK_Q": block_q,
    }
    choice = {**constants, "SCAN": _SCAN, "BLOCK": _BLOCK, "num_warps": 4}
    for first in range(0, blocks, step):
        some = min(step, blocks - first)
        arguments = (*rows, first, topk, stride)
        scores_kernel[(some, splits, rows.parts)](
            q,
            weights,
            index_cache,
            scores,
            *arguments,
            HEADS=heads,
            DIM=dim,
            BLOCK_N=16 if is_float else 64,
            MIN_KEYS=_MIN_KEYS,
            num_warps=8 if is_float or block_q * heads >= 128 else 4,
            num_stages=3 if block_q <= 4 else 2,  # two programs fit a multiprocessor of an H100
            **constants,
            **early_options(q),
        )
        if width > _BLOCK:
            grid = some * block_q, width // _BLOCK
            list_kernel[grid](scores, *arguments, width, SAMPLE=_SAMPLE, **choice)
        choose_kernel[(some * block_q,)](scores, selected, *arguments, width, **choice)
    return selected


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
    count, columns = block_table.shape
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    seq_lens = seq_lens.contiguous()
    lens = seq_lens if q_lens is None else q_lens.contiguous()
    rows = _Rows(table, seq_lens, lens, int(q_lens is not None), count, 1, q_len, columns, table.stride(0))
    page_size = index_cache.shape[1]
    return _select(q, weights, index_cache, rows, topk, page_size=page_size, most_keys=columns * page_size)


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
    (parts, columns), tokens = key_slots.shape, q.shape[0]
    count, slots = cu_seqlens_q.shape[0] - 1, key_slots.contiguous()
    rows = _Rows(slots, cu_seqlens_k.contiguous(), cu_seqlens_q, 0, count, parts, tokens, columns, columns)
    return _select(q, weights, index_cache, rows, topk, page_size=0, most_keys=parts * columns)
