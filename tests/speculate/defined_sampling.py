"""What penalties, filters and sampling are defined to do, one token at a time, in float64 of numpy."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mla_compile import SamplingParams
from mla_compile.ops.sampling.sample import gumbel_noise
from mla_compile.speculate import DecodeState

Vector = NDArray[np.float64]


def arguments_of(*rows: SamplingParams) -> dict[str, torch.Tensor]:
    """What `sample` reads of a state with these rows, by name, as the decode state holds it."""
    state = DecodeState.allocate(len(rows), 0, max_pages=1)
    names = "seed", "temperature", "top_k", "top_p", "min_p"
    return {
        name: torch.tensor([getattr(row, name) for row in rows], dtype=getattr(state, name).dtype)
        for name in names
    }


def defined_biases(logits: Vector, num_emitted: int, p: SamplingParams, stop_ids: Collection[int]) -> Vector:
    """One vector of logits, id by id, in float64: as in vLLM's sampler, before penalties."""
    out = logits.copy()
    for token, bias in (p.logit_bias or {}).items():
        out[token] += float(np.float32(bias))
    if num_emitted < p.min_tokens:
        out[list(stop_ids)] = -np.inf
    return out


def defined_penalties(
    logits: Vector, prompt: Sequence[int], emitted: Sequence[int], p: SamplingParams
) -> Vector:
    """One vector of logits, id by id, in float64."""
    out, counts = logits.copy(), Counter(emitted)
    # The library holds its parameters in float32.
    repetition, presence, frequency = (
        float(np.float32(x)) for x in (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    )
    for token in {*prompt, *emitted}:
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token, count in counts.items():
        out[token] -= frequency * count
        out[token] -= presence
    return out


def defined_kept(logits: Vector, p: SamplingParams) -> set[int]:
    """The ids left for sampling, in vLLM's order: min-p, then top-k of what is left, then top-p of what is left."""
    probability = np.exp((logits - logits.max()) / p.temperature)
    likely = sorted(range(len(logits)), key=lambda i: -probability[i])
    likely = [i for i in likely if probability[i] >= p.min_p * probability.max()]
    likely = likely[: p.top_k or None]
    total, before, kept = sum(probability[i] for i in likely), 0.0, set[int]()
    for i in likely:
        if before / total < p.top_p or not kept:
            kept.add(i)
        before += probability[i]
    return kept


def defined_token(
    logits: torch.Tensor,
    position: int,
    prompt: Sequence[int],
    emitted: Sequence[int],
    p: SamplingParams,
    allowed: Collection[int] | None = None,
    stop_ids: Collection[int] = (),
) -> int:
    """The token at `position`, after `prompt` and `emitted`; `allowed` are the ids that a grammar leaves."""
    values = defined_biases(logits.double().numpy(), len(emitted), p, stop_ids)
    values = defined_penalties(values, prompt, emitted, p)
    if allowed is not None:
        if not np.isfinite(values[list(allowed)]).any():  # stop ids wait only where another id is allowed
            values = logits.double().numpy().copy()
        values[[i for i in range(len(values)) if i not in allowed]] = -np.inf
    if p.temperature == 0:
        return int(values.argmax())
    noise = gumbel_noise(torch.tensor(p.seed), torch.tensor(position), len(values)).double().numpy()
    scores = (values - values.max()) / float(np.float32(p.temperature)) + noise
    return max(defined_kept(values, p), key=lambda i: scores[i])
