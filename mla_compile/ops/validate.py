"""Checks of op arguments. Each names the argument, what was expected, what came.

They run in two places: in the Python wrappers for eager calls, and in the fake implementations, so once per
compile. Comparisons of symbolic sizes only fail where they are statically known to differ: no guard is added.
Functions that read values do so only where the tensor is on the CPU.
"""

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment
from mla_compile.errors import MLAError
from mla_compile.ops.paging import check_capacity, slots_of
from mla_compile.torch_internals import size_hint, statically_known_true

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _show(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _tensor(
    name: str, x: Tensor, layout: str, *, dtype: torch.dtype | None = None, like: Tensor | None = None
) -> None:
    """Check type, rank (the number of words in `layout`), dtype, and device against `like`."""
    words = f"[{layout}]"
    if not isinstance(x, Tensor):
        raise MLAError(name, f"a tensor {words}", type(x).__name__)
    rank = len(layout.split(", "))
    if x.dim() != rank:
        raise MLAError(name, f"{rank} dimensions {words}", f"{x.dim()}: {list(x.shape)}")
    if dtype is not None and x.dtype != dtype:
        expected = str(dtype).removeprefix("torch.")
        raise MLAError(name, f"{expected} {words}", _show(x), f"convert it with .to(torch.{expected})")
    if like is not None and x.device != like.device:
        raise MLAError(name, f"a tensor on {like.device}", x.device)


def _size(name: str, x: Tensor, dim: int, expected: int, meaning: str) -> None:
    if statically_known_true(x.shape[dim] != expected):
        raise MLAError(name, f"size {expected} ({meaning}) in dimension {dim}", list(x.shape))


def _floats(**tensors: tuple[Tensor, str]) -> None:
    """The first tensor sets the dtype and the device for all."""
    first_name, (first, layout) = next(iter(tensors.items()))
    _tensor(first_name, first, layout)
    if first.dtype not in _FLOATS:
        raise MLAError(first_name, "float16, bfloat16, float32 or float64", _show(first))
    for name, (x, words) in tensors.items():
        _tensor(name, x, words, like=first)
        if x.dtype != first.dtype:
            raise MLAError(name, f"the dtype of {first_name}, {first.dtype}", _show(x), "convert one of them")
        inference_only(name, x)


def _cache(kv_cache: Tensor, width: int, of: str) -> None:
    if not kv_cache.is_contiguous():
        raise MLAError(
            "kv_cache", "a contiguous tensor", f"strides {kv_cache.stride()}", "call .contiguous() once"
        )
    if statically_known_true(kv_cache.shape[1] < 1) or statically_known_true(kv_cache.shape[0] < 1):
        raise MLAError("kv_cache", "num_pages >= 1 and page_size >= 1", list(kv_cache.shape))
    _size("kv_cache", kv_cache, 2, width, of)


def inference_only(name: str, tensor: Tensor) -> None:
    """The ops have no backward; without this check, compiled code would return no gradients, silently."""
    if tensor.requires_grad and torch.is_grad_enabled():
        mend = "the ops are for inference: call the model under torch.no_grad()"
        raise MLAError(name, "a tensor that needs no gradient", "requires_grad=True", mend)


def append(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    _floats(
        kv_c=(kv_c, "tokens, kv_lora_rank"),
        k_pe=(k_pe, "tokens, qk_rope_head_dim"),
        kv_cache=(kv_cache, "num_pages, page_size, width"),
    )
    _cache(kv_cache, kv_c.shape[1] + k_pe.shape[1], "kv_lora_rank + qk_rope_head_dim")
    _size("k_pe", k_pe, 0, kv_c.shape[0], "tokens of kv_c")
    _tensor("slot_mapping", slot_mapping, "tokens", dtype=torch.int64, like=kv_c)
    _size("slot_mapping", slot_mapping, 0, kv_c.shape[0], "tokens of kv_c")


def norm_rope_append(
    kv_a: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> None:
    _floats(
        kv_a=(kv_a, "tokens, kv_lora_rank + qk_rope_head_dim"),
        weight=(weight, "kv_lora_rank"),
        kv_cache=(kv_cache, "num_pages, page_size, width"),
    )
    _cache(kv_cache, kv_a.shape[1], "kv_lora_rank + qk_rope_head_dim of kv_a")
    rope = kv_a.shape[1] - weight.shape[0]
    if rope < 2 or rope % 2:
        raise MLAError("weight", f"an even number of columns less than kv_a's {kv_a.shape[1]}", _show(weight))
    _tensor("cos", cos, "tokens, angles", like=kv_a)
    _floats(cos=(cos, "tokens, angles"), sin=(sin, "tokens, angles"))
    _size("cos", cos, 0, kv_a.shape[0], "tokens of kv_a")
    if cos.shape[1] not in (rope // 2, rope):
        raise MLAError("cos", f"{rope // 2} or {rope} columns (qk_rope_head_dim / 2 or all)", _show(cos))
    _size("sin", sin, 0, kv_a.shape[0], "tokens of kv_a")
    _size("sin", sin, 1, cos.shape[1], "columns of cos")
    _tensor("slot_mapping", slot_mapping, "tokens", dtype=torch.int64, like=kv_a)
    _size("slot_mapping", slot_mapping, 0, kv_a.shape[0], "tokens of kv_a")


def _rows(prefix: str, seq_lens: Tensor, block_table: Tensor, like: Tensor) -> None:
    _tensor(f"{prefix}seq_lens", seq_lens, "rows", dtype=torch.int32, like=like)
    _table_of(prefix, block_table, seq_lens, "seq_lens")


def _table_of(prefix: str, table: Tensor, lens: Tensor, name: str) -> None:
    block_table(table, prefix)
    _tensor(f"{prefix}block_table", table, "rows, max_pages", like=lens)
    _size(f"{prefix}block_table", table, 0, lens.shape[0], f"rows of {name}")


def _query_rows(prefix: str, q_lens: Tensor | None, q_len: int, tokens: int, seq_lens: Tensor) -> None:
    if statically_known_true(q_len < 1):
        raise MLAError(f"{prefix}q_len", ">= 1 query token per decode row", q_len)
    if statically_known_true(seq_lens.shape[0] * q_len != tokens):
        expected = f"rows * q_len = {seq_lens.shape[0]} * {q_len} tokens"
        raise MLAError(f"{prefix}q_len", expected, tokens, "pad every row to q_len and pass q_lens")
    if q_lens is not None:
        _tensor(f"{prefix}q_lens", q_lens, "rows", dtype=torch.int32, like=seq_lens)
        _size(f"{prefix}q_lens", q_lens, 0, seq_lens.shape[0], "rows of seq_lens")


def block_table(block_table: Tensor, prefix: str = "") -> None:
    _tensor(f"{prefix}block_table", block_table, "rows, max_pages", dtype=torch.int32)
    if statically_known_true(block_table.shape[1] < 1):
        raise MLAError(f"{prefix}block_table", "at least one page per row", list(block_table.shape))


def whole_number(name: str, value: object, least: int) -> None:
    """Raises `MLAError` for anything but an integer, a size perhaps, that is `least` or more."""
    is_whole = isinstance(value, int | torch.SymInt) and not isinstance(value, bool)
    if not is_whole or statically_known_true(value < least):  # type: ignore[operator]
        raise MLAError(name, f"an integer >= {least}", repr(value))


def decode_metadata(
    num_cached: Tensor, block_table: Tensor, q_lens: Tensor | None, q_len: int, page_size: int
) -> None:
    whole_number("q_len", q_len, 1)
    whole_number("page_size", page_size, 1)
    _tensor("num_cached", num_cached, "rows", dtype=torch.int32)
    _table_of("", block_table, num_cached, "num_cached")
    if q_lens is not None:
        _tensor("q_lens", q_lens, "rows", dtype=torch.int32, like=num_cached)
        _size("q_lens", q_lens, 0, num_cached.shape[0], "rows of num_cached")


def decode(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
) -> None:
    _floats(
        q_latent=(q_latent, "tokens, heads, kv_lora_rank"),
        q_pe=(q_pe, "tokens, heads, qk_rope_head_dim"),
        kv_cache=(kv_cache, "num_pages, page_size, width"),
    )
    _size("q_pe", q_pe, 0, q_latent.shape[0], "tokens of q_latent")
    _size("q_pe", q_pe, 1, q_latent.shape[1], "heads of q_latent")
    _cache(kv_cache, q_latent.shape[2] + q_pe.shape[2], "kv_lora_rank + qk_rope_head_dim")
    _rows("", seq_lens, block_table, q_latent)
    _query_rows("", q_lens, q_len, q_latent.shape[0], seq_lens)


def masked_decode(q_latent: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, mask: Tensor | None) -> None:
    _floats(
        q_latent=(q_latent, "rows, heads, q_len, kv_lora_rank"),
        q_pe=(q_pe, "rows, heads, q_len, qk_rope_head_dim"),
        kv_c=(kv_c, "rows or 1, keys, kv_lora_rank"),
        k_pe=(k_pe, "rows or 1, keys, qk_rope_head_dim"),
    )
    for dim, meaning in enumerate(("rows", "heads", "q_len")):
        _size("q_pe", q_pe, dim, q_latent.shape[dim], f"{meaning} of q_latent")
    for name, x in (("kv_c", kv_c), ("k_pe", k_pe)):
        if _differs(x.shape[0], q_latent.shape[0]):
            expected = f"size {q_latent.shape[0]} (rows of q_latent) or 1 in dimension 0"
            raise MLAError(name, expected, list(x.shape))
    _size("kv_c", kv_c, 2, q_latent.shape[3], "kv_lora_rank of q_latent")
    _size("k_pe", k_pe, 1, kv_c.shape[1], "keys of kv_c")
    _size("k_pe", k_pe, 2, q_pe.shape[3], "qk_rope_head_dim of q_pe")
    if mask is not None:
        _mask(mask, (*q_latent.shape[:3], kv_c.shape[1]), q_latent)


def _mask(mask: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise MLAError("mask", "a tensor or None", type(mask).__name__)
    if mask.dtype != torch.bool and mask.dtype not in _FLOATS:
        mend = "True where a key is seen: convert it with .bool()"
        raise MLAError("mask", "bool, or float to be added to the scores", _show(mask), mend)
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


def _weights(q_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, w_uk: Tensor, w_uv: Tensor) -> None:
    heads, nope = q_nope.shape[1], q_nope.shape[2]
    _size("q_pe", q_pe, 0, q_nope.shape[0], "tokens of q_nope")
    _size("q_pe", q_pe, 1, heads, "heads of q_nope")
    _size("w_uk", w_uk, 0, heads, "heads of q_nope")
    _size("w_uk", w_uk, 1, nope, "qk_nope_head_dim of q_nope")
    _size("w_uv", w_uv, 0, heads, "heads of q_nope")
    _size("w_uv", w_uv, 1, w_uk.shape[2], "kv_lora_rank of w_uk")
    _cache(kv_cache, w_uk.shape[2] + q_pe.shape[2], "kv_lora_rank + qk_rope_head_dim")


def prefill(
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
) -> None:
    _floats(
        q_nope=(q_nope, "tokens, heads, qk_nope_head_dim"),
        q_pe=(q_pe, "tokens, heads, qk_rope_head_dim"),
        k_nope=(k_nope, "tokens, heads, qk_nope_head_dim"),
        k_pe=(k_pe, "tokens, qk_rope_head_dim"),
        v=(v, "tokens, heads, v_head_dim"),
        kv_cache=(kv_cache, "num_pages, page_size, width"),
        w_uk=(w_uk, "heads, qk_nope_head_dim, kv_lora_rank"),
        w_uv=(w_uv, "heads, kv_lora_rank, v_head_dim"),
    )
    _weights(q_nope, q_pe, kv_cache, w_uk, w_uv)
    for dim, meaning in enumerate(("tokens", "heads", "qk_nope_head_dim")):
        _size("k_nope", k_nope, dim, q_nope.shape[dim], f"{meaning} of q_nope")
    _size("v", v, 0, q_nope.shape[0], "tokens of q_nope")
    _size("v", v, 1, q_nope.shape[1], "heads of q_nope")
    _size("k_pe", k_pe, 0, q_nope.shape[0], "tokens of q_nope")
    _size("k_pe", k_pe, 1, q_pe.shape[2], "qk_rope_head_dim of q_pe")
    _prefill_rows("", cu_seqlens_q, seq_lens, block_table, host_lens, q_nope)


def _prefill_rows(
    prefix: str, cu_seqlens_q: Tensor, seq_lens: Tensor, block_table: Tensor, host_lens: Tensor, like: Tensor
) -> None:
    _rows(prefix, seq_lens, block_table, like)
    _tensor(f"{prefix}cu_seqlens_q", cu_seqlens_q, "rows + 1", dtype=torch.int32, like=like)
    _size(f"{prefix}cu_seqlens_q", cu_seqlens_q, 0, seq_lens.shape[0] + 1, "rows + 1")
    _tensor(f"{prefix}host_lens", host_lens, "rows, 2", dtype=torch.int32)
    if host_lens.device.type != "cpu":
        mend = "keep a CPU copy of the lengths: reading them from the device would stall it"
        raise MLAError(f"{prefix}host_lens", "a CPU tensor", host_lens.device, mend)
    _size(f"{prefix}host_lens", host_lens, 1, 2, "query length, sequence length")
    _size(f"{prefix}host_lens", host_lens, 0, seq_lens.shape[0], "rows of seq_lens")


def attention(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, w_uk: Tensor, w_uv: Tensor
) -> None:
    _floats(
        q_nope=(q_nope, "tokens, heads, qk_nope_head_dim"),
        q_pe=(q_pe, "tokens, heads, qk_rope_head_dim"),
        kv_c=(kv_c, "tokens, kv_lora_rank"),
        k_pe=(k_pe, "tokens, qk_rope_head_dim"),
        kv_cache=(kv_cache, "num_pages, page_size, width"),
        w_uk=(w_uk, "heads, qk_nope_head_dim, kv_lora_rank"),
        w_uv=(w_uv, "heads, kv_lora_rank, v_head_dim"),
    )
    _weights(q_nope, q_pe, kv_cache, w_uk, w_uv)
    _size("kv_c", kv_c, 0, q_nope.shape[0], "tokens of q_nope")
    _size("kv_c", kv_c, 1, w_uk.shape[2], "kv_lora_rank of w_uk")
    _size("k_pe", k_pe, 0, q_nope.shape[0], "tokens of q_nope")
    _size("k_pe", k_pe, 1, q_pe.shape[2], "qk_rope_head_dim of q_pe")


def slots(name: str, slot_mapping: Tensor, kv_cache: Tensor) -> None:
    if slot_mapping.device.type != "cpu" or slot_mapping.numel() == 0:
        return
    count = kv_cache.shape[0] * kv_cache.shape[1]
    low, high = (int(x) for x in slot_mapping.aminmax())
    if low < -1 or high >= count:
        raise MLAError(name, f"slots in [-1, {count})", f"[{low}, {high}]", "allocate more pages")


def lengths(name: str, seq_lens: Tensor, block_table: Tensor, kv_cache: Tensor) -> None:
    """seq_lens fit the table, and the table entries that serve them are pages of the cache."""
    if seq_lens.device.type != "cpu" or seq_lens.numel() == 0:
        return
    low, high = (int(x) for x in seq_lens.aminmax())
    if low < 0:
        raise MLAError(name, "lengths >= 0", low)
    check_capacity(name, high, block_table.shape[1], kv_cache.shape[1])
    used = torch.arange(block_table.shape[1], device="cpu") * kv_cache.shape[1] < seq_lens[:, None]
    pages = block_table[used]
    if pages.numel() and (int(pages.min()) < 0 or int(pages.max()) >= kv_cache.shape[0]):
        got = f"[{int(pages.min())}, {int(pages.max())}]"
        raise MLAError(name.replace("seq_lens", "block_table"), f"pages in [0, {kv_cache.shape[0]})", got)


def query_lengths(name: str, q_lens: Tensor | None, q_len: int) -> None:
    """No row has more valid query tokens than there are."""
    if q_lens is None or q_lens.device.type != "cpu" or q_lens.numel() == 0:
        return
    low, high = (int(x) for x in q_lens.aminmax())
    if low < 0 or high > q_len:
        raise MLAError(name, f"lengths in [0, q_len = {q_len}]", f"[{low}, {high}]")


def chunk_lengths(
    prefix: str,
    lens: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    tokens: int,
    block_table: Tensor,
    kv_cache: Tensor,
) -> None:
    """The host's lengths are sound in themselves, and those of the device where it is the CPU too."""
    name = f"{prefix}host_lens"
    q_lens, ends = lens.unbind(1)
    if int(q_lens.sum()) != tokens:
        raise MLAError(name, f"query lengths that sum to {tokens} tokens", q_lens.tolist())
    if bool((q_lens < 0).any()) or bool((ends < q_lens).any()):
        raise MLAError(name, "query lengths >= 0 and sequence lengths >= query lengths", lens.tolist())
    check_capacity(name, max(ends.tolist(), default=0), block_table.shape[1], kv_cache.shape[1])
    if seq_lens.device.type != "cpu":
        return
    if not torch.equal(ends, seq_lens):
        raise MLAError(f"{prefix}seq_lens", f"those of host_lens, {ends.tolist()}", seq_lens.tolist())
    sums = torch.nn.functional.pad(q_lens.cumsum(0, dtype=torch.int32), (1, 0))
    if not torch.equal(sums, cu_seqlens_q):
        raise MLAError(f"{prefix}cu_seqlens_q", f"{sums.tolist()}, from host_lens", cu_seqlens_q.tolist())


def page_size(page_size: int, kv_cache: Tensor) -> None:
    """The batch was built for pages as large as those of the cache; where that size is a symbol, compiled code asks."""
    size = kv_cache.shape[1]
    known = size_hint(size)
    if known not in (None, page_size):
        mend = f"build the batch with page_size={known}"
        raise MLAError("batch.page_size", f"that of kv_cache, {known}", page_size, mend)
    torch._check(size == page_size)


def batch(batch: MLABatch, tokens: int, kv_cache: Tensor) -> None:
    if not isinstance(batch, MLABatch):
        raise MLAError("batch", "an MLABatch", type(batch).__name__)
    page_size(batch.page_size, kv_cache)
    expected = 0
    if batch.decode is not None:
        _decode_segment("batch.decode.", batch.decode, kv_cache)
        expected += batch.decode.slot_mapping.shape[0]
    if batch.prefill is not None:
        _prefill_segment("batch.prefill.", batch.prefill, kv_cache)
        expected += batch.prefill.slot_mapping.shape[0]
    if tokens != expected:
        raise MLAError("q_nope", f"{expected} tokens (those of batch)", tokens)
    if kv_cache.device.type == "cpu":
        _written_pages_have_one_owner(batch, kv_cache)


def _decode_segment(prefix: str, decode: DecodeSegment, kv_cache: Tensor) -> None:
    _rows(prefix, decode.seq_lens, decode.block_table, kv_cache)
    _tensor(f"{prefix}slot_mapping", decode.slot_mapping, "rows * q_len", dtype=torch.int64, like=kv_cache)
    _query_rows(prefix, decode.q_lens, decode.q_len, decode.slot_mapping.shape[0], decode.seq_lens)
    lengths(f"{prefix}seq_lens", decode.seq_lens, decode.block_table, kv_cache)
    query_lengths(f"{prefix}q_lens", decode.q_lens, decode.q_len)
    slots(f"{prefix}slot_mapping", decode.slot_mapping, kv_cache)
    if kv_cache.device.type == "cpu":
        valid = torch.full_like(decode.seq_lens, decode.q_len) if decode.q_lens is None else decode.q_lens
        index = torch.arange(decode.q_len, device="cpu")
        positions = torch.where(index < valid[:, None], (decode.seq_lens - valid)[:, None] + index, -1)
        _slots_follow(prefix, decode, positions)


def _prefill_segment(prefix: str, prefill: PrefillSegment, kv_cache: Tensor) -> None:
    cu_seqlens_q, seq_lens, table = prefill.cu_seqlens_q, prefill.seq_lens, prefill.block_table
    _prefill_rows(prefix, cu_seqlens_q, seq_lens, table, prefill.host_lens, kv_cache)
    _tensor(f"{prefix}slot_mapping", prefill.slot_mapping, "tokens", dtype=torch.int64, like=kv_cache)
    lengths(f"{prefix}seq_lens", seq_lens, table, kv_cache)
    slots(f"{prefix}slot_mapping", prefill.slot_mapping, kv_cache)
    tokens = prefill.slot_mapping.shape[0]
    chunk_lengths(prefix, prefill.host_lens, cu_seqlens_q, seq_lens, tokens, table, kv_cache)
    if kv_cache.device.type == "cpu":
        lens, ends = prefill.host_lens.unbind(1)
        row = torch.arange(len(lens), device="cpu").repeat_interleave(lens)
        index = torch.arange(tokens, device="cpu") - cu_seqlens_q[row]
        _slots_follow(prefix, prefill, (ends - lens)[row] + index, row)


def _slots_follow(
    prefix: str, segment: DecodeSegment | PrefillSegment, positions: Tensor, row: Tensor | None = None
) -> None:
    """Each token writes to the place that its row's table gives its position, or nowhere.

    positions: int `[rows, n]`, or `[tokens]` with the `row` of each; -1 for what must write nowhere.
    """
    table, got = segment.block_table, segment.slot_mapping
    if row is not None:
        table, positions = table[row], positions[:, None]
    expected = slots_of(table, positions, segment.page_size).view(-1)
    wrong = (got != expected) & (got != -1)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        mend = "build the segment with decode_segment, prefill_segment or pack_batch"
        name = f"{prefix}slot_mapping"
        raise MLAError(
            name, f"{int(expected[token])} or -1 for token {token}, by block_table", int(got[token]), mend
        )


def _written_pages_have_one_owner(batch: MLABatch, kv_cache: Tensor) -> None:
    """No page that a token writes to is in another row's table, or twice in its own, within their lengths.

    Chunks of padding neither read nor write the pages of their tables.
    """
    num_pages, page_size, _ = kv_cache.shape
    held, written = [], []
    for segment in (batch.decode, batch.prefill):
        if segment is not None:
            start = torch.arange(segment.block_table.shape[1], device="cpu") * page_size
            writes = segment.slot_mapping >= 0
            lens = segment.seq_lens
            if isinstance(segment, PrefillSegment):
                sums = torch.nn.functional.pad(writes.cumsum(0), (1, 0))[segment.cu_seqlens_q]
                is_padding = (sums.diff() == 0) & (segment.host_lens[:, 0] == lens)
                lens = torch.where(is_padding, 0, lens)
            held.append(segment.block_table[start < lens[:, None]])
            written.append(segment.slot_mapping[writes] // page_size)
    times_held = torch.bincount(torch.cat(held), minlength=num_pages)
    shared = torch.cat(written)
    shared = shared[times_held[shared] > 1]
    if shared.numel():
        page = int(shared[0])
        expected = "one place in the tables for a page that is written to"
        mend = "give every row pages of its own; rows may share full pages that they only read"
        raise MLAError("batch: block_table", expected, f"page {page} in {int(times_held[page])} places", mend)
