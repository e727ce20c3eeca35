"""Which tokens a state's rows choose from logits: penalties, what is allowed, then the likeliest or a sample."""

import math

import torch
from torch import Tensor

from mla_compile.speculate.sampling import argmax, penalise_after, sample
from mla_compile.speculate.state import DecodeState

NO_TOKEN = -1
"""In place of a token, where none can be chosen."""


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

    drafts: `[rows, m]`, what stands between the emitted text and the last of the n.
    sampled: whether any row samples.
    allowed: bool like the logits. As in vLLM, other ids are ruled out after penalties, before temperature.
    """
    logits = penalise_after(state, logits, drafts)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return sample(state, logits, position) if sampled else argmax(logits)


def can_choose(logits: Tensor) -> Tensor:
    """Where logits `[..., vocab_size]` say which token is likely, bool `[...]`: where the largest is a finite number.

    A maximum is NaN if anything is, +inf if anything else is, and -inf if nothing is allowed; -inf beside numbers is a
    mask. In two steps, the largest of each part of the vocabulary first: compiled, a step's few rows are as many
    programs of a GPU, each of which would read a whole row alone, 28 us for GLM's 154,880 ids (H200).
    """
    parts = torch.unflatten(logits, -1, (math.gcd(logits.shape[-1], 256), -1))
    return parts.amax(dim=-1).amax(dim=-1).isfinite()
