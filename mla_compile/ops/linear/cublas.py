"""Batch-invariant matmuls by cuBLAS, for weights whose shape a probe has found to be safe.

cuBLAS selects its kernel by shape. Tensor cores add along k in one order for every tile, so most kernels give equal
bits; split-k kernels do not. cuBLAS does not report which kernel serves a shape, so each process probes each shape of
weights once: it multiplies many numbers of tokens and compares the bits. It times nothing, so all processes with the
same GPU model and versions get the same answer.
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
"""Numbers of tokens that the probe tries: all small ones, and the borders of tiles of 16 to 256 tokens."""

_MAX_OUTPUT = 2**28
"""Elements of the largest result that the probe computes: half a gigabyte."""

_BYTES = 16
"""cuBLAS selects kernels by alignment, so operands align their rows to this, in the probe and in calls."""


class Weights(NamedTuple):
    """What cuBLAS selects a kernel by, besides the number of tokens: the layout of weights `[groups, k, n]`."""

    device: torch.device
    dtype: torch.dtype
    groups: int
    k: int
    n: int
    strides: tuple[int, ...]

    @property
    def most_tokens(self) -> int:
        """The most tokens per call of cuBLAS."""
        return max(1, min(NUMBERS[-1], _MAX_OUTPUT // (self.groups * self.n)))


_same_bits: dict[Weights, bool] = {}
_as_contiguous: dict[tuple[Weights, tuple[int, int]], bool] = {}
_probing = threading.Lock()


def weights_of(x: Tensor, w: Tensor) -> Weights | None:
    """The probe's key for a matmul; None if a size or stride is symbolic or `w` is not aligned."""
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
    """Whether the probe has found that a token of `x @ w` has the same bits in any batch.

    The probe does not run while a CUDA graph is recorded.
    """
    weights = weights_of(x, w) if x.dtype in HALF and is_nvidia_gpu_here(x.device) else None
    if weights is None or not _known(_same_bits, weights, lambda: _try_numbers(weights)):
        return False
    _takes_as_is(weights, x)  # probe the strides now: a graph may be recorded later
    return True


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w` by cuBLAS. `has_same_bits` must be true for the arguments."""
    weights = weights_of(x, w)
    assert weights is not None
    if not _takes_as_is(weights, x):
        x = x.contiguous()
    if x.data_ptr() % _BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
    parts = [_product(part, w) for part in x.split(weights.most_tokens)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _product(x: Tensor, w: Tensor) -> Tensor:
    """`x @ w` in one call of cuBLAS."""
    return torch.mm(x[:, 0], w[0]).unsqueeze(1) if w.shape[0] == 1 else multiply_by_head(x, w)


def multiply_by_head(x: Tensor, w: Tensor) -> Tensor:
    """`out[t, h] = x[t, h] @ w[h]`, contiguous: cuBLAS writes each head's columns in place."""
    out = x.new_empty(x.shape[0], w.shape[0], w.shape[2])
    torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))
    return out


def _takes_as_is(weights: Weights, x: Tensor) -> bool:
    """Whether x with its strides gives the same bits as a contiguous copy."""
    strides = x.stride()
    if not all(type(stride) is int for stride in strides):
        return False  # symbolic; known when the graph runs
    if strides == (weights.groups * weights.k, weights.k, 1):
        return True
    along_token, along_group, along_k = strides
    unit = _BYTES // x.element_size()
    # With groups outermost, the strides would differ for each number of tokens.
    if along_k != 1 or not 0 < along_group <= along_token or along_group % unit or along_token % unit:
        return False
    key = weights, (along_token, along_group)
    return _known(_as_contiguous, key, lambda: _try_strides(*key))


def _known(found: dict[Any, bool], key: object, find: Callable[[], bool]) -> bool:
    """The result of `find`, cached by key. While a CUDA graph is recorded, a missing key gives False and is not cached.

    `find` runs in a new thread, which has none of the caller's modes: its tensors are real even if the caller traces a
    graph with fake ones, and its operations do not enter that graph. It draws random numbers from its own generators.
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
    """Whether the first and the last tokens, multiplied alone, have the expected bits, for each number of `NUMBERS`."""
    return all(
        torch.equal(_product(x[part], w), expected[part])
        for tokens in NUMBERS
        if tokens <= len(x)
        for part in (slice(tokens), slice(-tokens, None))
    )


def _draw(weights: Weights) -> tuple[Tensor, Tensor]:
    """`most_tokens` tokens, and weights, whose matmul reveals the order of addition.

    A sum of random numbers, rounded to half precision, shows the order in one of ten thousand elements only. Here half
    of the terms are 2**20 times as large and cancel, which leaves the float32 rounding errors of the partial sums.
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
