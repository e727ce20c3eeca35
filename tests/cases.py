"""Random MLA problems, small enough for the float64 reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile import MLABatch, decode_segment, prefill_segment


@dataclass
class Case:
    """Arguments of `mla_attention`, by name."""

    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    kv_cache: Tensor
    w_uk: Tensor
    w_uv: Tensor
    batch: MLABatch
    softmax_scale: float = 0.2

    def args(self) -> tuple:
        return tuple(vars(self).values())

    def clone(self) -> "Case":
        return Case(**{**vars(self), "kv_cache": self.kv_cache.clone()})


def make_case(
    decode: list[int] | None = None,
    prefill: list[tuple[int, int]] | None = None,
    *,
    q_len: int = 1,
    q_lens: list[int] | None = None,
    page_size: int = 4,
    heads: int = 3,
    rank: int = 16,
    rope: int = 4,
    nope: int = 6,
    v: int = 5,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    poison: bool = True,
) -> Case:
    """decode: num_cached of each decode row; prefill: (chunk length, num_cached) of each prompt chunk.

    Pages are shuffled. With `poison`, everything that no row has written is NaN and unused table entries are huge.
    """
    decode, prefill = decode or [], prefill or []
    g = torch.Generator().manual_seed(seed)
    totals = [n + q_len for n in decode] + [n + c for c, n in prefill]
    pages_of = [-(-t // page_size) for t in totals]
    num_pages = 1 + sum(pages_of)
    order = (torch.randperm(num_pages - 1, generator=g) + 1).tolist()
    table = torch.full((len(totals), max(pages_of)), 2**31 - 1 if poison else 0, dtype=torch.int32)
    for row, n in enumerate(pages_of):
        table[row, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    kv_cache = torch.full((num_pages, page_size, rank + rope), torch.nan if poison else 0.0, dtype=dtype)
    cached = [*decode, *(n for _, n in prefill)]
    for row, n in enumerate(cached):
        for position in range(n):
            kv_cache[table[row, position // page_size], position % page_size] = randn(rank + rope)

    d = p = None
    if decode:
        valid = None if q_lens is None else torch.tensor(q_lens, dtype=torch.int32)
        rows = len(decode)
        num_cached = torch.tensor(decode, dtype=torch.int32)
        d, _ = decode_segment(
            num_cached, table[:rows].clone(), q_len=q_len, page_size=page_size, q_lens=valid
        )
    if prefill:
        p, _ = prefill_segment(
            [c for c, _ in prefill],
            [n for _, n in prefill],
            table[len(decode) :].clone(),
            page_size=page_size,
        )
    tokens = len(decode) * q_len + sum(c for c, _ in prefill)
    return Case(
        q_nope=randn(tokens, heads, nope),
        q_pe=randn(tokens, heads, rope),
        kv_c=randn(tokens, rank),
        k_pe=randn(tokens, rope),
        kv_cache=kv_cache,
        w_uk=randn(heads, nope, rank) * rank**-0.5,  # so that keys and values have components near 1
        w_uv=randn(heads, rank, v) * rank**-0.5,
        batch=MLABatch(d, p),
    )


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude; NaN where either holds one."""
    return float(
        (got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    )
