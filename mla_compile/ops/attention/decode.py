"""`mla_decode`: absorbed attention of a few query tokens per row over the paged latents."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.attention.by_token import attend_by_token
from mla_compile.ops.attention.decode_backends import (
    DECODE_BACKENDS,
    DecodeBackend,
    decode_call,
    facts_of_queries,
    of_any_size,
    select_backend,
)
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.attention.softmax import product, softmax_weighted
from mla_compile.ops.dtypes import accumulate_dtype
from mla_compile.ops.library import define_op, empty
from mla_compile.ops.paging import gather_latents, num_pages_to_read, slots_of, visible_keys
from mla_compile.torch_internals import is_fake


def _run(*args: Any) -> tuple[Tensor, Tensor]:
    *operands, backend, plan, batch_invariant = args
    given = DecodeOperands(*operands)
    if not given.kv_cache.is_contiguous():  # a cache that a graph computes: see the op's layout
        given = given._replace(kv_cache=given.kv_cache.contiguous())
    chosen = choose_backend(given, backend, batch_invariant)
    if plan is not None and chosen is not planning_backend(given, backend):
        plan = None
    q_latent = given.q_latent
    if q_latent.shape[0] == 0 or q_latent.shape[1] == 0:
        lse = q_latent.new_empty(q_latent.shape[:2], dtype=accumulate_dtype(q_latent.dtype))
        return q_latent.new_empty(q_latent.shape), lse
    return chosen.run(given, plan)


def choose_backend(
    operands: DecodeOperands, backend: str | None, batch_invariant: bool = False
) -> DecodeBackend:
    """The backend that serves a call that is about to run. Raises `MLAError` if `backend` names one that cannot."""
    # Compiled code calls the op too, so an automatic choice never takes a backend that cannot be captured.
    captured = backend is None or (operands.q_latent.is_cuda and torch.cuda.is_current_stream_capturing())
    call = decode_call(operands, captured=captured, batch_invariant=batch_invariant)
    return select_backend(call, backend).chosen


def planning_backend(operands: DecodeOperands, backend: str | None) -> DecodeBackend:
    """The backend that `mla_decode_plan` plans for: that of calls with any number of queries."""
    call = decode_call(operands, captured=backend is None)
    return select_backend(of_any_size(call), backend).chosen


_LAYOUTS = {
    "q_latent": "tokens, heads, kv_lora_rank",
    "q_pe": "tokens, heads, qk_rope_head_dim",
    "kv_cache": validate.LATENTS,
    "seq_lens": "int32 rows",
    "q_lens": "int32 rows or None",
    "block_table": validate.TABLE,
}


# A fixed layout would copy every query, as absorbing leaves heads outermost. With a flexible one Inductor may also
# change the strides of a cache that a graph computes.
@define_op(
    table=DECODE_BACKENDS,
    layouts=_LAYOUTS,
    facts=facts_of_queries,
    run=_run,
    returns=("out", "lse"),
    layout=torch.Tag.flexible_layout,
)
def mla_decode(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    q_lens: Tensor | None = None,
    q_len: int,
    softmax_scale: float,
    backend: str | None = None,
    plan: Sequence[Tensor] | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention in the latent space (DeepSeek-V2, arXiv 2405.04434, section 2.1: the absorbed form).

    For query token j of a row, over its visible keys i (`visible_keys`):
    `softmax_i((q_latent . kv_c_i + q_pe . k_pe_i) * softmax_scale) @ kv_c`.

    Args:
        q_latent: `q_nope @ w_uk`, `[rows * q_len, heads, kv_lora_rank]`, float.
        q_pe: `[rows * q_len, heads, qk_rope_head_dim]`, same dtype.
        kv_cache: `[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]`, contiguous, same dtype, or with
            FP8 latents (`mla_append`); it already holds the new tokens' latents.
        block_table: int32 `[rows, max_pages]`; entries past a row's length are never followed.
        seq_lens: keys visible to a row's last valid query token, int32 `[rows]`; 0 for an inactive row.
        q_lens: valid query tokens per row, int32 `[rows]`; None means all `q_len`.
        q_len: query tokens per row, >= 1.
        softmax_scale: multiplies the scores.
        backend: a name in `DECODE_BACKENDS` (`ops/attention/decode_backends.py`); None selects the fastest that serves
            the call and may be captured in a CUDA graph.
        plan: the result of `mla_decode_plan` for the same `backend`; without it a backend that plans does so in each
            call.
        batch_invariant: a token's bits depend on its own query and keys only, not on the other rows, nor on `q_len`.

    Returns:
        out `[rows * q_len, heads, kv_lora_rank]` in the dtype of `q_latent`, 0 for a token that sees no key, and
        lse `[rows * q_len, heads]`, the natural-log log-sum-exp, -inf there; float32 (float64 for float64).

    Raises:
        MLAError: an argument is invalid, or `backend` cannot serve this call. Lengths are checked on the CPU only.
    """
    if not is_fake(kv_cache):
        validate.Layouts().check("kv_cache", kv_cache, validate.PAGED)
    validate.tokens_of_rows("", q_len, q_latent.shape[0], seq_lens.shape[0])
    validate.lengths("", seq_lens, block_table, kv_cache)
    validate.within("q_lens", "lengths", q_lens, 0, q_len)
    if backend is not None:
        given = DecodeOperands(q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale)
        call = decode_call(given, captured=False, batch_invariant=batch_invariant)  # see `plan_decode`
        select_backend(call, backend)
    lse = empty(q_latent, q_latent.shape[:2], accumulate_dtype(q_latent.dtype))
    return empty(q_latent, q_latent.shape), lse


decode_op = torch.ops.mla_compile.mla_decode.default


def _plan(*args: Any) -> list[Tensor]:
    *operands, place, backend = args
    given = DecodeOperands(*operands)
    planning = planning_backend(given, backend)
    is_used = not is_fake(given.seq_lens) and len(given.q_latent) > 0
    return planning.plan(given, place, unused=not is_used or choose_backend(given, backend) is not planning)


@define_op(layouts=_LAYOUTS, run=_plan, layout=torch.Tag.flexible_layout)
def mla_decode_plan(operands: DecodeOperands, place: int, backend: str | None) -> list[Tensor]:
    """The plan of a decode backend that divides its work by the rows' lengths, for the calls of all layers.

    A graph is compiled for many sizes, and its automatic choice is made for those of each call. If they leave the call
    to a backend without a plan, the plan's memory stays unwritten and unread.

    Args:
        operands, backend: those of one of the `mla_decode` calls. Only lengths and sizes matter.
        place: the number of the plan in its graph. A backend keeps one state per number, so plans do not overwrite
            each other.

    Returns:
        The tensors that `mla_decode` takes as `plan`; only the backend interprets them.
    """
    return _plan(*operands, place, backend) if is_fake(operands.seq_lens) else []


decode_plan_op = torch.ops.mla_compile.mla_decode_plan.default


def decode_torch(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    """`mla_decode` in plain torch, for every device and dtype; kernels must agree with it.

    Lengths are read on the CPU only.
    """
    q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale = operands
    tokens, heads, rank = q_latent.shape
    rows = seq_lens.shape[0]
    columns = num_pages_to_read(seq_lens, block_table, kv_cache.shape[1])
    latents = gather_latents(kv_cache, block_table, columns, seq_lens, rank, q_latent.dtype)
    query = torch.cat([q_latent, q_pe], dim=-1).view(rows, q_len * heads, -1)

    scores = product(query, latents.mT).mul_(softmax_scale).view(rows, q_len, heads, -1)
    bounds = visible_keys(seq_lens, q_lens, q_len)[:, :, None, None]
    scores.masked_fill_(torch.arange(scores.shape[-1], device=scores.device) >= bounds, -torch.inf)
    out, lse = softmax_weighted(scores.view(rows, q_len * heads, -1), latents[..., :rank])
    return out.view(tokens, heads, rank).to(q_latent.dtype), lse.view(tokens, heads)


def decode_by_token(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    """`mla_decode` in plain torch, one token at a time: its bits do not depend on the rest of the call."""
    q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale = operands
    tokens, _, rank = q_latent.shape
    page_size, width = kv_cache.shape[1:]
    columns = num_pages_to_read(seq_lens, block_table, page_size)
    rows = torch.arange(len(seq_lens), device=block_table.device)
    position = torch.arange(columns * page_size, device=block_table.device)
    query = torch.cat([q_latent, q_pe], dim=-1).to(accumulate_dtype(q_latent.dtype))
    row = torch.arange(tokens, device=block_table.device) // q_len
    seen = visible_keys(seq_lens, q_lens, q_len).flatten().clamp(max=columns * page_size)
    slots = slots_of(block_table, rows[:, None], position, page_size)
    out, lse = attend_by_token(query, kv_cache.view(-1, width), slots, row, seen, rank, softmax_scale)
    return out.to(q_latent.dtype), lse
