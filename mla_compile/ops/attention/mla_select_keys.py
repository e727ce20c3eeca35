"""`mla_select_keys`: the op that an indexer calls, and its definition in terms of the segment ops."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile.batch import MLABatch
from mla_compile.ops import validate
from mla_compile.ops.attention.append import append_op
from mla_compile.ops.attention.mla_attention import joined_slots, segment_arguments
from mla_compile.ops.attention.select_keys import QUERIES, decode_select_op, prefill_select_op
from mla_compile.ops.library import define_op, empty


class SelectOperands(NamedTuple):
    """The arguments of the op `mla_select_keys`, with the fields of a batch flattened."""

    q: Tensor
    k: Tensor
    weights: Tensor
    index_cache: Tensor
    decode_seq_lens: Tensor | None
    decode_block_table: Tensor | None
    decode_slot_mapping: Tensor | None
    decode_q_lens: Tensor | None
    prefill_cu_seqlens_q: Tensor | None
    prefill_slot_mapping: Tensor | None
    prefill_key_slots: Tensor | None
    prefill_cu_seqlens_k: Tensor | None
    q_len: int
    page_size: int
    topk: int


@define_op(
    layouts=QUERIES | {"k": "tokens, index_dim"},
    run=lambda *args: lower_select_keys(*args),
    name="mla_select_keys",
    mutates=("index_cache",),
    static="page_size",
)
def _select_keys(call: SelectOperands) -> Tensor:
    validate.whole_number("topk", call.topk, 1)
    return empty(call.q, (call.q.shape[0], call.topk), torch.int32)


select_keys_op = torch.ops.mla_compile.mla_select_keys.default


def lower_select_keys(*args: Any) -> Tensor:
    """The unified op in terms of segment ops; see `lower_mla_attention`."""
    call = SelectOperands(*args)
    decode_slots, prefill_slots = call.decode_slot_mapping, call.prefill_slot_mapping
    half = call.k.shape[1] // 2
    slots = joined_slots(decode_slots, prefill_slots)
    append_op(call.k[:, :half], call.k[:, half:], call.index_cache, slots)
    decode_q = prefill_q = call.q
    decode_weights = prefill_weights = call.weights
    if decode_slots is not None and prefill_slots is not None:
        sizes = [decode_slots.shape[0], prefill_slots.shape[0]]
        decode_q, prefill_q = torch.split(call.q, sizes)
        decode_weights, prefill_weights = torch.split(call.weights, sizes)
    found = []
    if decode_slots is not None:
        rows = call.decode_block_table, call.decode_seq_lens, call.decode_q_lens, call.q_len
        found.append(decode_select_op(decode_q, decode_weights, call.index_cache, *rows, call.topk))
    if prefill_slots is not None:
        keys = call.prefill_cu_seqlens_q, call.prefill_cu_seqlens_k, call.prefill_key_slots
        found.append(prefill_select_op(prefill_q, prefill_weights, call.index_cache, *keys, call.topk))
    return found[0] if len(found) == 1 else torch.cat(found)


def mla_select_keys(
    q: Tensor, k: Tensor, weights: Tensor, index_cache: Tensor, batch: MLABatch, *, topk: int
) -> Tensor:
    """The slots of the keys that an indexer selects for each token, after appending the new keys to its cache.

    Tokens, `batch` and compilation are as in `mla_attention`, whose `selected` the result is.

    Args:
        q: the indexer's queries, rotated, `[tokens, index_heads, index_dim]`, float.
        k: its keys, normalised and rotated, `[tokens, index_dim]`, same dtype.
        weights: of its heads, `[tokens, index_heads]`, float32; they include every factor of the scores.
        index_cache: its cache, `[num_pages, page_size, index_dim]`, contiguous, the dtype of `q`, with the pages of
            `batch`; mutated.
        batch: the segments of the batch, which assign its tokens to rows.
        topk: the number of keys to select, >= 1.

    Returns:
        int32 `[tokens, topk]`, in the order of positions, then -1; `select_keys.py` defines the scores.

    Raises:
        MLAError: an argument is invalid; raised before the cache is written.
    """
    segments, q_len, _ = segment_arguments(batch, q, index_cache, "q")
    arguments: tuple[Any, ...] = q, k, weights, index_cache, *segments, q_len, batch.page_size, topk
    return _select_keys(*arguments)
