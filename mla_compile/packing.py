"""`pack_batch`: packs the rows of a step into a batch for a user's own compiled module.

    your rows      r0: 3 tokens, decodes      r1: 5 tokens, a prompt      r2: 2 tokens, decodes

    packed         r0 r0 r0 · | r2 r2 · ·     r1 r1 r1 r1 r1 · · ...      · repeats your first token, writes nowhere
                   └ decode rows, q_len 4 ┘   └ prompt chunks ┘

Sizes that vary are marked for the compiler, so all padded batches together compile three graphs for each
`num_speculative_tokens`: only decode rows, only prompts, both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment
from mla_compile.defaults import MAX_DRAFTS
from mla_compile.errors import MLAError, check_integer
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
"""The minimum of either kind, if there are any: Inductor specialises some matrix products on one token."""
LEAST_KEYS = 1024
"""Fewest keys that prompts with cached tokens are padded to."""
MIN_PAGES = 2
"""The minimum number of columns of a block table: for CUDA graphs Inductor specialises on equal strides."""


@dataclass(frozen=True)
class PackedBatch:
    """The result of `pack_batch`; `out[packed.order]` is the module's output with its tokens in your order.

    batch: for `mla_attention`.
    positions: of the tokens, int64 `[tokens]`.
    tensors: the packed per-token tensors, each `[tokens, ...]`.
    order: the packed index of each of your tokens, int64 `[sum(query_lens)]`.
    last: the packed index of each row's last token, int64 `[len(query_lens)]`. A module may use it to compute only
        these tokens' logits: `head(hidden.index_select(0, last))`.
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
    """Pack the tokens that rows run in one step, decode rows first.

        packed = pack_batch([1, 5], [17, 0], block_table, token_ids, has_sampled=[True, False], page_size=16)
        logits = compiled(*packed.tensors, packed.positions, packed.batch)[packed.order]

    A row decodes if it has sampled since its latents were last built and has at most `1 + num_speculative_tokens`
    query tokens; all others are prompt chunks. Decode and prefill compute the same attention; decode is faster for few
    tokens, prefill for many. Call `pack_batch` outside of compiled code, and call the module in one grad mode: torch
    compiles a graph for each of `no_grad`, `inference_mode` and neither.

    Args:
        query_lens: tokens of each row in this step, >= 1.
        num_cached: tokens of each row in the cache before this step, >= 0.
        block_table: pages of each row, int32 `[rows, max_pages]`, on the device of the model. Page 0 is the dummy page,
            which belongs to no row.
        per_token: tensors `[sum(query_lens), ...]` of the rows' tokens, one row after the other, such as token ids.
        has_sampled: whether a row has sampled a token since its latents were last built. A prompt has not, nor a row
            that was preempted and runs again.
        page_size: tokens per page of the cache.
        num_speculative_tokens: drafts of a step, k >= 0: decode rows have up to 1 + k query tokens.
        backend: the decode backend to use, by name; None is the automatic choice.
        pad: give every decode row 1 + k query tokens, round the number of decode rows up to a power of two, and round
            the number of prompt tokens up to one of four sizes per factor of two, so that few CUDA graphs serve all
            batches. Padding sees nothing and writes nowhere. False: each number of query tokens is a graph of its own,
            but one token is still padded to two. Decode rows then have as many query tokens as the longest; if the
            backend supports only one length, the shortest rows decode and the others prefill.

    Raises:
        MLAError: a bad argument, named, or a backend that does not support the call.
    """
    if torch.compiler.is_dynamo_compiling():
        hint = "call it before the compiled module, and pass packed.tensors and packed.batch to that"
        refuse("pack_batch", "a call outside of compiled code", "one inside of it", hint)
    check_integer("num_speculative_tokens", num_speculative_tokens, 0, MAX_DRAFTS)
    if type(pad) is not bool:
        raise MLAError("pad", "True or False", repr(pad))
    validate.row_lengths("query_lens", query_lens, num_cached, block_table, page_size)
    validate.list_of(bool, "has_sampled", has_sampled, block_table.shape[0])
    if block_table.shape[0] == 0:
        raise MLAError("block_table", "at least one row", list(block_table.shape))
    given: tuple[object, ...] = per_token
    for i, tensor in enumerate(given):
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.shape[0] != sum(query_lens):
            expected = f"a tensor [{sum(query_lens)}, ...] with all tokens of query_lens"
            raise MLAError(f"per_token[{i}]", expected, validate.shown(tensor))
    device = block_table.device
    block_table = pad_table(block_table, columns=MIN_PAGES - block_table.shape[1])
    # For the automatic choice: that of the first backend that runs on the device.
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
        # Always given, so that rows of equal length need no separate graph; a UNIFORM backend would flatten them.
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
    """The split of a batch. Rows are given by index, in their original order.

    decode: rows of the decode segment.
    q_len: query tokens of each of them, padding included; 0 if there are none.
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
    """Split rows into decode and prefill.

    Rows that have not sampled since their latents were last built prefill, whatever their length.

    Args:
        query_lens: query tokens of each row in this step, >= 1.
        has_sampled: of each row, see `pack_batch`.
        threshold: maximum number of query tokens of a decode row, >= 1.
        support: of the decode backend. SINGLE_ONLY accepts the same rows as VARLEN, flattened.
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


def padded_prompt_tokens(count: int, most: int | None = None, longest: int | None = None) -> int:
    """The smallest padded size for `count` prompt tokens, where `most` is also a padded size; 0 for none.

    Each size is captured separately. There are few: four per factor of two, and below 128 the multiples of 16. More
    than `longest` tokens are not captured, and are padded to a multiple of 128.
    """
    unit = _unit_above(count - 1, longest)
    size = -(-count // unit) * unit
    return most if most is not None and max(count, MIN_TOKENS) <= most < size else size


def _unit_above(count: int, longest: int | None) -> int:
    """What divides the padded sizes around `count`, up to the next larger one. longest: a multiple of 128."""
    return 128 if longest is not None and count >= longest else 1 << max(4, count.bit_length() - 3)


def prompt_sizes(most: int) -> list[int]:
    """The padded sizes of up to `most` prompt tokens, if all of them are captured; ascending."""
    sizes = [padded_prompt_tokens(1, most)]
    while sizes[-1] < most:
        sizes.append(padded_prompt_tokens(sizes[-1] + 1, most))
    return sizes


def prompt_shapes(most: int, capacity: int) -> list[tuple[int, int]]:
    """Tokens and cached tokens of prompts that load the kernels of steps with up to `MAX_KEYS` cached tokens a row.

    They have each of `prompt_sizes` without cached tokens; the sizes up to 64 after cached ones, which other kernels
    may serve; and the smallest size after cached ones with each padded number of a row's keys. capacity: tokens of a
    row.
    """
    sizes = prompt_sizes(most)
    shapes = [(size, 0) for size in sizes]
    if capacity > 2:
        shapes += [(size, 1) for size in sizes if size <= 64]
    keys = 2 * LEAST_KEYS
    while keys <= MAX_KEYS and keys // 2 + 1 < capacity:
        shapes.append((sizes[0], keys // 2))
        keys *= 2
    return shapes


def fitting_prompt_tokens(room: int, longest: int) -> int:
    """The largest padded size that is at most `room`; `room` itself if all are larger."""
    unit = _unit_above(room, longest)
    return room // unit * unit or room


def prompt_padding(
    chunk_lens: Sequence[int],
    num_cached: Sequence[int],
    *,
    capacity: int,
    pad: bool,
    most: int | None = None,
    longest: int | None = None,
    least: int = 0,
) -> dict[str, int]:
    """The sizes that `prefill_segment` pads to: few, as a CUDA graph is recorded for each; the minimum without `pad`.

    The number of chunks, padding chunks included, is padded to a power of four; keys, if some are cached, to a power of
    two. capacity: maximum tokens of a row. most, longest: see `padded_prompt_tokens`. least: pad as for at least this
    many tokens.
    """
    if not pad:
        return {"num_tokens": MIN_TOKENS}
    count = sum(chunk_lens)
    tokens = padded_prompt_tokens(max(count, least), most, longest)
    keys = tokens
    if any(num_cached):
        keys = max(LEAST_KEYS, padded_rows(count + sum(cached % MAX_KEYS for cached in num_cached)))
    needed, chunks = len(chunk_lens) + max(1, -(-(tokens - count) // capacity)), 4
    while chunks < needed:
        chunks *= 4
    return {"num_tokens": tokens, "num_chunks": chunks, "num_keys": keys}


def padded_rows(count: int) -> int:
    """The smallest power of two that is at least `count`, the padded number of rows."""
    return 1 << (count - 1).bit_length()


def _rows(
    rows: list[int], query_lens: Sequence[int], num_cached: Sequence[int], block_table: Tensor
) -> tuple[list[int], list[int], Tensor]:
    """The lengths, cached tokens and block table of some of the rows."""
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
    """Four index tensors: the packed index of each token; for each packed token its source token (the first one for
    padding) and its position; the packed index of each row's last token."""
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
    """Mark for the compiler which sizes vary from batch to batch, and which of them are equal."""
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
