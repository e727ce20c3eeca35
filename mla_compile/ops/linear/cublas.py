"""Products by cuBLAS of which a probe found that a row has the same bits in any batch.

cuBLAS chooses its kernel by shape. Tensor cores add along k in one order whatever the tile, so most kernels agree;
those that split k do not. Nothing tells which one serves a shape, so every shape of weights is tried once a process:
products of many sizes, whose bits are compared. Nothing is timed, so every process on the same GPU model and versions
finds the same answer.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_compile.ops.dispatch import HALF, is_nvidia_gpu_here

NUMBERS: tuple[int, ...] = (
    *range(1, 34),
    *(40, 48, 49, 56, 63, 64, 65, 72, 80, 95, 96, 97, 112, 127, 128, 129, 160, 191, 192, 193, 200, 224, 255),
    *(256, 257, 320, 384, 385, 448, 512, 513, 544, 576, 640, 700, 768, 896, 1000, 1024, 1025, 1064, 1280),
    *(1536, 1792, 2048, 2049, 2088, 2560, 3000, 3072, 3584, 4095, 4096),
)
"""Numbers of tokens that are tried: all small ones, and the borders of tiles of 16 to 256 tokens."""

_MOST_OUTPUT = 2**28
"""Elements of the largest result that is tried: half a gigabyte."""

_BYTES = 16
"""cuBLAS's kernels differ by alignment; what is tried, and multiplied, begins its rows at multiples of this."""


class Weights(NamedTuple):
    """What cuBLAS chooses by, beside the number of tokens: weights `[groups, k, n]`, not their values."""

    device: torch.device
    dtype: torch.dtype
    groups: int
    k: int
    n: int
    strides: tuple[int, ...]

    @property
    def most_tokens(self) -> int:
        """The most that are multiplied at once."""
        return max(1, min(NUMBERS[-1], _MOST_OUTPUT // (self.groups * self.n)))


_same_bits: dict[Weights, bool] = {}
_as_contiguous: dict[tuple[Weights, tuple[int, int]], bool] = {}
_probing = threading.Lock()


def weights_of(x: Tensor, w: Tensor) -> Weights | None:
    """What a product is chosen by; None where some of it is a symbol, or cuBLAS would need another alignment."""
    if not all(type(size) is int for size in (*w.shape, *w.stride(), w.storage_offset())) or w.numel() == 0:
        return None
    groups, k, n = w.shape
    strides = (w.stride(0) if groups != 1 else 0, w.stride(1), w.stride(2))
    unit = _BYTES // w.element_size()
    along, across = sorted(strides[1:])
    if along != 1 or across < (k if strides[1] == 1 else n) or (groups != 1 and strides[0] == 0):
        return None
    if any(size % unit for size in (k, across, strides[0], w.storage_offset())):
        return None
    return Weights(x.device, x.dtype, groups, k, n, strides)


def has_same_bits(x: Tensor, w: Tensor) -> bool:
    """Whether a row of `x @ w` is known to have the same bits in any batch.

    While a CUDA graph is recorded, nothing is tried.
    """
    weights = weights_of(x, w) if x.dtype in HALF and is_nvidia_gpu_here(x.device) else None
    if weights is None or not _known(_same_bits, weights, lambda: _try_numbers(weights)):
        return False
    _takes_as_is(weights, x)  # so that it is known when a graph is recorded
    return True


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w` by cuBLAS, of arguments that `has_same_bits`."""
    weights = weights_of(x, w)
    assert weights is not None
    if not _takes_as_is(weights, x):
        x = x.contiguous()
    if x.data_ptr() % _BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
    parts = [_product(part, w) for part in x.split(weights.most_tokens)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """One call of cuBLAS."""
    return torch.mm(x[:, 0], w[0]).unsqueeze(1) if w.shape[0] == 1 else multiply_by_head(x, w)


def multiply_by_head(x: Tensor, w: Tensor) -> Tensor:
    """`out[t, h] = x[t, h] @ w[h]`, contiguous: cuBLAS writes each head's columns where they belong."""
    out = x.new_empty(x.shape[0], w.shape[0], w.shape[2])
    torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))
    return out


def _takes_as_is(weights: Weights, x: Tensor) -> bool:
    """Whether x, strided as it is, gives the bits that it gives when it is contiguous."""
    strides = x.stride()
    if not all(type(stride) is int for stride in strides):
        return False  # of a graph: they are known when it runs
    if strides == (weights.groups * weights.k, weights.k, 1):
        return True
    along_token, along_group, along_k = strides
    unit = _BYTES // x.element_size()
    # Where all tokens lie between two groups, strides are others for each number of tokens.
    if along_k != 1 or not 0 < along_group <= along_token or along_group % unit or along_token % unit:
        return False
    key = weights, (along_token, along_group)
    return _known(_as_contiguous, key, lambda: _try_strides(*key))


def _known(found: dict[Any, bool], key: object, find: Callable[[], bool]) -> bool:
    """What was found for a key, else what `find` finds, unless a CUDA graph is being recorded: then False, for now.

    It runs in a thread of its own, which has none of the caller's modes: tensors are real there while a graph is traced
    with fake ones, and no operation becomes a part of that graph. Random numbers come from generators of its own.
    """
    if key not in found:
        if torch.cuda.is_current_stream_capturing():
            return False
        with _probing, ThreadPoolExecutor(1) as thread:
            found[key] = thread.submit(find).result()
    return found[key]


def _try_numbers(weights: Weights) -> bool:
    x, w = _draw(weights)
    return _all_agree(x, w, _product(x, w))


def _try_strides(weights: Weights, strides: tuple[int, int]) -> bool:
    x, w = _draw(weights)
    expected = _product(x, w)
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, (*strides, 1)))
    x = x.new_empty(size).as_strided(x.shape, (*strides, 1)).copy_(x)
    return _all_agree(x, w, expected)


def _all_agree(x: Tensor, w: Tensor, expected: Tensor) -> bool:
    """Whether the first and the last tokens, so many as are tried, have the bits by themselves that they should."""
    return all(
        torch.equal(_product(x[part], w), expected[part])
        for tokens in NUMBERS
        if tokens <= len(x)
        for part in (slice(tokens), slice(-tokens, None))
    )


def _draw(weights: Weights) -> tuple[Tensor, Tensor]:
    """The most tokens, and weights, whose products show in what order they are added.

    A sum of random numbers, rounded to half precision, hides the order in all but one of ten thousand elements. Here
    half of the terms, 2**20 times as large, cancel: float32's roundings of the partial sums are what is left.
    """
    device, dtype, groups, k, n, strides = weights
    generator = torch.Generator(device).manual_seed(0)
    size = 1 + sum((m - 1) * stride for m, stride in zip((groups, k, n), strides))
    w = torch.randn(size, generator=generator, dtype=dtype, device=device)
    w = w.as_strided((groups, k, n), strides)
    x = torch.randn(weights.most_tokens, groups, k, generator=generator, dtype=dtype, device=device)
    first, second = torch.randperm(k, generator=generator, device=device)[: k // 2].view(2, -1)
    x[..., first] *= 2**10
    w[:, first] *= 2**10
    x[..., second], w[:, second] = x[..., first], -w[:, first]
    return x, w
