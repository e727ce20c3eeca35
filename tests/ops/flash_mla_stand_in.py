"""Stands in for the package `flash_mla` (sgl-flash-mla 1.0.0): its checks, and its results from the definition.

What a query that sees no key gets is NaN here, since the package promises nothing.
"""

import importlib.machinery
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

MULTIPROCESSORS = 132


def has_legacy() -> bool:
    return True


def get_mla_metadata() -> tuple[SimpleNamespace, None]:
    return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None


def get_mla_decoding_metadata(
    seqlens_k: Tensor, num_q_tokens_per_head_k: int, h_k: int, h_q: int, *, use_legacy: bool
) -> tuple[Tensor, Tensor]:
    """Every program has the sum of the lengths, so that the plan of other rows is noticed."""
    assert use_legacy and h_k == 1 and num_q_tokens_per_head_k % h_q == 0
    assert seqlens_k.dtype == torch.int32 and seqlens_k.is_contiguous() and len(seqlens_k) > 0
    programs = max(MULTIPROCESSORS // -(-num_q_tokens_per_head_k // 64), 1)
    splits = torch.nn.functional.pad(seqlens_k.cumsum(0), (1, 0)).int()
    return splits[-1].expand(programs, 8).contiguous(), splits


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: SimpleNamespace,
    *,
    softmax_scale: float,
    causal: bool,
    use_legacy: bool,
) -> tuple[Tensor, Tensor]:
    rows, q_len, heads, width = q.shape
    assert use_legacy and causal and (width, head_dim_v) == (576, 512)
    assert q.dtype == k_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)
    assert k_cache.shape[1:] == (64, 1, 576) and k_cache.is_contiguous() and q.is_contiguous()
    assert block_table.dtype == torch.int32 and block_table.shape[0] == rows and block_table.stride(-1) == 1
    plan = get_mla_decoding_metadata(cache_seqlens, q_len * heads, 1, heads, use_legacy=True)
    given = tile_scheduler_metadata.tile_scheduler_metadata, tile_scheduler_metadata.num_splits
    assert all(map(torch.equal, plan, given)), "the plan of other rows"

    out = torch.full((rows, q_len, heads, 512), torch.nan, dtype=q.dtype)
    lse = torch.full((rows, heads, q_len), torch.inf)
    for row, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[row, : -(-length // 64)].long()
        latents = k_cache[pages].view(-1, 576)[:length].float()
        for place in range(q_len):
            seen = latents[: max(0, length - (q_len - 1 - place))]
            if len(seen):
                scores = q[row, place].float() @ seen.T * softmax_scale
                out[row, place] = (scores.softmax(-1) @ seen[:, :512]).to(q.dtype)
                lse[row, :, place] = scores.logsumexp(-1)
    return out, lse


def module() -> ModuleType:
    """The package, for `sys.modules`."""
    module = ModuleType("flash_mla")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)
    for function in (has_legacy, get_mla_metadata, get_mla_decoding_metadata, flash_mla_with_kvcache):
        setattr(module, function.__name__, function)
    return module
