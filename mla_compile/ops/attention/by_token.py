"""Batch-invariant attention in plain torch, on any device: every token by itself, absorbed over the latents.

On a CPU the bits of a product depend on its shape and on its operands' addresses. So all products have one shape, and
their operands are new tensors. It is slow: a token needs about ten operations for every KEYS keys that it sees.
"""

import torch
from torch import Tensor

from mla_compile.ops.attention.softmax import merge, product, softmax_weighted
from mla_compile.ops.paging import read_latents

KEYS = 256
"""Keys of a product. A row's keys are cut at multiples of it."""


def attend_by_token(
    query: Tensor, latents: Tensor, slots: Tensor, row: Tensor, seen: Tensor, rank: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every token over the first keys of its row.

    query: `[tokens, heads, width]`, in the accumulation dtype; latents: the cache, `[slots, width]`, of keys whose
    first `rank` columns are the values; slots: the slots of every row's keys, int64 `[rows, keys]`; row: the row of
    each token, int64 `[tokens]`; seen: number of keys that each token sees, `[tokens]`, read on the CPU only.

    Returns out `[tokens, heads, rank]` and lse `[tokens, heads]`; 0 and -inf for a token that sees no key.
    """
    slots = torch.nn.functional.pad(slots, (0, max(1, -(-slots.shape[1] // KEYS)) * KEYS - slots.shape[1]))
    most = seen.tolist() if seen.device.type == "cpu" else [slots.shape[1]] * len(seen)
    position = torch.arange(KEYS, device=slots.device)
    outs, lses = [], []
    for token, keys in enumerate(most):
        mine, own = query[token].clone(), slots.index_select(0, row[token : token + 1])[0]
        joined = None
        for start in range(0, max(1, keys), KEYS):
            live = position + start < seen[token]
            slot = own[start : start + KEYS].where(live, 0)
            # Keys that do not exist are zeroed too, not only their scores: 0 x NaN is NaN.
            k = read_latents(latents, slot, rank, query.dtype).to(query.dtype).masked_fill_(~live[:, None], 0)
            scores = product(mine, k.mT).mul_(softmax_scale).masked_fill_(~live, -torch.inf)
            found = softmax_weighted(scores, k[:, :rank])
            joined = found if joined is None else merge(*joined, *found)
        assert joined is not None
        outs.append(joined[0])
        lses.append(joined[1])
    return torch.stack(outs), torch.stack(lses)


def merge_by_token(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`merge` with separate operations for each token, the first dimension.

    On the CPU `logaddexp` gives the last elements of a tensor other bits than the ones before.
    """
    joined = [merge(*each) for each in zip(out_a, lse_a, out_b, lse_b, strict=True)]
    out, lse = zip(*joined, strict=True)
    return torch.stack(out), torch.stack(lse)
