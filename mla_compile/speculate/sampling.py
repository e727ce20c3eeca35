"""Sampling whose noise depends only on (seed, position, vocabulary id), so that speculation changes no token.

A token is `argmax(logits / temperature + gumbel)` over the ids that top-k and top-p keep (the Gumbel-max trick:
the argmax is distributed as the softmax). Plain decoding, verification and drafting ask for the noise of the same
position and get the same numbers; the draft that agrees with the target's logits then agrees with its sample too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.errors import MLAError


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen.

    temperature: 0 is greedy. top_k: keep the k most likely ids, 0 keeps all. top_p: of those, keep the smallest set
    of most likely ids with at least this share of their probability, 1 keeps all. seed: any integer in [0, 2**63).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise MLAError("temperature", "a finite number >= 0", self.temperature, "0 is greedy")
        if not _is_int(self.top_k) or not 0 <= self.top_k < 2**31:
            raise MLAError("top_k", "an integer in [0, 2**31)", self.top_k, "0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise MLAError("top_p", "a number in (0, 1]", self.top_p, "1 keeps every token")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise MLAError("seed", "an integer in [0, 2**63)", self.seed)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit hash in int64 arithmetic (xor-shift-multiply; the factors keep products below 2**63)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _MASK
    return x ^ (x >> 14)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 `[*position.shape, vocab_size]`.

    seed: int64, broadcastable to `position`; position: int64, of the token that is being sampled.
    """
    key = _mix(_mix(_mix(seed & _MASK) ^ (seed >> 32)) ^ position)
    ids = torch.arange(vocab_size, device=position.device)
    bits = _mix(key[..., None] ^ _mix(ids + 0x3C6EF372))
    # 23 bits and a half are exact in float32 and stay below 1: with 24, the largest would round to 1, noise +inf.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores `[..., vocab]` with -inf outside the top-k ids, and then the top-p ids of those; top_k, top_p `[...]`."""
    ordered, ids = scores.sort(dim=-1, descending=True)
    limit = torch.where(top_k > 0, top_k, scores.shape[-1])[..., None]
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    ordered = ordered.masked_fill(before >= top_p[..., None], -torch.inf)
    # The most likely id always stays, however small top_p is.
    ordered = torch.where(rank == 0, scores.amax(dim=-1, keepdim=True), ordered)
    return torch.empty_like(scores).scatter(-1, ids, ordered)


def sample(
    logits: Tensor, position: Tensor, seed: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor
) -> Tensor:
    """One token id for every logits row, int64 `[rows, n]`.

    Args:
        logits: `[rows, n, vocab]`, float.
        position: int64 `[rows, n]`, the positions that the sampled tokens will take.
        seed: int64 `[rows]`; temperature, top_p: float32 `[rows]`; top_k: int32 `[rows]`.
            A row of temperature 0 is greedy.
    """
    greedy = temperature == 0
    # The largest is subtracted first, so that a tiny temperature makes no second infinity.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).float()
    scores = scores / torch.where(greedy, 1.0, temperature)[:, None, None]
    n = logits.shape[1]
    scores = _keep_top(scores, top_k[:, None].expand(-1, n), top_p[:, None].expand(-1, n))
    noise = gumbel_noise(seed[:, None], position, logits.shape[-1])
    return torch.where(greedy[:, None], logits.argmax(dim=-1), (scores + noise).argmax(dim=-1))
