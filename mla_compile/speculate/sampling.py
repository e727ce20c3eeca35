"""Sampling whose noise depends only on (seed, position, vocabulary id), so that speculation changes no token.

A token is `argmax(logits / temperature + gumbel)` over the ids that min-p, top-k and top-p keep (the Gumbel-max trick:
the argmax is distributed as the softmax): the op `sample_tokens`. Penalties change the logits before. Parameters have
the meaning of vLLM's `SamplingParams`, and are applied in the order of its sampler (`vllm/v1/sample/sampler.py`).

Plain decoding, verification and drafting use the same noise at the same position, so a draft whose logits agree with
the target's also agrees with its sample.

No sum here is in floating point, as its order would differ between compiled graphs, and no result depends on how a
kernel breaks ties: probabilities are summed as integers, and of equal logits the lower id comes first.
"""

import torch
from torch import Tensor

from mla_compile.ops.ordering import distinct_keys, indices_of
from mla_compile.ops.reductions.last_dim import row_argmax
from mla_compile.ops.sampling.sample import masses, sample_tokens
from mla_compile.speculate.state import DecodeState


def penalise(
    logits: Tensor,
    in_prompt: Tensor,
    num_emitted: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits after penalties, elementwise and broadcast: float64 for float64, else float32.

    Args:
        logits: float.
        in_prompt: bool, whether the id is in the prompt; num_emitted: int32, how often it is in the text after it.
        repetition, presence, frequency: float32 or float64. 1, 0 and 0 leave a logit's bits as they are.

    The repetition penalty is CTRL's (arXiv:1909.05858, section 4.1) with the rule of transformers and vLLM for negative
    logits; the others are those of OpenAI's API.
    """
    emitted = num_emitted > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | emitted, repeated, logits)
    return logits - frequency * num_emitted - presence * emitted


def add_bias(state: DecodeState, logits: Tensor, position: Tensor) -> Tensor:
    """Logits `[rows, n, vocab]` of the tokens at `position` `[rows, n]`, with each row's biases added.

    Before `min_len` the biases of stop ids are -inf. Without biases in the state the logits are returned unchanged.
    """
    if state.bias_ids is None or state.bias is None:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_early = position[..., None] < state.min_len[:, None, None]
    bias = torch.where(is_early, state.bias[:, None, 0], state.bias[:, None, 1])
    ids = state.bias_ids[:, None].expand_as(bias)
    # Not an atomic sum: equal ids write equal values.
    return logits.scatter(2, ids, logits.gather(2, ids) + bias.to(logits.dtype))


def penalise_after(state: DecodeState, logits: Tensor, drafts: Tensor) -> Tensor:
    """`penalise` with the drafts between a state's text and the logits counted: `[rows, n, vocab]`.

    Args:
        state: the text's counts; without them the logits are returned unchanged.
        logits: `[rows, n, vocab]`; the last position follows all of `drafts`, each earlier one follows one draft fewer.
        drafts: int64 `[rows, m]`, m >= n - 1.
    """
    in_prompt, num_emitted = state.in_prompt, state.num_emitted
    if in_prompt is None or num_emitted is None:
        return logits
    n, m = logits.shape[1], drafts.shape[1]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    penalties = state.repetition_penalty, state.presence_penalty, state.frequency_penalty
    by_row = [penalty.to(dtype)[:, None, None] for penalty in penalties]
    penalised = penalise(logits, in_prompt[:, None], num_emitted[:, None], *by_row)
    if m == 0:
        return penalised
    # Only the drafts' ids have other counts than the text: recomputing their logits avoids counts per position.
    index = torch.arange(m, device=drafts.device)
    precedes = index < torch.arange(m - n + 1, m + 1, device=drafts.device)[:, None]
    same = drafts[:, :, None] == drafts[:, None]
    more = (precedes[:, :, None] & same[:, None]).sum(dim=2)  # [rows, n, m], of each draft's id
    ids = drafts[:, None].expand(-1, n, -1)
    again = penalise(
        logits.gather(2, ids),
        in_prompt.gather(1, drafts)[:, None],
        num_emitted.gather(1, drafts)[:, None] + more,
        *by_row,
    )
    # Equal drafts write equal values.
    return penalised.scatter(2, ids, again)


def sample(state: DecodeState, logits: Tensor, position: Tensor) -> Tensor:
    """One token id for each position, int64 `[rows, n]`. A row of temperature 0 is greedy.

    Args:
        state: provides seed, temperature, top_k, top_p and min_p.
        logits: `[rows, n, vocab]`, float.
        position: int64 `[rows, n]`, the positions that the sampled tokens will take.
    """
    return sample_tokens(
        logits, position, state.seed, state.temperature, state.top_k, state.top_p, state.min_p
    )


def argmax(scores: Tensor) -> Tensor:
    """The id of the largest of float scores `[rows, n, vocab]`, the lowest id among equals: int64 `[rows, n]`."""
    return row_argmax(scores.flatten(0, 1)).view(scores.shape[:2])


def _likeliest(logits: Tensor, n: int) -> Tensor:
    """The ids of the n largest float32 logits `[..., vocab]`, the lowest ids first among equals: int64 `[..., n]`.

    Half types have many equal logits.
    """
    return indices_of(distinct_keys(logits).topk(n, dim=-1).values, logits.shape[-1])


def top_logprobs(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of chosen tokens and of the n most likely ones, by logits before penalties and temperature.

    Args:
        logits: `[rows, positions, vocab]`, float. tokens: int64 `[rows, positions]`. n: <= vocab.

    Returns:
        log-probabilities, float32 `[rows, positions, 1 + n]`: the chosen token's, then the largest ones in order, the
        lowest ids first among equals; int64 of the same shape: the chosen token's rank (1 + the number of more likely
        ids), then the ids.
    """
    logits = logits.float()
    chosen = logits.gather(2, tokens[..., None])
    rank = 1 + (logits > chosen).sum(dim=2, keepdim=True)
    ids = _likeliest(logits, n)
    highest = logits.amax(dim=2, keepdim=True)
    total = highest + (masses(logits - highest).sum(dim=2, keepdim=True) * 2.0**-40).log()
    return torch.cat([chosen, logits.gather(2, ids)], dim=2) - total, torch.cat([rank, ids], dim=2)
