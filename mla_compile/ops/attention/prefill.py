"""`mla_prefill`: attention of ragged prompt chunks over all keys of their rows, cached and new."""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.latents import rope_width
from mla_compile.ops import validate
from mla_compile.ops.attention.by_token import attend_by_token, merge_by_token
from mla_compile.ops.attention.operands import PrefillOperands
from mla_compile.ops.attention.softmax import in_parts, merge, softmax_weighted
from mla_compile.ops.batch_invariant import product_by_row
from mla_compile.ops.dispatch import FLOATS, HALF, SOME, Candidate, at_least, by_token, reference, triton
from mla_compile.ops.dtypes import accumulate_dtype
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import read_latents, row_of
from mla_compile.torch_internals import is_fake, statically_known_true

PREFILL = (
    # Expanding a key costs `2 * rank * (nope + v)` flops per head, however many tokens attend to it. Absorbed, a token
    # spends `2 * (2 * rank - nope - v)` more per visible key, and has its own two products with w_uk and w_uv. So with
    # many keys per token, absorbed attention has fewer flops up to `rank * (nope + v) / (2 * rank - nope - v)` tokens
    # of a row: 171 with DeepSeek-V3's widths, 398 with GLM's. This assumes one rate for all products. Expansion runs at
    # the rate of cuBLAS, but writes and reads `nope + rope + v` elements per head for each latent that it reads.
    # The bounds are lower, as all tokens may belong to one row. After 4096 keys an H200 is faster absorbed than with
    # FlashAttention up to 64 tokens with V3's 16 heads, up to 128 with GLM, and with V3's 128 heads at 32, not 64.
    triton(
        "absorbed attention over the latents, for few tokens after many keys",
        "mla_compile.ops.attention.kernels.absorbed_prefill:prefill_absorbed",
        name="absorbed",
        constraints={
            "dtype": FLOATS,
            "tokens": range(1, 49),
            "keys per token": at_least(8),
            "heads": SOME,
            "kv_lora_rank": range(1, 513),
            "qk_rope_head_dim": range(1, 129),
        },
    ),
    Candidate(
        "flash_attn",
        "FlashAttention 4, over expanded keys",
        "mla_compile.ops.attention.kernels.flash_attn:prefill_flash_attn",
        ("cuda",),
        min_capability=(9, 0),
        max_capability=(9, 0),
        packages=("triton", "flash_attn.cute"),
        constraints={
            "dtype": HALF,
            "tokens": SOME,
            "heads": SOME,
            "qk_head_dim": range(8, 257, 8),
            "v_head_dim": range(8, 257, 8),
        },
        batch_invariant=True,
    ),
    triton(
        "expanded keys, one head per program",
        "mla_compile.ops.attention.kernels.prefill:prefill_triton",
        constraints={
            "dtype": FLOATS,
            "tokens": SOME,
            "heads": SOME,
            "qk_head_dim": range(1, 385),
            "v_head_dim": range(1, 257),
        },
        batch_invariant=True,
    ),
    reference("mla_compile.ops.attention.prefill:prefill_torch"),
    by_token("mla_compile.ops.attention.prefill:prefill_by_token"),
)


@define_op(
    table=PREFILL,
    operands=PrefillOperands,
    layouts={
        "q": "tokens, heads, qk_head_dim",
        "w_uk": "heads, qk_nope_head_dim, kv_lora_rank",
        "w_uv": "heads, kv_lora_rank, v_head_dim",
        "kv_cache": "num_pages, page_size, width",
        "cu_seqlens_q": "int32 rows + 1",
        "cu_seqlens_k": "int32 parts, rows + 1",
        "key_slots": "int64 parts, keys",
        "before": "tokens_before, heads, v_head_dim or None",
    },
    facts=lambda q, kv_cache, w_uv, key_slots: {
        "keys per token": key_slots.numel() // max(1, q.shape[0]),
        "qk_rope_head_dim": rope_width(kv_cache, w_uv.shape[1]),
    },
)
def mla_prefill(
    q: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    key_slots: Tensor,
    softmax_scale: float,
    before: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Causal attention over all keys of each row, exact for any chunking of a prompt.

    The latents of all keys, including the new tokens', are read from the cache. They are expanded to keys and values
    per head with `w_uk` and `w_uv`; few tokens after many keys attend over the latents instead. A row's last query
    sees all its keys. Parts are joined by log-sum-exp.

    Args:
        q: `[tokens, heads, qk_nope_head_dim + qk_rope_head_dim]`, float; the second part is rotated.
        kv_cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous; or with FP8 latents
            (`mla_append`).
        w_uk: `[heads, qk_nope_head_dim, kv_lora_rank]`; w_uv: `[heads, kv_lora_rank, v_head_dim]`.
        cu_seqlens_q: prefix sum of the chunks' lengths, int32 `[rows + 1]`.
        cu_seqlens_k, key_slots: see `PrefillSegment`.
        softmax_scale: multiplies the scores.
        before: `[tokens_before, heads, v_head_dim]`, results of other tokens, which come first in this op's result.
        batch_invariant: a token's bits depend on its own query and keys only, not on the chunks that its prompt is cut
            into, nor on the other rows.

    Returns:
        `[tokens_before + tokens, heads, v_head_dim]` in the dtype of `q`; 0 for a token that sees no key.

    Raises:
        MLAError: an argument is invalid. Lengths and slots are checked on the CPU only.
    """
    if not is_fake(kv_cache):
        validate.Layouts().check("kv_cache", kv_cache, validate.PAGED)
    _, nope, rank = w_uk.shape
    rope = rope_width(kv_cache, rank)
    if statically_known_true(q.shape[2] - nope != rope):
        expected = f"{nope} + {rope} columns, those of w_uk and the rotated keys in kv_cache"
        raise MLAError("q", expected, list(q.shape))
    validate.key_ranges("", cu_seqlens_q, cu_seqlens_k, key_slots, q.shape[0], kv_cache)
    num_before = 0 if before is None else before.shape[0]
    return empty(q, (num_before + q.shape[0], q.shape[1], w_uv.shape[2]))


prefill_op = torch.ops.mla_compile.mla_prefill.default


KEY_BLOCK = 512
"""Keys attended at a time. It bounds the workspace: scores are `[heads, tokens, KEY_BLOCK]`."""


def prefill_torch(operands: PrefillOperands) -> Tensor:
    """`mla_prefill` in plain torch, for every device and dtype; kernels must agree with it. The host reads nothing."""
    q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, softmax_scale, _ = operands
    tokens, heads, _ = q.shape
    if tokens == 0:
        return operands.joined(q.new_empty(tokens, heads, w_uv.shape[2]))
    dtype, rank = accumulate_dtype(q.dtype), w_uk.shape[2]
    query = q.transpose(0, 1).to(dtype) * softmax_scale
    w_uk, w_uv, flat = w_uk.to(dtype), w_uv.to(dtype), kv_cache.view(-1, kv_cache.shape[2])
    token = torch.arange(tokens, device=q.device)
    row = row_of(token, cu_seqlens_q)
    to_end = cu_seqlens_q[row + 1] - 1 - token

    def attend(part: int, causal: bool) -> tuple[Tensor, Tensor]:
        slots, sums = key_slots[part], cu_seqlens_k[part]
        out = lse = None
        # The last key that each token sees.
        last = sums[row + 1] - 1 - (to_end if causal else 0)
        for start in range(0, len(slots), KEY_BLOCK):
            block = slots[start : start + KEY_BLOCK]
            key = torch.arange(start, start + len(block), device=q.device)
            visible = (key >= sums[row][:, None]) & (key <= last[:, None])
            latents = read_latents(flat, block.clamp(min=0), rank, dtype).to(dtype)
            # 0 x NaN is NaN: such latents count as 0, and only the tokens that see them get NaN below.
            finite = latents.isfinite().all(1)
            latents.masked_fill_(~finite[:, None], 0)
            keys = torch.cat([latents[:, :rank] @ w_uk.mT, latents[:, rank:].expand(heads, -1, -1)], dim=-1)
            scores = (query @ keys.mT).masked_fill_(~visible, -torch.inf)
            found = softmax_weighted(scores, latents[:, :rank] @ w_uv)
            found[0].masked_fill_((visible & ~finite).any(1)[:, None], torch.nan)
            out, lse = found if out is None or lse is None else merge(out, lse, *found)
        assert out is not None and lse is not None
        return out, lse

    return operands.joined(in_parts(attend, key_slots.shape[0]).transpose(0, 1).to(q.dtype).contiguous())


def prefill_by_token(operands: PrefillOperands) -> Tensor:
    """`mla_prefill` in plain torch, one token at a time: its bits do not depend on the rest of the call."""
    q, kv_cache, w_uk, w_uv, cu_seqlens_q, cu_seqlens_k, key_slots, softmax_scale, _ = operands
    (tokens, heads, _), nope, (_, rank, v) = q.shape, w_uk.shape[1], w_uv.shape
    if tokens * heads == 0:
        return operands.joined(q.new_empty(tokens, heads, v))
    query = q.to(accumulate_dtype(q.dtype))
    query = torch.cat([product_by_row(query[..., :nope], w_uk), query[..., nope:]], dim=-1)
    token = torch.arange(tokens, device=q.device)
    row = row_of(token, cu_seqlens_q)
    to_end = cu_seqlens_q[row + 1] - 1 - token
    latents = kv_cache.view(-1, kv_cache.shape[2])

    def attend(part: int, causal: bool) -> tuple[Tensor, Tensor]:
        first, keys = cu_seqlens_k[part, :-1], cu_seqlens_k[part].diff()
        most = int(keys.max()) if keys.device.type == "cpu" else key_slots.shape[1]
        index = first[:, None] + torch.arange(most, device=q.device)
        slots = key_slots[part][index.clamp(max=key_slots.shape[1] - 1)]
        seen = (keys[row] - (to_end if causal else 0)).clamp(min=0)
        return attend_by_token(query, latents, slots, row, seen, rank, softmax_scale)

    out = in_parts(attend, key_slots.shape[0], merge_by_token)
    return operands.joined(product_by_row(out, w_uv).to(q.dtype))
