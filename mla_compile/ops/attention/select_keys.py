"""`mla_decode_select`, `mla_prefill_select`: the keys that an indexer selects (DeepSeek-V3.2's sparse attention).

A key's score for a token is `sum_h weights[h] * relu(q[h] . k)`, in float32. The `topk` keys with the highest scores
are selected, the first ones among equals; all keys if a token sees no more than `topk`. The result are slots of the
paged caches, int32 `[tokens, topk]`, in the order of positions; -1 stands behind the last.
"""

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.attention.selection import NOT_SEEN, chosen_slots, highest, seen_in_parts
from mla_compile.ops.attention.softmax import product
from mla_compile.ops.dispatch import FLOATS, SOME, Allowed, reference, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.ordering import distinct_keys
from mla_compile.ops.paging import gather_latents, num_pages_to_read, slots_of, visible_keys

_LIMITS: dict[str, Allowed] = {
    "dtype": FLOATS,
    "weights.dtype": (torch.float32,),
    "tokens": SOME,
    "index_heads": range(1, 129),
    "index_dim": range(1, 257),
}
DECODE_SELECT = (
    triton(
        "scores, then a choice without a sort, in two or three launches",
        "mla_compile.ops.attention.kernels.select_keys:decode_select_triton",
        constraints=_LIMITS,
    ),
    reference("mla_compile.ops.attention.select_keys:decode_select_torch"),
)
PREFILL_SELECT = (
    triton(
        "scores, then a choice without a sort, in two or three launches",
        "mla_compile.ops.attention.kernels.select_keys:prefill_select_triton",
        constraints=_LIMITS,
    ),
    reference("mla_compile.ops.attention.select_keys:prefill_select_torch"),
)

QUERIES = {
    "q": "tokens, index_heads, index_dim",
    "weights": "float tokens, index_heads",
    "index_cache": "num_pages, page_size, index_dim",
}


@define_op(
    table=DECODE_SELECT,
    layouts=QUERIES
    | {"block_table": validate.TABLE, "seq_lens": "int32 rows", "q_lens": "int32 rows or None"},
)
def mla_decode_select(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    q_lens: Tensor | None,
    q_len: int,
    topk: int,
) -> Tensor:
    """`mla_select_keys` of decode rows, whose keys are in the cache already.

    Args:
        q, weights, index_cache, topk: see there; `[rows * q_len]` tokens.
        block_table, seq_lens, q_lens, q_len: see `mla_decode`.

    Raises:
        MLAError: an argument is invalid. Lengths are checked on the CPU only.
    """
    validate.tokens_of_rows("", q_len, q.shape[0], seq_lens.shape[0])
    validate.lengths("", seq_lens, block_table, index_cache)
    validate.within("q_lens", "lengths", q_lens, 0, q_len)
    validate.whole_number("topk", topk, 1)
    return empty(q, (q.shape[0], topk), torch.int32)


decode_select_op = torch.ops.mla_compile.mla_decode_select.default


@define_op(
    table=PREFILL_SELECT,
    layouts=QUERIES
    | {
        "cu_seqlens_q": "int32 rows + 1",
        "cu_seqlens_k": "int32 parts, rows + 1",
        "key_slots": "int64 parts, keys",
    },
)
def mla_prefill_select(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    key_slots: Tensor,
    topk: int,
) -> Tensor:
    """`mla_select_keys` of prompt chunks, whose keys are in the cache already.

    Args:
        q, weights, index_cache, topk: see there.
        cu_seqlens_q, cu_seqlens_k, key_slots: see `PrefillSegment`.

    Raises:
        MLAError: an argument is invalid. Lengths and slots are checked on the CPU only.
    """
    validate.key_ranges("", cu_seqlens_q, cu_seqlens_k, key_slots, q.shape[0], index_cache)
    validate.whole_number("topk", topk, 1)
    return empty(q, (q.shape[0], topk), torch.int32)


prefill_select_op = torch.ops.mla_compile.mla_prefill_select.default

_WORKSPACE = 2**25
"""Products of a head with a key that are computed at a time; float32."""


def _scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """`q` `[rows, n, heads, dim]`, `keys` `[rows, keys, dim]`, `weights` `[rows, n, heads]` to `[rows, n, keys]`."""
    products = product(q.flatten(1, 2), keys.mT).relu_().unflatten(1, q.shape[1:3])
    return torch.matmul(weights[:, :, None].to(products.dtype), products)[:, :, 0].float()


def _keys(scores: Tensor, is_seen: Tensor) -> Tensor:
    return torch.where(is_seen, distinct_keys(scores), NOT_SEEN)


def decode_select_torch(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    topk: int,
) -> Tensor:
    """`mla_decode_select` in plain torch, for every device and dtype. Lengths are read on the CPU only."""
    tokens, heads, page_size = q.shape[0], q.shape[1], index_cache.shape[1]
    if tokens == 0:
        return block_table.new_empty(0, topk)
    columns = num_pages_to_read(seq_lens, block_table, page_size)
    seen = visible_keys(seq_lens, q_lens, q_len)[..., None]
    position = torch.arange(columns * page_size, device=q.device)
    q, weights = q.unflatten(0, (-1, q_len)), weights.unflatten(0, (-1, q_len))
    step = max(1, _WORKSPACE // (q_len * heads * columns * page_size))
    found = []
    for first in range(0, len(seq_lens), step):
        rows = slice(first, first + step)
        table, lens = block_table[rows], seq_lens[rows]
        keys = gather_latents(index_cache, table, columns, lens, index_cache.shape[2], q.dtype)
        found.append(highest(_keys(_scores(q[rows], keys, weights[rows]), position < seen[rows]), topk))
    row = torch.arange(len(seq_lens), device=q.device)[:, None, None]
    return slots_of(block_table, row, torch.cat(found), page_size).flatten(0, 1).to(torch.int32)


def prefill_select_torch(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    key_slots: Tensor,
    topk: int,
) -> Tensor:
    """`mla_prefill_select` in plain torch, for every device and dtype. The host reads nothing."""
    tokens, heads, dim = q.shape
    parts, count = key_slots.shape
    keys = index_cache.view(-1, dim).index_select(0, key_slots.flatten().clamp(min=0))
    begin, end = seen_in_parts(tokens, cu_seqlens_q, cu_seqlens_k)
    place = torch.arange(count, device=q.device)
    step = max(1, _WORKSPACE // (heads * parts * count))
    found = [torch.empty(0, topk, dtype=torch.int32, device=q.device)]
    for first in range(0, tokens, step):
        some = slice(first, first + step)
        is_seen = (place >= begin[some, :, None]) & (place < end[some, :, None])
        scores = _scores(q[None, some], keys[None], weights[None, some])[0]
        found.append(chosen_slots(key_slots, highest(_keys(scores, is_seen.flatten(1)), topk)))
    return torch.cat(found)
