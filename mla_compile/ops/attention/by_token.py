"""Batch-invariant attention in plain torch, on any device: every token by itself, absorbed over the latents.

Products on a CPU have other bits with other numbers of rows and where an operand lies otherwise in memory. So all are
of one shape, and their operands are new tensors. Slow: a token takes some ten operations for every KEYS that it sees.
"""

import torch
from torch import Tensor

from mla_compile.ops.attention.softmax import merge, product, softmax_weighted

KEYS = 256
"""Keys of a product, cut at the multiples of it from a row's first key."""


def attend_by_token(
    query: Tensor, latents: Tensor, slots: Tensor, row: Tensor, seen: Tensor, rank: int, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every token over the first keys of its row.

    query: `[tokens, heads, width]`, of the dtype that is accumulated in; latents: `[slots, width]`, where keys are,
    their first `rank` columns the values; slots: those of every row's keys, int64 `[rows, keys]`; row: int64
    `[tokens]`; seen: how many keys each token sees, `[tokens]`, read on the CPU only.

    Returns out `[tokens, heads, rank]` and lse `[tokens, heads]`, 0 and -inf where no key is seen.
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
            # Zeros where there is no key, not only masked scores: 0 x NaN is NaN.
            k = latents.index_select(0, slot).to(query.dtype).masked_fill_(~live[:, None], 0)
            scores = product(mine, k.mT).mul_(softmax_scale).masked_fill_(~live, -torch.inf)
            found = softmax_weighted(scores, k[:, :rank])
            joined = found if joined is None else merge(*joined, *found)
        assert joined is not None
        outs.append(joined[0])
        lses.append(joined[1])
    return torch.stack(outs), torch.stack(lses)


def merge_by_token(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """`merge` of each token, the first dimension, in operations of its own.

    On the CPU the last elements of a tensor get other bits from `logaddexp` than those before.
    """
    joined = [merge(*each) for each in zip(out_a, lse_a, out_b, lse_b, strict=True)]
    out, lse = zip(*joined, strict=True)
    return torch.stack(out), torch.stack(lse)
