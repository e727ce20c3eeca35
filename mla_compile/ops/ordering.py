"""A definite order of floats: `topk` does not define which of equal values it takes, and its choice may depend on k."""

import torch
from torch import Tensor

_MASK = (1 << 32) - 1


def distinct_keys(x: Tensor) -> Tensor:
    """Keys of float32 values `[..., n]`, int64: ordered as the values, the lowest index first among equals.

    No two of a row are equal: a value's bits, ordered as integers, followed by the index; see `indices_of`.
    """
    bits = torch.where(x == 0, 0, x.view(torch.int32))  # -0 is as large as 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = x.shape[-1] - 1
    return (order << 32) | (last - torch.arange(last + 1, device=x.device))


def indices_of(keys: Tensor, n: int) -> Tensor:
    """The indices, int64, of some of the keys of `n` values."""
    return n - 1 - (keys & _MASK)
