"""`mla_decode`: absorbed attention of a few query tokens per row over the paged latents."""

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.kernels.plan import supports_decode
from mla_compile.ops.library import define_op
from mla_compile.ops.paging import accumulate_dtype, gather_latents, num_pages_to_read, visible_keys
from mla_compile.ops.softmax import product, softmax_weighted


def _fake(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    validate.decode(q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len)
    lse = q_latent.new_empty(q_latent.shape[:2], dtype=accumulate_dtype(q_latent.dtype))
    return q_latent.new_empty(q_latent.shape), lse


@define_op(
    "mla_decode(Tensor q_latent, Tensor q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor? q_lens, SymInt q_len, float softmax_scale) -> (Tensor out, Tensor lse)",
    fake=_fake,
)
def decode_op(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    if supports_decode(q_latent, q_pe):
        from mla_compile.ops.kernels.decode import decode_triton

        return decode_triton(q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale)
    return decode_torch(q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale)


def decode_torch(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    q_lens: Tensor | None,
    q_len: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """`mla_decode` in plain torch: every device, every dtype, and the kernel's twin."""
    tokens, heads, rank = q_latent.shape
    rows = seq_lens.shape[0]
    columns = num_pages_to_read(seq_lens, block_table, kv_cache.shape[1])
    latents = gather_latents(kv_cache, block_table, 0, columns, seq_lens)
    query = torch.cat([q_latent, q_pe], dim=-1).view(rows, q_len * heads, -1)

    scores = product(query, latents.mT).mul_(softmax_scale).view(rows, q_len, heads, -1)
    bounds = visible_keys(seq_lens, q_lens, q_len)[:, :, None, None]
    scores.masked_fill_(torch.arange(scores.shape[-1], device=scores.device) >= bounds, -torch.inf)
    out, lse = softmax_weighted(scores.view(rows, q_len * heads, -1), latents[..., :rank])
    return out.view(tokens, heads, rank).to(q_latent.dtype), lse.view(tokens, heads)


def flatten_to_single(
    tokens: Tensor, block_table: Tensor, seq_lens: Tensor, q_lens: Tensor | None, q_len: int
) -> tuple[Tensor, Tensor]:
    """`block_table` and `seq_lens` that serve the chosen query tokens as rows of one token each.

    tokens: indices into the `rows * q_len` query tokens, int64 `[n]`. Each keeps the keys that it sees.
    """
    bounds = visible_keys(seq_lens, q_lens, q_len).reshape(-1).index_select(0, tokens)
    return block_table.index_select(0, tokens // q_len), bounds


def mla_decode(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    q_len: int,
    softmax_scale: float,
    q_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in the latent space (DeepSeek-V2, arXiv 2405.04434, section 2.1: the absorbed form).

    For query token j of a row, over the keys i it sees (`visible_keys`):
    `softmax_i((q_latent . kv_c_i + q_pe . k_pe_i) * softmax_scale) @ kv_c`.

    Args:
        q_latent: `q_nope @ w_uk`, `[rows * q_len, heads, kv_lora_rank]`, float.
        q_pe: `[rows * q_len, heads, qk_rope_head_dim]`, same dtype.
        kv_cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous, same dtype; the new
            tokens' latents are already in it.
        block_table: int32 `[rows, max_pages]`; entries past a row's length are never followed.
        seq_lens: keys visible to a row's last valid query token, int32 `[rows]`; 0 for an inactive row.
        q_len: query tokens per row, >= 1.
        softmax_scale: multiplies the scores.
        q_lens: valid query tokens per row, int32 `[rows]`; None means all `q_len`.

    Returns:
        out `[rows * q_len, heads, kv_lora_rank]` in the dtype of `q_latent`, 0 for a token that sees no key, and
        lse `[rows * q_len, heads]`, the natural-log log-sum-exp, -inf there; float32 (float64 for float64).

    Raises:
        MLAError: an argument that is not so, named. Lengths are checked where they are on the CPU.
    """
    if not torch.compiler.is_compiling():
        validate.decode(q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len)
        validate.lengths("seq_lens", seq_lens, block_table, kv_cache)
        validate.query_lengths("q_lens", q_lens, q_len)
    out, lse = decode_op(q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale)
    return out, lse
