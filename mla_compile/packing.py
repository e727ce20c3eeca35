"""Rows of a step in, a batch for one's own compiled module out: `pack_batch`.

    your rows      r0: 3 tokens, decodes      r1: 5 tokens, a prompt      r2: 2 tokens, decodes

    packed         r0 r0 r0 · | r2 r2 · ·     r1 r1 r1 r1 r1 · · ...      · repeats your first token, writes nowhere
                   └ decode rows, q_len 4 ┘   └ prompt chunks ┘

What varies from batch to batch is marked for the compiler, so that all padded batches together make three graphs for
one `num_speculative_tokens`: decode rows alone, prompts alone, both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment
from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.attention.decode_backends import QueryLenSupport, select_backend
from mla_compile.ops.attention.segments import (
    MAX_KEYS,
    MIN_KEYS,
    copied_to,
    decode_segment,
    pad_table,
    prefill_segment,
)
from mla_compile.ops.dispatch import Call, describe_device
from mla_compile.torch_internals import SizeName, mark_varying, refuse, size_name

MIN_TOKENS = 2
"""The fewest of either kind, where there are any: Inductor asks of some products whether they have one row."""
MIN_PAGES = 2
"""The fewest columns of a block table: for CUDA graphs Inductor asks whether a tensor's strides are the same."""


@dataclass(frozen=True)
class PackedBatch:
    """What `pack_batch` makes; `out[packed.order]` is the module's output with its tokens in your order.

    batch: for `mla_attention`.
    positions: of the tokens, int64 `[tokens]`.
    tensors: the per-token tensors that were given, each `[tokens, ...]`.
    order: where each token that was given is now, int64 `[sum(query_lens)]`.
    last: where each row's last token is now, int64 `[len(query_lens)]`. A module that takes it may compute logits for
        these alone: `head(hidden.index_select(0, last))`.
    """

    batch: MLABatch
    positions: Tensor
    tensors: tuple[Tensor, ...]
    order: Tensor
    last: Tensor


def pack_batch(
    query_lens: Sequence[int],
    num_cached: Sequence[int],
    block_table: Tensor,
    *per_token: Tensor,
    has_sampled: Sequence[bool],
    page_size: int,
    num_speculative_tokens: int = 0,
    backend: str | None = None,
    pad: bool = True,
) -> PackedBatch:
    """Pack the tokens that rows run in one step, decode rows first, and say which are whose.

        packed = pack_batch([1, 5], [17, 0], block_table, token_ids, has_sampled=[True, False], page_size=16)
        logits = compiled(*packed.tensors, packed.positions, packed.batch)[packed.order]

    A row decodes if it has sampled since its latents were last built and has at most `1 + num_speculative_tokens`
    query tokens; all others are prompt chunks. Attention is exact on both ways; decode is the quick one for few
    tokens, prefill for many. Call it outside of what you compile, and call the module in one grad mode: each of
    `no_grad`, `inference_mode` and neither is a graph to torch.

    Args:
        query_lens: tokens of each row in this step, >= 1.
        num_cached: tokens that each row holds in the cache before it, >= 0.
        block_table: pages of each row, int32 `[rows, max_pages]`, on the device of the model. Page 0 is the dummy page,
            which belongs to no row.
        per_token: tensors `[sum(query_lens), ...]`, the rows' tokens one after the other: token ids, say.
        has_sampled: whether a row has sampled a token since its latents were last built. A prompt has not, nor a row
            that was preempted and runs again.
        page_size: tokens a page of the cache.
        num_speculative_tokens: drafts of a step, k >= 0: rows that decode have up to 1 + k query tokens.
        backend: the decode backend to use, by name; None is the automatic choice.
        pad: give every decode row 1 + k query tokens, and round the number of decode rows up to a power of two and
            that of prompt tokens up to one of four sizes for a factor of two, so that few CUDA graphs serve all
            batches. Padding sees nothing and writes nowhere. Without it each number of query tokens is a graph of its
            own, and one token is padded to two all the same. Decode rows then have as many query tokens as the longest;
            of a backend that takes one length only, the shortest rows decode and the others prefill.

    Raises:
        MLAError: an argument that is not so, by name, or a backend that cannot serve.
    """
    if torch.compiler.is_compiling():
        hint = "call it before the compiled module, and give that packed.tensors and packed.batch"
        refuse("pack_batch", "a call outside of compiled code", "one inside of it", hint)
    validate.whole_number("num_speculative_tokens", num_speculative_tokens, 0)
    validate.row_lengths("query_lens", query_lens, num_cached, block_table, page_size)
    validate.list_of(bool, "has_sampled", has_sampled, block_table.shape[0])
    if block_table.shape[0] == 0:
        raise MLAError("block_table", "at least one row", list(block_table.shape))
    given: tuple[object, ...] = per_token
    for i, tensor in enumerate(given):
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.shape[0] != sum(query_lens):
            expected = f"a tensor [{sum(query_lens)}, ...], the tokens of query_lens one after the other"
            raise MLAError(f"per_token[{i}]", expected, validate.shown(tensor))
    device = block_table.device
    block_table = pad_table(block_table, columns=MIN_PAGES - block_table.shape[1])
    # Of the automatic choice, what the first one takes that runs on the device.
    call = Call(*describe_device(device), captured=True if backend is None else None)
    support = select_backend(call, backend).chosen.query_len_support
    layout = classify(
        query_lens, has_sampled, threshold=1 + num_speculative_tokens, support=support, padded=pad
    )
    decode = prefill = None
    if layout.decode:
        lens, held, table = _rows(layout.decode, query_lens, num_cached, block_table)
        least = MIN_TOKENS if layout.q_len == 1 else 1
        num_rows = max(least, padded_rows(len(lens)) if pad else len(lens))
        padding = [0] * (num_rows - len(lens))
        # Always given, so that rows of one length are no graph of their own; a UNIFORM backend would flatten them.
        all_valid = support is QueryLenSupport.UNIFORM and {*lens, *padding} == {layout.q_len}
        decode, _ = decode_segment(
            _upload(held + padding, torch.int32, device),
            pad_table(table, rows=len(padding)),
            q_len=layout.q_len,
            page_size=page_size,
            q_lens=None if all_valid else _upload(lens + padding, torch.int32, device),
            backend=backend,
        )
    if layout.prefill:
        lens, held, table = _rows(layout.prefill, query_lens, num_cached, block_table)
        padded = prompt_padding(lens, held, capacity=table.shape[1] * page_size, pad=pad)
        prefill, _ = prefill_segment(lens, held, table, page_size=page_size, **padded)
    order, source, positions, last = _order(query_lens, num_cached, layout, decode, prefill)
    packed = PackedBatch(
        batch=MLABatch(decode, prefill),
        positions=copied_to(device, positions),
        tensors=tuple(tensor.index_select(0, copied_to(tensor.device, source)) for tensor in per_token),
        order=copied_to(device, order),
        last=copied_to(device, last),
    )
    _mark(packed)
    return packed


@dataclass(frozen=True)
class RowLayout:
    """Rows by their index, in the order given.

    decode: rows of the decode segment.
    q_len: query tokens of each of them, padding included; 0 where there is none.
    prefill: rows of the prefill segment.
    """

    decode: list[int]
    q_len: int
    prefill: list[int]


def classify(
    query_lens: Sequence[int],
    has_sampled: Sequence[bool],
    *,
    threshold: int,
    support: QueryLenSupport,
    padded: bool,
) -> RowLayout:
    """Deal rows to decode and prefill.

    Rows that have not sampled since their latents were last built prefill, whatever their length.

    Args:
        query_lens: query tokens of each row in this step, >= 1.
        has_sampled: of each row, see `pack_batch`.
        threshold: up to so many are decode, >= 1.
        support: of the decode backend. SINGLE_ONLY takes what VARLEN does, flattened.
        padded: give all rows `threshold` query tokens, so that one captured shape serves every step. Otherwise a
            UNIFORM backend decodes the rows of the smallest length only.
    """
    decode = [row for row, n in enumerate(query_lens) if has_sampled[row] and n <= threshold]
    if not padded and support is QueryLenSupport.UNIFORM:
        shortest = min((query_lens[row] for row in decode), default=0)
        decode = [row for row in decode if query_lens[row] == shortest]
    longest = max((query_lens[row] for row in decode), default=0)
    chosen = set(decode)
    return RowLayout(
        decode=decode,
        q_len=threshold if padded and decode else longest,
        prefill=[row for row in range(len(query_lens)) if row not in chosen],
    )


def padded_prompt_tokens(count: int, most: int | None = None) -> int:
    """The least size that prompts are padded to with room for `count` tokens, `most` being one; 0 for none.

    Each size is captured by itself. There are few, four for a factor of two, and below 128 the multiples of 16.
    """
    unit = max(16, 1 << ((count - 1).bit_length() - 3)) if count > 16 else 16
    size = -(-count // unit) * unit
    return most if most is not None and max(count, MIN_TOKENS) <= most < size else size


def fitting_prompt_tokens(room: int) -> int:
    """The largest size that prompts are padded to that is not above `room`; `room` itself below all of them."""
    unit = max(16, 1 << (room.bit_length() - 3)) if room > 16 else 16
    return room // unit * unit or room


def prompt_padding(
    chunk_lens: Sequence[int],
    num_cached: Sequence[int],
    *,
    capacity: int,
    pad: bool,
    most: int | None = None,
) -> dict[str, int]:
    """The sizes that `prefill_segment` pads chunks to: few, as a CUDA graph is recorded for each; the least without.

    Chunks are padded to a power of four, those of padding included; keys, where some are cached, to a power of two.
    capacity: tokens of a row at most. most: see `padded_prompt_tokens`.
    """
    if not pad:
        return {"num_tokens": MIN_TOKENS}
    count = sum(chunk_lens)
    tokens = padded_prompt_tokens(count, most)
    keys = tokens
    if any(num_cached):
        keys = max(1024, padded_rows(count + sum(cached % MAX_KEYS for cached in num_cached)))
    needed, chunks = len(chunk_lens) + max(1, -(-(tokens - count) // capacity)), 4
    while chunks < needed:
        chunks *= 4
    return {"num_tokens": tokens, "num_chunks": chunks, "num_keys": keys}


def padded_rows(count: int) -> int:
    """The power of two that a number of rows is padded to, >= 1."""
    return 1 << (count - 1).bit_length()


def _rows(
    rows: list[int], query_lens: Sequence[int], num_cached: Sequence[int], block_table: Tensor
) -> tuple[list[int], list[int], Tensor]:
    """What is given of some of the rows."""
    table = block_table.index_select(0, _upload(rows, torch.int64, block_table.device))
    return [query_lens[row] for row in rows], [num_cached[row] for row in rows], table


def _upload(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return copied_to(device, torch.tensor(values, dtype=dtype, device="cpu"))


def _order(
    query_lens: Sequence[int],
    num_cached: Sequence[int],
    layout: RowLayout,
    decode: DecodeSegment | None,
    prefill: PrefillSegment | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the rows' tokens go, which of them each packed token is, the first one for padding, its position, and where
    each row's last token goes."""
    num_decode_tokens = 0 if decode is None else decode.slot_mapping.shape[0]
    num_prefill_tokens = 0 if prefill is None else prefill.slot_mapping.shape[0]
    starts, end = [0] * len(query_lens), num_decode_tokens
    for i, row in enumerate(layout.decode):
        starts[row] = i * layout.q_len
    for row in layout.prefill:
        starts[row], end = end, end + query_lens[row]
    lens, begins, held = torch.tensor([list(query_lens), starts, list(num_cached)], device="cpu")
    token = torch.arange(int(lens.sum()), device="cpu")
    within_row = token - (lens.cumsum(0) - lens).repeat_interleave(lens)
    order = begins.repeat_interleave(lens) + within_row
    source = torch.zeros(num_decode_tokens + num_prefill_tokens, dtype=torch.int64, device="cpu")
    source[order] = token
    positions = held.repeat_interleave(lens) + within_row
    return order, source, positions[source], begins + lens - 1


def _mark(packed: PackedBatch) -> None:
    """Tell the compiler which sizes vary from batch to batch, and which of them are the same."""
    decode, prefill = packed.batch.decode, packed.batch.prefill
    names: dict[str, SizeName] = {}

    def mark(size: str, *tensors: Tensor | None, dim: int = 0, least: int = 1) -> None:
        name = names.setdefault(size, size_name(size, least))
        for tensor in tensors:
            if tensor is not None:
                mark_varying(tensor, dim, name=name)

    mark("tokens", packed.positions, *packed.tensors, least=MIN_TOKENS)
    mark("order", packed.order)
    mark("rows given", packed.last)
    if decode is not None:
        size = "tokens" if prefill is None else "decode tokens"
        mark(size, decode.slot_mapping, least=MIN_TOKENS)
        mark("rows", decode.seq_lens, decode.block_table, decode.q_lens)
        mark("pages", decode.block_table, dim=1, least=MIN_PAGES)
    if prefill is not None:
        size = "tokens" if decode is None else "prefill tokens"
        mark(size, prefill.slot_mapping, least=MIN_TOKENS)
        mark("chunks", prefill.seq_lens, prefill.block_table, prefill.host_lens)
        mark("chunks + 1", prefill.cu_seqlens_q, least=2)
        mark("chunks + 1", prefill.cu_seqlens_k, dim=1, least=2)
        mark("parts", prefill.cu_seqlens_k, prefill.key_slots)
        mark("keys", prefill.key_slots, dim=1, least=MIN_KEYS)
        mark("pages", prefill.block_table, dim=1, least=MIN_PAGES)
