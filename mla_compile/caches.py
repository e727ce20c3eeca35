"""Specifications of paged caches, which exist before any memory is allocated.

All code that handles caches reads them: allocation, the memory plan, the keys of the prefix cache, the shadow check and
the check of batch invariance. So another kind of cache (a drafter's keys, latents in FP8, an indexer's keys) is one
more entry.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mla_compile.defaults import KvCacheDtype
from mla_compile.errors import MLAError, check_integer
from mla_compile.latents import BLOCK, FP8, fp8_width
from mla_compile.torch_internals import mark_state_tensor

Owner = Literal["target", "drafter"]


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """The contents of one cache.

    name: of the layer that owns it, such as "layers.3.self_attn"; unique in a list.
    owner: the part of the model that it serves. A drafter's caches never change the tokens that the target chooses.
    width: elements per token, of the type `dtype`, on `device`.
    layer: reads and writes it as its attribute `kv_cache`, which is None until `allocate`.
    lookahead: number of tokens after a token that its entry depends on. Prompts share a page only if these agree too.
    heads: entries per token, each of `width` elements. A page of the batch is `heads` pages of the cache: page p has
        the entries of head h in page `p * heads + h`.
    kv_lora_rank: the columns of the width that are a latent, which `stored_as` may keep in FP8; 0 for other contents.
    """

    name: str
    owner: Owner
    width: int
    dtype: torch.dtype
    device: torch.device
    layer: Any
    lookahead: int = 0
    heads: int = 1
    kv_lora_rank: int = 0

    def __post_init__(self) -> None:
        for name, least in (("lookahead", 0), ("heads", 1)):
            check_integer(name, getattr(self, name), least)

    @property
    def bytes_per_token(self) -> int:
        return self.heads * self.width * self.dtype.itemsize

    def stored_as(self, kv_cache_dtype: KvCacheDtype) -> "CacheSpec":
        """The same cache for an engine's setting: with "fp8", latents are FP8 (`latents.py`).

        Other contents stay the same, and so do latents of a drafter whose sizes do not fit the format.

        Raises:
            MLAError: the sizes of the target's latents do not fit it.
        """
        rank = self.kv_lora_rank
        if kv_cache_dtype == "auto" or rank == 0 or (rank % BLOCK and self.owner == "drafter"):
            return self
        width = fp8_width(rank, self.width - rank, "kv_cache_dtype")
        return replace(self, width=width, dtype=FP8)

    @property
    def cache(self) -> Tensor:
        """`[num_pages * heads, page_size, width]`.

        Raises:
            MLAError: it is not allocated.
        """
        cache: Tensor | None = self.layer.kv_cache
        if cache is None:
            raise MLAError(self.name, "an allocated cache", "none", "call mla_compile.caches.allocate first")
        return cache


def allocate(specs: Iterable[CacheSpec], num_pages: int, page_size: int) -> None:
    """Give every layer its own zeroed cache `[num_pages * heads, page_size, width]`, in place of the one it had.

    All have the same page numbers, as one block table serves them. Each layer has its own tensor, since Inductor
    miscompiled a stacked one that is indexed inside the graph.

    Raises:
        MLAError: a number that is not positive, before any cache is replaced.
    """
    if num_pages < 1 or page_size < 1:
        raise MLAError("num_pages, page_size", ">= 1 each", f"{num_pages} and {page_size}")
    for spec in specs:
        shape = num_pages * spec.heads, page_size, spec.width
        cache = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        if not isinstance(spec.layer, nn.Module):  # a module's buffers have static addresses already
            mark_state_tensor(cache)
        spec.layer.kv_cache = cache
