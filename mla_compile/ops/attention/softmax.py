"""Softmax over sets of keys: weighted values with their log-sum-exp, and the merge of two sets."""

from collections.abc import Callable

import torch
from torch import Tensor

from mla_compile.ops.dtypes import accumulate_dtype


def product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, accumulated and returned in `accumulate_dtype(b.dtype)`; half-precision `b` has 3 dimensions.

    On the CPU half-precision operands are widened. A GPU multiplies them as they are, `a` rounded to `b.dtype`.
    """
    dtype = accumulate_dtype(b.dtype)
    if b.is_cuda and b.dtype != dtype:
        return torch.bmm(a.to(b.dtype), b, out_dtype=dtype)
    return torch.matmul(a.to(dtype), b.to(dtype))


def softmax_weighted(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax(scores) @ values` and the natural-log log-sum-exp of the scores.

    scores: `[..., n, keys]`, -inf for a key that is not seen; overwritten. values: `[..., keys, width]`, of the same
    dtype or a narrower one. Returns out `[..., n, width]` and lse `[..., n]`; 0 and -inf if no key is seen.
    """
    # exp(-inf - 0) is 0; exp(-inf - -inf) would be NaN.
    highest = scores.amax(dim=-1, keepdim=True)
    base = highest.masked_fill(highest == -torch.inf, 0)
    weights = scores.sub_(base).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = product(weights, values).div_(total.masked_fill(total == 0, 1))
    return out, (base + total.log())[..., 0]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys: out `[..., n]`, lse `[...]`, natural log.

    `out = sum_s exp(lse_s - lse) out_s` with `lse = logaddexp(lse_a, lse_b)`; a set without keys has lse -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.masked_fill(lse == -torch.inf, 0)
    return out_a * (lse_a - base).exp()[..., None] + out_b * (lse_b - base).exp()[..., None], lse


def in_parts(
    attend: Callable[[int, bool], tuple[Tensor, Tensor]],
    parts: int,
    join: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = merge,
) -> Tensor:
    """Attention over keys in `parts`, joined in float32 by `join` if there are several.

    `attend` computes out `[..., n]` and lse `[...]` of one part. Its arguments are the number of the part, and whether
    it is the last one, which is causal.
    """
    out, lse = attend(0, parts == 1)
    for part in range(1, parts):
        out, lse = join(out.to(lse.dtype), lse, *attend(part, part == parts - 1))
    return out
