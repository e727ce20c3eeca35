"""The choice of the highest scores in plain torch, common to `mla_decode_select` and `mla_prefill_select`."""

import torch
from torch import Tensor

from mla_compile.ops.ordering import indices_of
from mla_compile.ops.paging import row_of

NOT_SEEN = torch.iinfo(torch.int64).min
"""In place of the key (`distinct_keys`) of a score that does not count."""


def highest(keys: Tensor, topk: int) -> Tensor:
    """The indices of the highest of `keys` `[..., n]`, in rising order, int64 `[..., topk]`; -1 behind the last."""
    count = keys.shape[-1]
    best = keys.topk(min(topk, count), dim=-1, sorted=False).values
    chosen = torch.where(best == NOT_SEEN, count, indices_of(best, count)).sort(dim=-1).values
    chosen = torch.where(chosen == count, -1, chosen)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1)


def chosen_slots(key_slots: Tensor, chosen: Tensor) -> Tensor:
    """The slots of `chosen` keys, a result of `highest` for all `key_slots`, int32; -1 stays -1."""
    return torch.where(chosen < 0, -1, key_slots.flatten()[chosen.clamp(min=0)]).to(torch.int32)


def seen_in_parts(tokens: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """The first key that each token of prompt chunks sees in each part, and the one after the last, int32
    `[tokens, parts]`; see `PrefillSegment`."""
    token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    row = row_of(token, cu_seqlens_q)
    begin, end = cu_seqlens_k[:, row].T, cu_seqlens_k[:, row + 1].T.contiguous()
    end[:, -1] -= cu_seqlens_q[row + 1] - 1 - token  # of the last part, up to the token itself
    return begin, end
