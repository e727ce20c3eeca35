"""MLA from its definition, in float64, row by row: slow and obvious, the reference of every implementation.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, equations 9-17, after the rotary embedding.
"""

import torch
from torch import Tensor

from mla_compile.batch import MLABatch


def attend_one(
    q_nope: Tensor, q_pe: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """One query token over `latents` `[keys, kv_lora_rank + rope]`: out `[heads, v]` and lse `[heads]`, float64."""
    rank = w_uk.shape[2]
    kv_c, k_pe = latents.double().split([rank, latents.shape[1] - rank], dim=-1)
    key = torch.einsum("kl,hnl->hkn", kv_c, w_uk.double())
    value = torch.einsum("kl,hlv->hkv", kv_c, w_uv.double())
    scores = torch.einsum("hn,hkn->hk", q_nope.double(), key) + q_pe.double() @ k_pe.T
    lse = (scores * softmax_scale).logsumexp(-1)
    if latents.shape[0] == 0:
        return value.new_zeros(value.shape[0], value.shape[2]), lse
    return torch.einsum("hk,hkv->hv", (scores * softmax_scale).softmax(-1), value), lse


def mla_attention_reference(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    batch: MLABatch,
    softmax_scale: float,
) -> Tensor:
    """What `mla_attention` must return, float64 `[tokens, heads, v_head_dim]`; writes the new latents to `kv_cache`."""
    segments = [s for s in (batch.decode, batch.prefill) if s is not None]
    flat = kv_cache.view(-1, kv_cache.shape[2])
    for slot, latent in zip(
        torch.cat([s.slot_mapping for s in segments]), torch.cat([kv_c, k_pe], -1), strict=True
    ):
        if slot >= 0:
            flat[slot] = latent

    outputs = []
    for token, (table, keys) in enumerate(tokens_of(batch)):
        index = torch.arange(keys, device=table.device)
        slots = table[index // kv_cache.shape[1]].long() * kv_cache.shape[1] + index % kv_cache.shape[1]
        outputs.append(attend_one(q_nope[token], q_pe[token], flat[slots], w_uk, w_uv, softmax_scale)[0])
    return torch.stack(outputs)


def tokens_of(batch: MLABatch) -> list[tuple[Tensor, int]]:
    """Each packed token's row of the block table, and the number of keys that it sees."""
    tokens: list[tuple[Tensor, int]] = []
    if (decode := batch.decode) is not None:
        for row, seq_len in enumerate(decode.seq_lens.tolist()):
            valid = decode.q_len if decode.q_lens is None else int(decode.q_lens[row])
            for j in range(decode.q_len):
                keys = max(0, seq_len - (valid - 1 - j)) if j < valid else 0
                tokens.append((decode.block_table[row], keys))
    if (prefill := batch.prefill) is not None:
        for row, (q_len, seq_len) in enumerate(prefill.host_lens.tolist()):
            tokens += [(prefill.block_table[row], seq_len - q_len + j + 1) for j in range(q_len)]
    return tokens
