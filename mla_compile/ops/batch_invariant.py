"""A product and a sum in plain torch of which a token's row has the same bits whatever other rows there are."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.ops.dtypes import accumulate_dtype


def product_by_row(x: Tensor, w: Tensor) -> Tensor:
    """`out[t, g] = x[t, g] @ w[g]`, each token in a product of its own, `[1, k] @ [k, n]`: no shape depends on others.

    x: `[tokens, groups, k]`, w: `[groups, k, n]`, any strides. Returns `[tokens, groups, n]`, contiguous, in the dtype
    of x; sums are in `accumulate_dtype`.

    On the CPU the tokens of a group are one batch of such products. Those of MKL are dot products, whose order depends
    on k, on n and on where in memory a row begins: so all rows, those of the weights too, begin 64 bytes apart. (Where
    columns of the weights lie along memory, the order would depend on where the result begins, so they are copied.)
    Elsewhere batches are not trusted: a kernel may be chosen by their size.
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
    """The same values, rows contiguous and each from a multiple of 64 bytes on; itself where that is so."""
    unit = 64 // x.element_size()
    if x.stride(-1) == 1 and x.data_ptr() % 64 == 0 and all(stride % unit == 0 for stride in x.stride()[:-1]):
        return x
    width = -(-x.shape[-1] // unit) * unit
    return x.new_empty(*x.shape[:-1], width)[..., : x.shape[-1]].copy_(x)


def sum_by_row(x: Tensor) -> Tensor:
    """The sum of each row of `x` `[rows, columns]`, `[rows]` in `accumulate_dtype`, of elementwise sums of halves."""
    columns = x.shape[1]
    width = 1 << max(0, columns - 1).bit_length()
    x = F.pad(x.to(accumulate_dtype(x.dtype)), (0, width - columns))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x[:, 0]
