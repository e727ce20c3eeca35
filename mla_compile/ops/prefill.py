"""`mla_prefill`: expanded attention of ragged prompt chunks over their own tokens and their cached context."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.implementations import FLOATS, SOME, reference, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import accumulate_dtype, gather_latents, longest_lens
from mla_compile.ops.softmax import merge, softmax_weighted

PREFILL = (
    triton(
        "the new tokens first, then their context a bounded part at a time",
        "mla_compile.ops.kernels.prefill:prefill_triton",
        takes={
            "dtype": FLOATS,
            "tokens": SOME,
            "heads": SOME,
            "qk_nope_head_dim": range(1, 257),
            "qk_rope_head_dim": range(1, 129),
            "v_head_dim": range(1, 257),
        },
    ),
    reference("mla_compile.ops.prefill:prefill_torch"),
)


@define_op(
    table=PREFILL,
    facts=lambda q_nope, q_pe, v: {
        "dtype": q_nope.dtype,
        "tokens": q_nope.shape[0],
        "heads": q_nope.shape[1],
        "qk_nope_head_dim": q_nope.shape[2],
        "qk_rope_head_dim": q_pe.shape[2],
        "v_head_dim": v.shape[2],
    },
    # It sizes its workspace from host_lens, so a captured replay would keep the first call's sizes.
    tags=(torch.Tag.cudagraph_unsafe,),
)
def mla_prefill(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    host_lens: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Causal attention with keys and values expanded per head, exact for any chunking of a prompt.

    New tokens attend to each other through `k_nope`, `k_pe`, `v`; the `seq_len - q_len` tokens before them are
    read from pages in blocks, expanded with `w_uk`, `w_uv` and merged by log-sum-exp.

    Args:
        q_nope, k_nope: `[tokens, heads, qk_nope_head_dim]`, float.
        q_pe: `[tokens, heads, qk_rope_head_dim]`; k_pe: `[tokens, qk_rope_head_dim]`.
        v: `[tokens, heads, v_head_dim]`.
        kv_cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous.
        w_uk: `[heads, qk_nope_head_dim, kv_lora_rank]`; w_uv: `[heads, kv_lora_rank, v_head_dim]`.
        cu_seqlens_q: prefix sum of the chunks' lengths, int32 `[rows + 1]`.
        seq_lens: int32 `[rows]`, context and chunk together; block_table: int32 `[rows, max_pages]`.
        host_lens: int32 `[rows, 2]` on the CPU: query length, sequence length (sizes are read from it).
        softmax_scale: multiplies the scores.

    Returns:
        `[tokens, heads, v_head_dim]` in the dtype of `v`.

    Raises:
        MLAError: an argument that is not so, named. Lengths are checked where they are on the CPU.
    """
    sizes = validate.Layouts()
    sizes.floats(
        q_nope=(q_nope, "tokens, heads, qk_nope_head_dim"),
        q_pe=(q_pe, "tokens, heads, qk_rope_head_dim"),
        k_nope=(k_nope, "tokens, heads, qk_nope_head_dim"),
        k_pe=(k_pe, "tokens, qk_rope_head_dim"),
        v=(v, "tokens, heads, v_head_dim"),
        w_uk=(w_uk, "heads, qk_nope_head_dim, kv_lora_rank"),
        w_uv=(w_uv, "heads, kv_lora_rank, v_head_dim"),
        kv_cache=(kv_cache, validate.PAGED),
    )
    validate.prefill_rows(sizes, cu_seqlens_q, seq_lens, block_table, host_lens, q_nope)
    validate.lengths("seq_lens", seq_lens, block_table, kv_cache)
    validate.chunk_lengths("", host_lens, cu_seqlens_q, seq_lens, q_nope.shape[0], block_table, kv_cache)
    return empty(v, v.shape)


prefill_op = torch.ops.mla_compile.mla_prefill.default


KEY_BLOCK = 512
"""Keys attended at a time: it bounds the workspace, scores being `[rows, heads, max_q, KEY_BLOCK]`."""


class _KeyBlock(NamedTuple):
    """One block of keys: k `[rows, heads, n, qk]`, v `[rows, heads, n, v]`, visible `[rows, 1, max_q or 1, n]`."""

    k: Tensor
    v: Tensor
    visible: Tensor


def prefill_torch(
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
    softmax_scale: float,
) -> Tensor:
    """`mla_prefill` in plain torch: every device, every dtype, and the kernel's twin."""
    tokens = q_nope.shape[0]
    if tokens == 0:
        return v.new_empty(v.shape)
    accumulate = accumulate_dtype(q_nope.dtype)
    max_q, max_context = longest_lens(host_lens)
    q_lens = cu_seqlens_q.diff()
    offset = torch.arange(max_q, device=q_nope.device)
    # Ragged -> padded: row r's token j is packed token cu[r] + j; positions past its end repeat the last token.
    packed = (cu_seqlens_q[:-1, None] + offset).clamp(max=tokens - 1)

    def padded(x: Tensor) -> Tensor:
        """`[tokens, heads, n]` -> `[rows, heads, max_q, n]`."""
        return x[packed].transpose(1, 2).to(accumulate)

    query = padded(torch.cat([q_nope, q_pe], dim=-1)) * softmax_scale

    def new_tokens() -> Iterator[_KeyBlock]:
        key = padded(torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], dim=-1))
        # Zeros past a row's end, where its neighbour's values stand, not only masked scores: 0 x NaN is NaN.
        value = padded(v).masked_fill_((offset >= q_lens[:, None])[:, None, :, None], 0)
        for start in range(0, max_q, KEY_BLOCK):
            index = offset[start : start + KEY_BLOCK]
            visible = (index <= offset[:, None]) & (index < q_lens[:, None, None])
            block = slice(start, start + KEY_BLOCK)
            yield _KeyBlock(key[:, :, block], value[:, :, block], visible[:, None])

    def context() -> Iterator[_KeyBlock]:
        page_size, rank = kv_cache.shape[1], w_uk.shape[2]
        lens = seq_lens - q_lens
        last = -(-max_context // page_size)
        step = max(1, KEY_BLOCK // page_size)
        for start in range(0, last, step):
            stop = min(last, start + step)
            latents = gather_latents(kv_cache, block_table, start, stop, lens).to(accumulate)[:, None]
            nope = latents[..., :rank] @ w_uk.to(accumulate).mT
            rope = latents[..., rank:].expand(-1, nope.shape[1], -1, -1)
            position = torch.arange(start * page_size, stop * page_size, device=lens.device)
            visible = (position < lens[:, None])[:, None, None]
            value = latents[..., :rank] @ w_uv.to(accumulate)
            yield _KeyBlock(torch.cat([nope, rope], dim=-1), value, visible)

    out = lse = None
    for source in (new_tokens(), context()):
        for block in source:
            part, part_lse = _attend(query, block)
            out, lse = (part, part_lse) if out is None or lse is None else merge(out, lse, part, part_lse)
    assert out is not None
    token = torch.arange(tokens, device=q_nope.device, dtype=cu_seqlens_q.dtype)
    row = torch.searchsorted(cu_seqlens_q[1:], token, right=True).clamp(max=seq_lens.shape[0] - 1)
    return out[row, :, (token - cu_seqlens_q[row]).clamp(max=max_q - 1)].to(v.dtype)


def _attend(query: Tensor, block: _KeyBlock) -> tuple[Tensor, Tensor]:
    scores = (query @ block.k.mT).masked_fill_(~block.visible, -torch.inf)
    return softmax_weighted(scores, block.v)
