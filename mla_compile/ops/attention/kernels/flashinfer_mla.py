"""FlashInfer's paged MLA attention with `mla_decode`'s arguments. Written for flashinfer 0.6.18."""

import functools
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_compile.ops.attention.decode_backends import Planner
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.paging import check_capacity, visible_keys

_WORKSPACE_BYTES = 128 * 2**20
"""The workspace that FlashInfer recommends for partial results."""
_ALONE = -1
"""The place of a call that makes its own plan."""


@functools.cache
def _workspace(device: torch.device, thread: int) -> Tensor:
    """One per device and thread, whose calls run one after the other."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=device)


@functools.cache
def _wrapper(device: torch.device, place: int, thread: int):
    """The wrapper with a thread's plan of a place, until the next plan there. Its creation waits for the device."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    kernels = "fa3" if torch.cuda.get_device_capability(device) == (9, 0) else "fa2"
    return BatchMLAPagedAttentionWrapper(_workspace(device, thread), backend=kernels)


def plan_flashinfer(operands: DecodeOperands, place: int) -> list[Tensor]:
    """Make a plan for rows that all have `q_len` tokens: `q_lens` must be None.

    The host waits for the device, as FlashInfer divides the work on the host, by the rows' lengths.

    Returns:
        The place of the plan, int64 `[1]` on the CPU, and which tokens see no key, bool `[rows * q_len]`.

    Raises:
        MLAError: a row is longer than its pages.
    """
    q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale = operands
    page_size = kv_cache.shape[1]
    assert q_lens is None, "the table flattens ragged rows"
    (rows,) = seq_lens.shape
    lengths = seq_lens.cpu()
    check_capacity("seq_lens", max(lengths.tolist(), default=0), block_table.shape[1], page_size)
    pages = (lengths + page_size - 1) // page_size
    used = (
        torch.arange(block_table.shape[1], device=block_table.device) < pages.to(block_table.device)[:, None]
    )
    _wrapper(seq_lens.device, place, threading.get_ident()).plan(
        qo_indptr=torch.arange(rows + 1, dtype=torch.int32, device="cpu") * q_len,
        kv_indptr=torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
        # Padded by one entry, as it must not be empty even if all rows are.
        kv_indices=torch.nn.functional.pad(block_table[used], (0, 1)),
        kv_len_arr=lengths,
        num_heads=q_latent.shape[1],
        head_dim_ckv=q_latent.shape[2],
        head_dim_kpe=q_pe.shape[2],
        page_size=page_size,
        causal=q_len > 1,
        sm_scale=softmax_scale,
        q_data_type=q_latent.dtype,
        kv_data_type=q_latent.dtype,
    )
    unseeing = visible_keys(seq_lens, None, q_len).view(-1) == 0
    return [torch.tensor([place], device="cpu"), unseeing]


def _like_plan(operands: DecodeOperands) -> list[Tensor]:
    tokens = operands.seq_lens.shape[0] * operands.q_len
    place = operands.seq_lens.new_empty(1, dtype=torch.int64, device="cpu")
    return [place, operands.seq_lens.new_empty(tokens, dtype=torch.bool)]


PLANNER = Planner(plan_flashinfer, _like_plan)


def decode_flashinfer(
    operands: DecodeOperands, plan: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """`mla_decode` with FlashInfer. Without a plan it makes one: see `plan_flashinfer`."""
    q_latent, q_pe, kv_cache, *_ = operands
    tokens, heads, rank = q_latent.shape
    place, unseeing = plan_flashinfer(operands, _ALONE) if plan is None else plan
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    _wrapper(q_latent.device, int(place), threading.get_ident()).run(
        q_nope=q_latent.contiguous(),
        q_pe=q_pe.contiguous(),
        ckv_cache=kv_cache[..., :rank],
        kpe_cache=kv_cache[..., rank:],
        out=out,
        lse=lse,
        return_lse=True,
    )
    lse.mul_(math.log(2)).masked_fill_(unseeing[:, None], -torch.inf)  # FlashInfer's logarithm is of base 2
    return out.masked_fill_(unseeing[:, None, None], 0), lse
