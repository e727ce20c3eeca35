"""Chooses tokens from logits: biases, penalties, the mask of allowed ids, then argmax or a sample."""

import math

import torch
from torch import Tensor

from mla_compile.speculate.sampling import add_bias, argmax, penalise_after, sample
from mla_compile.speculate.state import DecodeState

NO_TOKEN = -1
"""Stands for a token that cannot be chosen."""


def choose_tokens(
    state: DecodeState,
    logits: Tensor,
    position: Tensor,
    drafts: Tensor,
    *,
    sampled: bool,
    allowed: Tensor | None = None,
) -> Tensor:
    """The tokens that take `position` `[rows, n]`, int64 `[rows, n]`, from logits `[rows, n, vocab_size]`.

    drafts: `[rows, m]`, the tokens between the emitted text and the last of the n positions.
    sampled: whether any row samples.
    allowed: bool, shaped like the logits. As in vLLM, other ids are masked after penalties, before temperature. Where
        only stop ids are allowed, they do not wait for `min_tokens`.
    """
    raw, logits = logits, penalise_after(state, add_bias(state, logits, position), drafts)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
        if state.bias is not None:
            only_ends = (logits == -torch.inf).all(dim=-1, keepdim=True)
            logits = torch.where(only_ends, raw.masked_fill(~allowed, -torch.inf), logits)
    return sample(state, logits, position) if sampled else argmax(logits)


def can_choose(logits: Tensor) -> Tensor:
    """Whether the maximum of logits `[..., vocab_size]` is finite, bool `[...]`: only then can a token be chosen.

    A maximum is NaN if any logit is, else +inf if any is, and -inf if no id is allowed; some logits may be -inf, by a
    mask. It is computed in two steps, first for each part of the vocabulary: in one step, compiled code has one GPU
    program per logits vector, which takes 28 us to read GLM's 154,880 ids (H200).
    """
    parts = torch.unflatten(logits, -1, (math.gcd(logits.shape[-1], 256), -1))
    return parts.amax(dim=-1).amax(dim=-1).isfinite()
