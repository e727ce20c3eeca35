"""Checks of op arguments. An error names the argument, what was expected and what came.

They run in the declarations of the ops: in eager calls, and on fake tensors once per compile. Sizes that must be equal
but are not known to be become a guard (`same_size`). So a call with other sizes is traced again, and the check names
the argument. Values are read on the CPU only, never of fake tensors.

A layout names the dimensions of a tensor: "tokens, heads, qk_nope_head_dim". A name stands for one size in all
arguments of a call. A dimension may also be computed from names ("kv_lora_rank + qk_rope_head_dim", "rows + 1",
"2 * intermediate"), or broadcast ("rows or 1"). A dtype may precede it ("int32 rows"), and " or None" may follow.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment
from mla_compile.errors import MLAError
from mla_compile.latents import FP8, fp8_width
from mla_compile.ops.dispatch import FLOAT8, describe_device, in_words, is_nvidia_gpu_here
from mla_compile.ops.paging import slots_of
from mla_compile.torch_internals import is_fake, refuse, size_hint, statically_known_true

_WIDTH = "kv_lora_rank + qk_rope_head_dim"
PAGED = f"num_pages, page_size, {_WIDTH}"
"""The layout of a paged cache, which must be contiguous and have a page."""
LATENTS = f"pages, page_size, {_WIDTH}"
"""The layout of a cache that a graph may have computed."""
TABLE = "int32 rows, max_pages"
"""The layout of a block table."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = {"int32": torch.int32, "int64": torch.int64}
_AT_LEAST_1 = ("num_pages", "page_size", "max_pages")
"""Dimensions that are never empty."""


class Layouts:
    """The sizes of a call by name, from the arguments that were checked so far.

    prefix: precedes the names of arguments in messages.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self._sizes: dict[str, int] = {}
        self._first: dict[str, str] = {}  # the first argument with this name in its layout

    def tensors(
        self, layouts: Mapping[str, str], given: Mapping[str, Any], like: Tensor | None = None
    ) -> None:
        """Check the arguments in `given` that have a layout, and that all are on one device: that of `like`, by default
        the first one's.

        A layout without a dtype means the float dtype of the first tensor; "float" means any float dtype.
        """
        first_name = next(iter(layouts))
        first = given[first_name]
        like = first if like is None else like
        for name, text in layouts.items():
            kind, layout, or_none = parse(text)
            x: Any = given.get(name)
            if x is None and or_none:
                continue
            self.check(name, x, layout, dtype=_INTEGERS.get(kind), like=like)
            if kind in _INTEGERS:
                continue
            if name == "kv_cache" and x.dtype == FP8:
                _converts_fp8(name, x)
                continue
            if x.dtype not in _FLOATS:
                raise MLAError(name, "float16, bfloat16, float32 or float64", _show(x))
            if kind != "float" and x.dtype != first.dtype:
                hint = "convert one of them" + ", or allocate the cache in it" * (layout == PAGED)
                raise MLAError(name, f"the dtype of {first_name}, {first.dtype}", _show(x), hint)
            inference_only(name, x)

    def check(
        self,
        name: str,
        x: Tensor,
        layout: str,
        *,
        dtype: torch.dtype | None = None,
        like: Tensor | None = None,
    ) -> None:
        """Check the type, rank, dtype and sizes of a tensor, and that it is on the device of `like`."""
        argument, name = name, self.prefix + name
        dims, sizes = dims_of(layout), self._sizes
        _check_kind(name, x, layout, len(dims), dtype, like)
        shape = x.shape
        for dim, (word, or_1) in enumerate(dims):
            size = shape[dim]
            if word == _WIDTH and x.dtype == FP8:
                self._check_fp8(name, shape)
                continue
            if word in _AT_LEAST_1 and statically_known_true(size < 1):
                raise MLAError(name, f"{word} >= 1", list(shape))
            if word not in sizes:
                computed = None if word.isidentifier() else self._computed(word)
                if computed is None:
                    self._first[word] = argument
                sizes[word] = size if computed is None else computed
            elif size is sizes[word]:
                continue
            if not (or_1 and not statically_known_true(size != 1)) and not same_size(size, sizes[word]):
                meaning = f"{word} of {self._first[word]}" if word in self._first else word
                wanted = f"size {sizes[word]} ({meaning}){' or 1' if or_1 else ''}"
                raise MLAError(name, f"{wanted} in dimension {dim}", list(shape))

    def _check_fp8(self, name: str, shape: Sequence[int]) -> None:
        """Check the bytes of a token with FP8 latents, if the sizes that they follow from are known."""
        sizes = self._sizes
        rank, rope = sizes.get("kv_lora_rank"), sizes.get("qk_rope_head_dim")
        if rope is None and rank is not None and _WIDTH in sizes:
            rope = sizes[_WIDTH] - rank
        if rank is not None and rope is not None:
            width = fp8_width(rank, rope, name)
            if not same_size(shape[-1], width):
                raise MLAError(name, f"{width} bytes a token, of FP8 latents of {rank} + {rope}", list(shape))

    def _computed(self, word: str) -> int | None:
        """The value of a sum of products of names and numbers; None if one of the names has no size yet."""
        total = 0
        for factors in _terms(word):
            product = 1
            for factor in factors:
                if not factor.isdigit() and factor not in self._sizes:
                    return None
                product *= int(factor) if factor.isdigit() else self._sizes[factor]
            total += product
        return total


@functools.cache
def parse(text: str) -> tuple[str, str, bool]:
    """A layout's dtype or "", the layout without it, and whether None is allowed."""
    layout = text.removesuffix(" or None")
    kind, _, rest = layout.partition(" ")
    return (kind, rest, layout != text) if kind in (*_INTEGERS, "float") else ("", layout, layout != text)


@functools.cache
def dims_of(layout: str) -> tuple[tuple[str, bool], ...]:
    """The words of a layout, each with whether a size of 1 is allowed too."""
    return tuple((word.removesuffix(" or 1"), word.endswith(" or 1")) for word in layout.split(", "))


@functools.cache
def _terms(word: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(term.split(" * ")) for term in word.split(" + "))


def _check_kind(
    name: str, x: object, layout: str, num_dims: int, dtype: torch.dtype | None, like: Tensor | None
) -> None:
    """Check all but the sizes of a tensor."""
    if not isinstance(x, Tensor):
        raise MLAError(name, f"a tensor [{layout}]", type(x).__name__)
    if x.dim() != num_dims:
        raise MLAError(name, f"{num_dims} dimensions [{layout}]", f"{x.dim()}: {list(x.shape)}")
    if dtype is not None and x.dtype != dtype:
        expected = in_words((dtype,))
        raise MLAError(name, f"{expected} [{layout}]", _show(x), f"convert it with .to(torch.{expected})")
    if like is not None and x.device != like.device:
        raise MLAError(name, f"a tensor on {like.device}", x.device)
    if layout == PAGED and not x.is_contiguous():
        hint = (
            "it is written in place, so do not copy it: one layer of [layers, num_pages, ...] is contiguous"
        )
        raise MLAError(name, "a contiguous tensor", f"strides {x.stride()}", hint)


def _converts_fp8(name: str, x: Tensor) -> None:
    """Refuses FP8 latents on a GPU that has no instructions to convert them."""
    if is_nvidia_gpu_here(x.device) and (describe_device(x.device)[1] or FLOAT8) < FLOAT8:
        raise MLAError(name, "no FP8 latents, which need a GPU of SM 89 or newer", _show(x))


def _show(x: Tensor) -> str:
    return f"{in_words((x.dtype,))} {list(x.shape)}"


def inference_only(name: str, tensor: Tensor) -> None:
    """Refuses gradients: the ops have no backward. Without this check compiled code would silently return none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        hint = "the ops are for inference: call the model under torch.no_grad()"
        raise MLAError(name, "a tensor that needs no gradient", "requires_grad=True", hint)


def same_size(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are equal in this call; compiled code checks that before each call.

    If one is fixed and the other is dynamic, no guard is added: it would fix the other one too.
    """
    known = size_hint(size), size_hint(other)
    if statically_known_true(size != other) or (None not in known and known[0] != known[1]):
        return False
    if None in known or (isinstance(size, torch.SymInt) and isinstance(other, torch.SymInt)):
        torch._check(size == other)
    return True


def whole_number(name: str, value: object, least: int) -> None:
    """Raises `MLAError` for anything but an integer >= `least`, perhaps a symbolic one."""
    is_whole = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    if not is_whole or statically_known_true(value < least):  # type: ignore[operator]
        raise MLAError(name, f"an integer >= {least}", repr(value))


_KINDS: dict[object, tuple[str, tuple[type, ...]]] = {
    Tensor: ("a tensor", (Tensor,)),
    Tensor | None: ("a tensor or None", (Tensor, type(None))),
    int: ("an int", (int, torch.SymInt)),
    float: ("a float", (int, float, torch.SymFloat)),
    bool: ("a bool", (bool,)),
}


def scale(value: object) -> None:
    """Raises `MLAError` for a `softmax_scale` that is neither a finite number nor a symbolic one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (is_number or isinstance(value, torch.SymFloat | torch.SymInt)):
        got = value if isinstance(value, float) else shown(value)
        raise MLAError("softmax_scale", "a finite number", got, "pass a Python float")


def check_types(arguments: Mapping[str, tuple[object, object]]) -> None:
    """Raises `MLAError` for the first argument whose value is not of its annotation: the pairs are both, by name."""
    for name, (annotation, value) in arguments.items():
        words, kinds = _KINDS.get(annotation, ("", (object,)))
        if not isinstance(value, kinds):
            raise MLAError(name, words, shown(value))


def list_of(kind: type, name: str, values: object, rows: int) -> None:
    """Raises `MLAError` for anything but a list or tuple of `rows` values of one type."""
    kinds = (kind, torch.SymInt) if kind is int else (kind,)
    if not isinstance(values, list | tuple) or any(type(value) not in kinds for value in values):
        hint = "convert it with .tolist()" if hasattr(values, "tolist") else ""
        raise MLAError(name, f"a list of {kind.__name__}, one per row", shown(values), hint)
    if len(values) != rows:
        raise MLAError(name, f"one entry per row of block_table ({rows})", len(values))


def shown(value: object) -> str:
    """A value as a message shows it."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return f"{value!r:.80}" if isinstance(value, list | tuple) else type(value).__name__


def row_lengths(
    name: str, lens: Sequence[int], num_cached: Sequence[int], table: Tensor, page_size: int
) -> None:
    """Check that each row has at least one new token, by the argument `name`, and pages for all its tokens."""
    Layouts().tensors({"block_table": TABLE}, {"block_table": table})
    whole_number("page_size", page_size, 1)
    rows, max_pages = table.shape
    list_of(int, name, lens, rows)
    list_of(int, "num_cached", num_cached, rows)
    capacity = max_pages * page_size
    for row, (count, cached) in enumerate(zip(lens, num_cached, strict=True)):
        if count < 1:
            raise MLAError(f"{name}[{row}]", "at least one token a row", count, "leave the row out")
        if cached < 0:
            raise MLAError(f"num_cached[{row}]", "at least 0", cached)
        if cached + count > capacity:
            expected = f"at most {capacity} tokens ({max_pages} pages of {page_size})"
            raise MLAError(f"row {row}", expected, f"{cached} + {count}", "widen block_table")


def tokens_of_rows(prefix: str, q_len: int, tokens: int, rows: int) -> None:
    """Check that there are `q_len` >= 1 query tokens for each decode row."""
    if statically_known_true(q_len < 1):
        raise MLAError(f"{prefix}q_len", ">= 1 query token per decode row", q_len)
    if not same_size(rows * q_len, tokens):
        expected = f"rows * q_len = {rows} * {q_len} tokens"
        raise MLAError(f"{prefix}q_len", expected, tokens, "pad every row to q_len and pass q_lens")


def mask(mask: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Check that a mask broadcasts to `shape`, and its dtype and device."""
    if not isinstance(mask, Tensor):
        raise MLAError("mask", "a tensor or None", type(mask).__name__)
    if mask.dtype != torch.bool and mask.dtype not in _FLOATS:
        hint = "True where a key is seen: convert it with .bool()"
        raise MLAError("mask", "bool, or float that is added to the scores", _show(mask), hint)
    sizes = shape[len(shape) - mask.dim() :]
    if mask.dim() > len(shape) or any(map(_differs, mask.shape, sizes)):
        expected = f"a shape that broadcasts to [rows, heads, q_len, keys] = {list(shape)}"
        raise MLAError("mask", expected, list(mask.shape))
    if mask.device != like.device:
        raise MLAError("mask", f"a tensor on {like.device}", mask.device)
    inference_only("mask", mask)


def _differs(size: int, expected: int) -> bool:
    """Whether a size does not broadcast to the expected one."""
    return statically_known_true(size != expected) and statically_known_true(size != 1)


def angles(cos: Tensor, sin: Tensor, rope: int) -> None:
    """Check the columns and dtypes of cos and sin for a rotation of `rope` columns; see `rotate`."""
    if cos.shape[1] not in (rope // 2, rope):
        expected = f"{rope // 2} or {rope} columns (qk_rope_head_dim / 2 or all)"
        raise MLAError("cos", expected, list(cos.shape))
    if sin.dtype != cos.dtype:
        raise MLAError("sin", f"the dtype of cos, {cos.dtype}", sin.dtype)


def is_readable(x: Tensor) -> bool:
    """Whether values may be read: on the CPU, and not while compiling."""
    return x.device.type == "cpu" and not is_fake(x)


def within(name: str, what: str, x: Tensor | None, least: int, most: int, hint: str = "") -> None:
    """Check that values are in `[least, most]`, if they may be read."""
    if x is None or not is_readable(x) or x.numel() == 0:
        return
    low, high = (int(bound) for bound in x.aminmax())
    if low < least or high > most:
        raise MLAError(name, f"{what} in [{least}, {most}]", f"[{low}, {high}]", hint if high > most else "")


def slots(name: str, x: Tensor, kv_cache: Tensor) -> None:
    """Check that slots are in the cache, or -1."""
    within(name, "slots", x, -1, kv_cache.shape[0] * kv_cache.shape[1] - 1, "allocate more pages")


def key_ranges(
    prefix: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, key_slots: Tensor, tokens: int, kv_cache: Tensor
) -> None:
    """Check that prefix sums start at 0, never decrease and stay within their tensors, and the slots of their keys."""
    if not is_readable(key_slots):
        return
    for name, sums, end in (
        ("cu_seqlens_q", cu_seqlens_q[None], tokens),
        ("cu_seqlens_k", cu_seqlens_k, key_slots.shape[1]),
    ):
        if bool((sums[:, 0] != 0).any() | (sums.diff() < 0).any() | (sums[:, -1] > end).any()):
            raise MLAError(prefix + name, f"prefix sums from 0 that end at {end} at most", sums.tolist())
    slots(f"{prefix}key_slots", key_slots, kv_cache)  # those of padding are clamped and read
    used = torch.arange(key_slots.shape[1], device="cpu") < cu_seqlens_k[:, -1:]
    last = kv_cache.shape[0] * kv_cache.shape[1] - 1
    within(f"{prefix}key_slots", "slots of keys", key_slots[used], 0, last, "allocate more pages")


def lengths(prefix: str, seq_lens: Tensor, block_table: Tensor, kv_cache: Tensor) -> None:
    """Check that seq_lens fit the table, and that the table entries they use are pages of the cache."""
    (num_pages, page_size, _), columns = kv_cache.shape, block_table.shape[1]
    within(f"{prefix}seq_lens", "lengths", seq_lens, 0, columns * page_size, "widen block_table")
    if is_readable(seq_lens):
        used = torch.arange(columns, device="cpu") * page_size < seq_lens[:, None]
        within(f"{prefix}block_table", "pages", block_table[used], 0, num_pages - 1)


def chunk_lengths(prefix: str, prefill: PrefillSegment) -> None:
    """Check the host's lengths, and on the CPU that `seq_lens` and `cu_seqlens_q` agree with them."""
    lens, seq_lens, cu_seqlens_q = prefill.host_lens, prefill.seq_lens, prefill.cu_seqlens_q
    if not is_readable(lens):
        return
    (q_lens, ends), tokens = lens.unbind(1), prefill.slot_mapping.shape[0]
    if int(q_lens.sum()) != tokens or bool((q_lens < 0).any() | (ends < q_lens).any()):
        expected = (
            f"query lengths >= 0 that sum to {tokens} tokens, and sequence lengths >= the query lengths"
        )
        raise MLAError(f"{prefix}host_lens", expected, lens.tolist())
    if not is_readable(seq_lens):
        return
    sums = torch.nn.functional.pad(q_lens.cumsum(0, dtype=torch.int32), (1, 0))
    for name, got, right in (("seq_lens", seq_lens, ends), ("cu_seqlens_q", cu_seqlens_q, sums)):
        if not torch.equal(got, right):
            raise MLAError(prefix + name, f"{right.tolist()}, as in host_lens", got.tolist())


def page_size(page_size: int, kv_cache: Tensor) -> None:
    """Check that batch and cache have one page size. If it is symbolic, compiled code checks it before each call."""
    size = kv_cache.shape[1]
    if not same_size(size, page_size):
        hint = f"build the batch with page_size={size_hint(size)}"
        raise MLAError("batch.page_size", f"that of kv_cache, {size_hint(size)}", page_size, hint)
    torch._check(size == page_size)  # also if one of the two is fixed, for which `same_size` adds no guard


def is_batch(batch: object) -> None:
    if not isinstance(batch, MLABatch):
        refuse("batch", "an MLABatch", type(batch).__name__)


def batch(batch: MLABatch, q: Tensor, kv_cache: Tensor, name: str = "q_nope") -> None:
    """Check that a batch has as many tokens as the queries (`name`), and that its rows fit the cache and each other."""
    Layouts().tensors({name: "tokens, heads, width", "kv_cache": PAGED}, {name: q, "kv_cache": kv_cache})
    page_size(batch.page_size, kv_cache)
    expected = 0
    if batch.decode is not None:
        _decode_segment("batch.decode.", batch.decode, kv_cache)
        expected += batch.decode.slot_mapping.shape[0]
    if batch.prefill is not None:
        _prefill_segment("batch.prefill.", batch.prefill, kv_cache)
        expected += batch.prefill.slot_mapping.shape[0]
    if not same_size(q.shape[0], expected):
        raise MLAError(name, f"{expected} tokens (those of batch)", q.shape[0])
    if is_readable(kv_cache):
        _written_pages_have_one_owner(batch, kv_cache)


_DECODE = {
    "seq_lens": "int32 rows",
    "q_lens": "int32 rows or None",
    "block_table": TABLE,
    "slot_mapping": "int64 tokens",
}
_PREFILL = {
    "seq_lens": "int32 rows or None",
    "block_table": f"{TABLE} or None",
    "cu_seqlens_q": "int32 rows + 1",
    "cu_seqlens_k": "int32 parts, rows + 1",
    "key_slots": "int64 parts, keys",
    "slot_mapping": "int64 tokens",
}
"""In compiled code the fields of prompt chunks that it does not read are None."""


def _decode_segment(prefix: str, decode: DecodeSegment, kv_cache: Tensor) -> None:
    Layouts(prefix).tensors(_DECODE, vars(decode), kv_cache)
    seq_lens, q_len = decode.seq_lens, decode.q_len
    slots(f"{prefix}slot_mapping", decode.slot_mapping, kv_cache)
    tokens_of_rows(prefix, q_len, decode.slot_mapping.shape[0], seq_lens.shape[0])
    lengths(prefix, seq_lens, decode.block_table, kv_cache)
    within(f"{prefix}q_lens", "lengths", decode.q_lens, 0, q_len)
    if is_readable(kv_cache):
        valid = torch.full_like(seq_lens, q_len) if decode.q_lens is None else decode.q_lens
        index = torch.arange(q_len, device="cpu")
        positions = torch.where(index < valid[:, None], (seq_lens - valid)[:, None] + index, -1)
        row = torch.arange(len(seq_lens), device="cpu").repeat_interleave(q_len)
        _slots_follow(prefix, decode, positions.flatten(), row)


def _prefill_segment(prefix: str, prefill: PrefillSegment, kv_cache: Tensor) -> None:
    known: dict[str, Any] = vars(prefill)
    sizes = Layouts(prefix)
    sizes.tensors(_PREFILL, known, kv_cache)
    tokens, cu_seqlens_q = prefill.slot_mapping.shape[0], prefill.cu_seqlens_q
    slots(f"{prefix}slot_mapping", prefill.slot_mapping, kv_cache)
    key_ranges(prefix, cu_seqlens_q, prefill.cu_seqlens_k, prefill.key_slots, tokens, kv_cache)
    if known["seq_lens"] is None:
        return
    sizes.check("host_lens", prefill.host_lens, "rows, 2", dtype=torch.int32)
    if prefill.host_lens.device.type != "cpu":
        hint = "keep a CPU copy of the lengths: reading them from the device would stall it"
        raise MLAError(f"{prefix}host_lens", "a CPU tensor", prefill.host_lens.device, hint)
    lengths(prefix, prefill.seq_lens, prefill.block_table, kv_cache)
    chunk_lengths(prefix, prefill)
    if is_readable(kv_cache):
        lens, ends = prefill.host_lens.unbind(1)
        row = torch.arange(len(lens), device="cpu").repeat_interleave(lens)
        index = torch.arange(tokens, device="cpu") - cu_seqlens_q[row]
        _slots_follow(prefix, prefill, (ends - lens)[row] + index, row)


def _slots_follow(
    prefix: str, segment: DecodeSegment | PrefillSegment, positions: Tensor, row: Tensor
) -> None:
    """Check that each token writes to the slot that its row's table gives its position, or nowhere.

    positions, row: int `[tokens]`; position -1 marks a token that must write nowhere.
    """
    got = segment.slot_mapping
    expected = slots_of(segment.block_table, row, positions, segment.page_size)
    wrong = (got != expected) & (got != -1)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        hint = "build the segment with decode_segment, prefill_segment or pack_batch"
        place = f"{int(expected[token])} or -1 for token {token}, as in block_table"
        raise MLAError(f"{prefix}slot_mapping", place, int(got[token]), hint)


def _written_pages_have_one_owner(batch: MLABatch, kv_cache: Tensor) -> None:
    """Check that a page with writes is in one row's table only, and once, within the rows' lengths.

    Padding chunks neither read nor write the pages of their tables.
    """
    num_pages, page_size, _ = kv_cache.shape
    held, written = [], []
    for segment in (batch.decode, batch.prefill):
        if segment is not None and segment.seq_lens is not None:  # compiled code does not read it
            start = torch.arange(segment.block_table.shape[1], device="cpu") * page_size
            writes = segment.slot_mapping >= 0
            lens = segment.seq_lens
            if isinstance(segment, PrefillSegment):
                sums = torch.nn.functional.pad(writes.cumsum(0), (1, 0))[segment.cu_seqlens_q]
                is_padding = (sums.diff() == 0) & (segment.host_lens[:, 0] == lens)
                lens = torch.where(is_padding, 0, lens)
            held.append(segment.block_table[start < lens[:, None]])
            written.append(segment.slot_mapping[writes] // page_size)
    if not held:
        return
    times_held = torch.bincount(torch.cat(held), minlength=num_pages)
    shared = torch.cat(written)
    shared = shared[times_held[shared] > 1]
    if shared.numel():
        page = int(shared[0])
        expected = "each written page once in all tables"
        hint = "give every row pages of its own; rows may share full pages that they only read"
        raise MLAError("batch: block_table", expected, f"page {page} in {int(times_held[page])} places", hint)
