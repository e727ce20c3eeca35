"""Stands in for the package `flash_mla` (sgl-flash-mla 1.0.0): its checks, and its results from the definition.

What a query of dense attention that sees no key gets is NaN here, since the package promises nothing. Its sparse
kernels give 0, and inf as the log-sum-exp.
"""

import importlib.machinery
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from mla_compile.latents import unpack

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
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: SimpleNamespace,
    *,
    softmax_scale: float,
    use_legacy: bool,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if indices is not None:
        assert use_legacy and is_fp8_kvcache and not causal and head_dim_v == 512
        assert block_table is None and cache_seqlens is None
        return sparse_decode(q, k_cache, indices, tile_scheduler_metadata, softmax_scale)
    assert block_table is not None and cache_seqlens is not None
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


def attend(query: Tensor, kv: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one token, `[heads, 576]`, over its slots of `[slots, 576]`."""
    latents = kv[slots[slots >= 0].long()].float()
    if len(latents) == 0:
        return torch.zeros(len(query), 512), torch.full((len(query),), torch.inf)
    scores = query.float() @ latents.T * scale
    return scores.softmax(-1) @ latents[:, :512], scores.logsumexp(-1)


def sparse_decode(
    q: Tensor, cache: Tensor, indices: Tensor, schedule: SimpleNamespace, scale: float
) -> tuple[Tensor, Tensor]:
    """FP8 latents; every program's blocks are attended to as the plan says, and joined."""
    rows, tokens, heads, width = q.shape
    topk = indices.shape[2]
    assert (q.dtype, width, cache.dtype, cache.shape[2:]) == (torch.bfloat16, 576, torch.uint8, (1, 656))
    assert heads in (64, 128) and cache.is_contiguous() and topk % 64 == 0
    assert indices.dtype == torch.int32 and indices.shape[:2] == (rows, tokens) and indices.stride(-1) == 1
    plan, splits = schedule.tile_scheduler_metadata, schedule.num_splits
    programs = max(MULTIPROCESSORS // tokens // (heads // 64), 1)
    assert (plan.shape, plan.dtype, splits.dtype) == ((programs, 8), torch.int32, torch.int32)
    parts: list[list[tuple[int, int, int, int]]] = [[] for _ in range(rows)]
    for first, last, begin, end, part, first_divided, last_divided, _ in plan.tolist():
        if first < rows:
            assert first == last and part == len(parts[first]), "this stand-in knows programs of one row"
            parts[first].append((begin, end, first_divided, last_divided))
    kv = unpack(cache.flatten(0, 2), 512, torch.bfloat16)
    outs, lses = [], []
    for row, blocks in enumerate(parts):
        assert [begin for begin, *_ in blocks] == [0, *(end for _, end, *_ in blocks[:-1])], (
            "not every block once"
        )
        assert blocks[-1][1] == topk // 64
        assert all(divided == (len(blocks) > 1,) * 2 for *_, divided in ((b[0], b[2:]) for b in blocks))
        assert int(splits[row + 1] - splits[row]) == len(blocks)
        for token in range(tokens):
            of_token = q[row, token], kv
            found = [attend(*of_token, indices[row, token, 64 * b : 64 * e], scale) for b, e, *_ in blocks]
            lse = torch.stack([one for _, one in found])
            weights = torch.where(lse == torch.inf, -torch.inf, lse).softmax(0).nan_to_num(0)
            outs.append((torch.stack([one for one, _ in found]) * weights[..., None]).sum(0))
            lses.append(torch.where(lse == torch.inf, -torch.inf, lse).logsumexp(0))
    out = torch.stack(outs).to(q.dtype).view(rows, tokens, heads, 512)
    return out, torch.stack(lses).view(rows, tokens, heads).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int,
    *,
    topk_length: Tensor,
    use_legacy: bool,
    return_log2_lse: bool | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    tokens, heads, width = q.shape
    assert use_legacy and return_log2_lse is not True and d_v == 512 and heads in (64, 128)
    assert q.dtype == kv.dtype == torch.bfloat16 and width == 576 and kv.shape[1:] == (1, 576)
    assert indices.dtype == torch.int32 and indices.shape[:2] == (tokens, 1) and indices.shape[2] % 128 == 0
    assert topk_length.dtype == torch.int32 and topk_length.shape == (tokens,)
    found = []
    for query, (slots,), length in zip(q, indices, topk_length.tolist(), strict=True):
        assert (slots[length:] < 0).all(), "no slot may stand behind the length"
        found.append(attend(query, kv[:, 0], slots[:length], sm_scale))
    out, lse = (torch.stack(each) for each in zip(*found, strict=True))
    return out.to(q.dtype), *((None, None) if return_log2_lse is False else (lse, lse))


def module() -> ModuleType:
    """The package, for `sys.modules`."""
    module = ModuleType("flash_mla")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)
    for function in (
        has_legacy,
        get_mla_metadata,
        get_mla_decoding_metadata,
        flash_mla_with_kvcache,
        flash_mla_sparse_fwd,
    ):
        setattr(module, function.__name__, function)
    return module
