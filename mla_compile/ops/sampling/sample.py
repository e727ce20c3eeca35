"""`sample_tokens`: min-p, top-k, top-p, noise and argmax as one op.

No sum here is in floating point, as its order would differ between kernels, and no result depends on how a kernel
breaks ties: probabilities are summed as integers, and of equal logits the lower id comes first.
"""

import torch
from torch import Tensor

from mla_compile.errors import MLAError
from mla_compile.ops.dispatch import FLOATS, SOME, UNIT, reference, triton
from mla_compile.ops.library import define_op, empty
from mla_compile.torch_internals import statically_known_true

SAMPLE = (
    triton(
        "a histogram of scores, then the ids at the limits of top-k and top-p",
        "mla_compile.ops.sampling.kernels.sample:sample_triton",
        constraints={
            "dtype": FLOATS,
            "rows": SOME,
            "n": SOME,
            "vocab_size": range(1, 2**23 + 1),
            "logits.stride(2)": UNIT,
        },
    ),
    reference("mla_compile.ops.sampling.sample:sample_torch"),
)

_MASK = 0xFFFFFFFF


@define_op(
    table=SAMPLE,
    layouts={
        "logits": "rows, n, vocab_size",
        "position": "int64 rows, n",
        "seed": "int64 rows",
        "temperature": "float rows",
        "top_k": "int32 rows",
        "top_p": "float rows",
        "min_p": "float rows",
    },
)
def sample_tokens(
    logits: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """`argmax(logits / temperature + noise)` over the ids that min-p, top-k and top-p keep, int64 `[rows, n]`.

    A position whose row has temperature 0, or whose largest logit is not finite, gets `row_argmax` of its logits. Of
    equal numbers the lower id comes first, in the argmax and in the filters.

    Args:
        logits: `[rows, n, vocab_size]`, float; an id with -inf is never sampled. Scores are float32.
        position: int64 `[rows, n]`, from 0 to 2**32 - 1.
        seed: int64 `[rows]`.
        temperature, top_p, min_p: float32 `[rows]`, at least 0. top_p 1 and min_p 0 keep all ids.
        top_k: int32 `[rows]`; 0 keeps all ids.
    """
    if statically_known_true(logits.shape[2] < 1):
        raise MLAError("logits", "at least one id", list(logits.shape))
    return empty(logits, logits.shape[:2], torch.int64)


sample_tokens_op = torch.ops.mla_compile.sample_tokens.default


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit hash in int64 arithmetic (xor-shift-multiply; the factors keep products below 2**63)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x31848BAB) & _MASK
    return x ^ (x >> 14)


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 `[*position.shape, vocab_size]`.

    seed: int64, broadcastable to `position`; position: int64, of the token that is being sampled.
    """
    key = _mix(_mix(_mix(seed & _MASK) ^ (seed >> 32 & _MASK)) ^ position)
    ids = torch.arange(vocab_size, device=position.device)
    bits = _mix(key[..., None] ^ _mix(ids + 0x3C6EF372))
    # 23 bits and a half are exact in float32 and stay below 1: with 24 bits the largest would round to 1, noise +inf.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def masses(scores: Tensor) -> Tensor:
    """`exp(scores)`, at most 1, as int64 in units of 2**-40: a sum over 2**23 ids is exact in any order."""
    return (scores.exp() * 2.0**40).to(torch.int64)


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Scores `[..., vocab]` with -inf outside the top-k ids, and then the top-p ids of those; top_k, top_p `[...]`.

    The largest score is 0.
    """
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    limit = torch.where(top_k > 0, top_k, scores.shape[-1])[..., None]
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    mass = masses(ordered)
    before = mass.cumsum(dim=-1) - mass
    share = top_p[..., None]
    kept = share.double() * mass.sum(dim=-1, keepdim=True)
    # With top_p 1 all ids stay, even those less probable than a unit of mass.
    ordered = ordered.masked_fill((before >= kept) & (share < 1), -torch.inf)
    # The most likely id always stays, however small top_p is.
    ordered = torch.where(rank == 0, scores.amax(dim=-1, keepdim=True), ordered)
    return torch.empty_like(scores).scatter(-1, ids, ordered)


def sample_torch(
    logits: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """`sample_tokens` in plain torch."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.amax(dim=-1, keepdim=True)
    temperature = temperature.float()
    greedy = (temperature == 0)[:, None, None] | ~largest.isfinite()
    # The largest is subtracted first, so that no score overflows to +inf at a tiny temperature.
    scores = (logits - largest).float() / torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    # The largest score is 0, so these are probabilities relative to the largest.
    scores = scores.masked_fill(scores < min_p.log()[:, None, None], -torch.inf)
    n = logits.shape[1]
    # Values may be read on the CPU alone.
    if scores.device.type != "cpu" or ((top_k > 0) | (top_p < 1)).any():
        scores = _keep_top(scores, top_k[:, None].expand(-1, n), top_p[:, None].expand(-1, n))
    noise = gumbel_noise(seed[:, None], position, logits.shape[2])
    return torch.where(greedy, logits, scores + noise).argmax(dim=-1)
