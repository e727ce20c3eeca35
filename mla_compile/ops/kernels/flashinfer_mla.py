"""FlashInfer's paged MLA attention behind `mla_decode`'s arguments. Written against flashinfer 0.6.18."""

import functools
import math

import torch
from torch import Tensor

from mla_compile.ops.operands import DecodeOperands
from mla_compile.ops.paging import check_capacity, visible_keys

_WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer recommends for partial results."""


@functools.cache
def _wrapper(device: torch.device):
    """One a device: each call plans anew, after a wait for the device, so that no plan is overwritten while in use."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.int8, device=device)
    kernels = "fa3" if torch.cuda.get_device_capability(device) == (9, 0) else "fa2"
    return BatchMLAPagedAttentionWrapper(workspace, backend=kernels)


def decode_flashinfer(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    """What `mla_decode` computes, for rows that all have `q_len` tokens: `q_lens` must be None.

    The device is waited for: FlashInfer divides the work on the host, by the rows' lengths.

    Raises:
        MLAError: a row is longer than its pages.
    """
    q_latent, q_pe, kv_cache, block_table, seq_lens, q_lens, q_len, softmax_scale = operands
    assert q_lens is None, "the table flattens ragged rows"
    tokens, heads, rank = q_latent.shape
    (rows,), page_size = seq_lens.shape, kv_cache.shape[1]
    lengths = seq_lens.cpu()
    check_capacity("seq_lens", max(lengths.tolist(), default=0), block_table.shape[1], page_size)
    pages = (lengths + page_size - 1) // page_size
    used = (
        torch.arange(block_table.shape[1], device=block_table.device) < pages.to(block_table.device)[:, None]
    )
    indices = torch.nn.functional.pad(block_table[used], (0, 1))  # never empty, also where all rows are

    wrapper = _wrapper(q_latent.device)
    wrapper.plan(
        qo_indptr=torch.arange(rows + 1, dtype=torch.int32, device="cpu") * q_len,
        kv_indptr=torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
        kv_indices=indices,
        kv_len_arr=lengths,
        num_heads=heads,
        head_dim_ckv=rank,
        head_dim_kpe=q_pe.shape[2],
        page_size=page_size,
        causal=q_len > 1,
        sm_scale=softmax_scale,
        q_data_type=q_latent.dtype,
        kv_data_type=kv_cache.dtype,
    )
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    wrapper.run(
        q_nope=q_latent.contiguous(),
        q_pe=q_pe.contiguous(),
        ckv_cache=kv_cache[..., :rank],
        kpe_cache=kv_cache[..., rank:],
        out=out,
        lse=lse,
        return_lse=True,
    )
    unseeing = visible_keys(seq_lens, None, q_len).view(tokens) == 0
    lse.mul_(math.log(2)).masked_fill_(unseeing[:, None], -torch.inf)  # it counts in bits
    return out.masked_fill_(unseeing[:, None, None], 0), lse
