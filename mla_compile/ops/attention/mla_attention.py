"""`mla_attention`: the one op that a model calls, and its definition in terms of the segment ops."""

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile.batch import DecodeSegment, MLABatch, PrefillSegment
from mla_compile.errors import MLAError
from mla_compile.ops import validate
from mla_compile.ops.attention.append import append_op
from mla_compile.ops.attention.decode import choose_backend, decode_op
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.attention.prefill import prefill_op
from mla_compile.ops.attention.sparse import sparse_op
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.linear.matmul import matmul_by_head_op
from mla_compile.torch_internals import run_check


class AttentionOperands(NamedTuple):
    """The arguments of the op `mla_attention`, with the fields of a batch flattened."""

    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    kv_cache: Tensor
    w_uk: Tensor
    w_uv: Tensor
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
    softmax_scale: float
    decode_backend: str | None = None
    selected: Tensor | None = None


@define_op(
    layouts={
        "q_nope": "tokens, heads, qk_nope_head_dim",
        "q_pe": "tokens, heads, qk_rope_head_dim",
        "w_uk": "heads, qk_nope_head_dim, kv_lora_rank",
        "w_uv": "heads, kv_lora_rank, v_head_dim",
        "kv_c": "tokens, kv_lora_rank",
        "k_pe": "tokens, qk_rope_head_dim",
        "kv_cache": validate.PAGED,
        "selected": "int32 tokens, topk or None",
    },
    run=lambda *args: lower_mla_attention(*args),
    name="mla_attention",
    mutates=("kv_cache",),
    static="page_size",
    tags=(torch.Tag.cudagraph_unsafe,),  # a decode backend that is selected by name may plan on the host
)
def _attention(call: AttentionOperands) -> Tensor:
    if call.selected is not None:
        if call.decode_backend is not None:
            hint = "no decode backend serves selected keys"
            raise MLAError("batch.decode.backend", "None with selected", call.decode_backend, hint)
        validate.slots("selected", call.selected, call.kv_cache)
    elif call.decode_backend is not None and call.decode_seq_lens is not None:
        like_q_latent = call.w_uk.transpose(0, 1)  # its device, dtype, heads and width
        rows = call.decode_block_table, call.decode_seq_lens, call.decode_q_lens
        given: Any = like_q_latent, call.q_pe, call.kv_cache, *rows, call.q_len, call.softmax_scale
        choose_backend(DecodeOperands(*given), call.decode_backend)
    return empty(call.q_nope, (*call.q_nope.shape[:2], call.w_uv.shape[2]))


attention_op = torch.ops.mla_compile.mla_attention.default


def lower_mla_attention(*args: Any) -> Tensor:
    """The unified op in terms of segment ops. Eager calls run it; `split_prefill_decode` inlines it in graphs.

    Only `is None`, shapes and torch functions are used, so the arguments may be graph proxies. Both split sizes
    come from metadata shapes: slicing at a symbolic bound would make unbacked symbols.
    """
    call = AttentionOperands(*args)
    decode_slots, prefill_slots = call.decode_slot_mapping, call.prefill_slot_mapping
    append_op(call.kv_c, call.k_pe, call.kv_cache, joined_slots(decode_slots, prefill_slots))
    if call.selected is not None:  # a token's slots say all about it, so both segments are one
        q_latent = matmul_by_head_op(call.q_nope, call.w_uk)
        latent_out = sparse_op(q_latent, call.q_pe, call.kv_cache, call.selected, call.softmax_scale)
        result: Tensor = matmul_by_head_op(latent_out, call.w_uv)
        return result
    if decode_slots is not None and prefill_slots is not None:
        sizes = [decode_slots.shape[0], prefill_slots.shape[0]]
        decode_q_nope, prefill_q_nope = torch.split(call.q_nope, sizes)
        decode_q_pe, prefill_q_pe = torch.split(call.q_pe, sizes)
    else:
        decode_q_nope = prefill_q_nope = call.q_nope
        decode_q_pe = prefill_q_pe = call.q_pe

    out: Tensor | None = None
    if decode_slots is not None:
        q_latent = matmul_by_head_op(decode_q_nope, call.w_uk)
        rows = call.decode_block_table, call.decode_seq_lens, call.decode_q_lens, call.q_len
        latent_out, _ = decode_op(
            q_latent, decode_q_pe, call.kv_cache, *rows, call.softmax_scale, call.decode_backend
        )
        out = matmul_by_head_op(latent_out, call.w_uv)
    if prefill_slots is not None:
        q = torch.cat([prefill_q_nope, prefill_q_pe], dim=-1)
        keys = call.prefill_cu_seqlens_q, call.prefill_cu_seqlens_k, call.prefill_key_slots
        # It writes behind the decode rows' result: joining two results would copy both.
        out = prefill_op(q, call.kv_cache, call.w_uk, call.w_uv, *keys, call.softmax_scale, out)
    assert out is not None  # a batch has a segment
    return out


def joined_slots(decode: Tensor | None, prefill: Tensor | None) -> Tensor | None:
    """The slots of all tokens of a batch; either segment may be absent."""
    if decode is None or prefill is None:
        return prefill if decode is None else decode
    return torch.cat([decode, prefill])


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    batch: MLABatch,
    softmax_scale: float,
    selected: Tensor | None = None,
) -> Tensor:
    """Multi-head latent attention of a packed batch over a paged latent cache, after appending the new latents to it.

    Tokens are laid out decode rows first (`rows * q_len`), then prefill tokens. The formula is that of
    DeepSeek-V2 (arXiv 2405.04434, section 2.1); `tests/reference.py` defines it in float64. Under
    `torch.compile(backend="mla")` it is one opaque op that the split pass rewrites into segments.

    Args:
        q_nope: `[tokens, heads, qk_nope_head_dim]`, float.
        q_pe: rotated, `[tokens, heads, qk_rope_head_dim]`.
        kv_c: normalised latents, `[tokens, kv_lora_rank]`.
        k_pe: rotated shared keys, `[tokens, qk_rope_head_dim]`.
        kv_cache: this layer's cache, `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous, or
            with FP8 latents (`mla_append`); mutated.
        w_uk: `[heads, qk_nope_head_dim, kv_lora_rank]`; w_uv: `[heads, kv_lora_rank, v_head_dim]`: the two
            halves of `kv_b_proj`, views are fine.
        batch: the segments of the batch, which assign its tokens to rows.
        softmax_scale: multiplies the scores.
        selected: the slots of the keys that each token attends to, int32 `[tokens, topk]`; -1 is no slot. None: all
            keys before it and itself. `mla_select_keys` makes it; it must not hold a later token's slot.

    Returns:
        `[tokens, heads, v_head_dim]` in the dtype of `q_nope`; 0 for a token that sees no key.

    Raises:
        MLAError: an argument is invalid; raised before the cache is written. Lengths and slots are checked on the CPU
            only. Compiled code neither reads nor checks `seq_lens`, `block_table` and `host_lens` of prompt chunks.
    """
    segments, q_len, backend = segment_arguments(batch, q_nope, kv_cache)
    run_check(validate.scale, softmax_scale)
    tensors = q_nope, q_pe, kv_c, k_pe, kv_cache, w_uk, w_uv
    numbers = q_len, batch.page_size, softmax_scale, backend
    arguments: tuple[Any, ...] = *tensors, *segments, *numbers, selected
    return _attention(*arguments)


def segment_arguments(
    batch: MLABatch, q: Tensor, cache: Tensor, name: str = "q_nope"
) -> tuple[tuple[Tensor | None, ...], int, str | None]:
    """The fields of a batch that ops take, checked: four of each segment; `q_len`; the decode backend's name.

    q, name: queries of the batch's tokens, `[tokens, heads, width]`, and their name in errors; cache: has its pages.
    """
    validate.is_batch(batch)
    if torch.compiler.is_dynamo_compiling():
        segments = [
            segment and tuple(getattr(segment, field) for field in fields)
            for segment, fields in ((batch.decode, DECODE), (batch.prefill, PREFILL))
        ]
        run_check(check_batch, q, cache, *segments, name)
    else:
        validate.batch(batch, q, cache, name)
    decode, prefill = batch.decode, batch.prefill
    rows: tuple[Tensor | None, ...] = (None,) * 4
    if decode is not None:
        rows = decode.seq_lens, decode.block_table, decode.slot_mapping, decode.q_lens
    chunks: tuple[Tensor | None, ...] = (None,) * 4
    if prefill is not None:
        slots, keys = prefill.slot_mapping, prefill.key_slots
        chunks = prefill.cu_seqlens_q, slots, keys, prefill.cu_seqlens_k
    q_len, backend = (1, None) if decode is None else (decode.q_len, decode.backend)
    return (*rows, *chunks), q_len, backend


_UNREAD = ("seq_lens", "block_table", "host_lens")
"""Fields of prompt chunks that compiled code does not read: access would make them inputs, on the CPU too."""
DECODE = tuple(f.name for f in fields(DecodeSegment))
PREFILL = tuple(f.name for f in fields(PrefillSegment) if f.name not in _UNREAD)


def check_batch(q: Tensor, cache: Tensor, decode: Any, prefill: Any, name: str = "q_nope") -> None:
    """`validate.batch` of the segments' fields that compiled code reads."""
    if prefill:
        known: dict[str, Any] = {**dict.fromkeys(_UNREAD), **dict(zip(PREFILL, prefill))}
        prefill = PrefillSegment(**known)
    validate.batch(MLABatch(decode and DecodeSegment(*decode), prefill), q, cache, name)


def up_projections(weight: Tensor, num_heads: int, qk_nope_head_dim: int) -> tuple[Tensor, Tensor]:
    """The two halves of the weight of a `kv_b_proj`, `[heads * (nope + v_head_dim), kv_lora_rank]`, as views of it.

    Returns:
        w_uk `[heads, qk_nope_head_dim, kv_lora_rank]` and w_uv `[heads, kv_lora_rank, v_head_dim]`.
    """
    per_head = weight.view(num_heads, -1, weight.shape[1])
    w_uk, w_uv = per_head.split([qk_nope_head_dim, per_head.shape[1] - qk_nope_head_dim], dim=1)
    return w_uk, w_uv.transpose(1, 2)
