"""Paged caches: a list that says what each one holds, before any memory is taken.

Whatever handles caches reads this list: allocation, the plan of memory, the keys of the prefix cache, the shadow check
and the check of batch invariance. So a cache of another kind (a drafter's keys, latents in FP8, an indexer's keys) is
one more entry.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mla_compile.errors import MLAError
from mla_compile.torch_internals import mark_cache

Owner = Literal["target", "drafter"]


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """What one cache holds of each token.

    name: of the layer that has it, "layers.3.self_attn" say; unique in a list.
    owner: whose latents they are. A drafter's never change the tokens that the target chooses.
    width: elements of a token, of the type `dtype`, on `device`.
    layer: reads and writes it as its attribute `kv_cache`; None there until `allocate`.
    lookahead: tokens after a token on which its entry depends. Prompts share a page only where those agree too.
    """

    name: str
    owner: Owner
    width: int
    dtype: torch.dtype
    device: torch.device
    layer: Any
    lookahead: int = 0

    def __post_init__(self) -> None:
        if type(self.lookahead) is not int or self.lookahead < 0:
            raise MLAError("lookahead", "an integer >= 0", repr(self.lookahead))

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def cache(self) -> Tensor:
        """`[num_pages, page_size, width]`.

        Raises:
            MLAError: it is not allocated.
        """
        cache: Tensor | None = self.layer.kv_cache
        if cache is None:
            raise MLAError(self.name, "an allocated cache", "none", "call mla_compile.caches.allocate first")
        return cache


def allocate(specs: Iterable[CacheSpec], num_pages: int, page_size: int) -> None:
    """Give every layer a zeroed cache `[num_pages, page_size, width]` of its own, in the place of one it had.

    All have the same pages, as one block table serves them. One tensor a layer: a stacked one that is indexed inside a
    compiled graph was seen to be miscompiled.

    Raises:
        MLAError: a number that is not positive, before any cache is replaced.
    """
    if num_pages < 1 or page_size < 1:
        raise MLAError("num_pages, page_size", ">= 1 each", f"{num_pages} and {page_size}")
    for spec in specs:
        shape = num_pages, page_size, spec.width
        cache = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        if not isinstance(spec.layer, nn.Module):  # of a module's buffers the compiler knows that they stay
            mark_cache(cache)
        spec.layer.kv_cache = cache
