"""A product and a sum in plain torch that give a token the same bits whatever other tokens the tensor holds."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops.dtypes import accumulate_dtype


def product_by_row(x: Tensor, w: Tensor) -> Tensor:
    """`out[t, g] = x[t, g] @ w[g]`, a separate `[1, k] @ [k, n]` for each token: no shape depends on other tokens.

    x: `[tokens, groups, k]`, w: `[groups, k, n]`, any strides. Returns `[tokens, groups, n]`, contiguous, in the dtype
    of x; sums are in `accumulate_dtype`.

    On the CPU the tokens of a group are one batch of such products. MKL computes them as dot products. Their order of
    sums depends on k, n and the address of a matrix row, so all matrix rows, also of the weights, begin at multiples of
    64 bytes. (If the columns of the weights were contiguous, the order would depend on the result's address, so such
    weights are copied.) Other devices compute one token per call, as the batch size may decide which kernel runs.
    """
    dtype = accumulate_dtype(x.dtype)
    rows, columns = _aligned(x.to(dtype)), _aligned(w.mT.to(dtype)).mT
    out = x.new_empty(x.shape[0], w.shape[0], w.shape[2])
    if x.device.type == "cpu":
        for group, matrix in enumerate(columns):
            out[:, group] = torch.bmm(rows[:, group, None], matrix.expand(x.shape[0], -1, -1))[:, 0]
    else:
        for token, row in enumerate(rows):
            out[token] = torch.bmm(row[:, None], columns)[:, 0]
    return out


def _aligned(x: Tensor) -> Tensor:
    """`x` with contiguous matrix rows that begin at multiples of 64 bytes; a copy unless it is so already."""
    unit = 64 // x.element_size()
    if x.stride(-1) == 1 and x.data_ptr() % 64 == 0 and all(stride % unit == 0 for stride in x.stride()[:-1]):
        return x
    width = -(-x.shape[-1] // unit) * unit
    return x.new_empty(*x.shape[:-1], width)[..., : x.shape[-1]].copy_(x)


def sum_by_row(x: Tensor) -> Tensor:
    """Sums over the last dimension of `x` `[n, columns]`, by adding halves: `[n]` in `accumulate_dtype`."""
    columns = x.shape[1]
    width = 1 << max(0, columns - 1).bit_length()
    x = F.pad(x.to(accumulate_dtype(x.dtype)), (0, width - columns))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]
