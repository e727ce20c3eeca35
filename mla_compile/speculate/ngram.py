"""Prompt look-up on the device: what followed the last tokens of a text where it had them before.

The texts are `DecodeState.history`: the host writes prompts into it, each step what it emits.

The method is that of vLLM's `ngram` speculation and of transformers' `prompt_lookup_num_tokens`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

MAX_NGRAM = 4
"""The most tokens that count as agreeing."""


def look_up(history: Tensor, num_tokens: Tensor, k: int) -> Tensor:
    """The k tokens that are likely to follow each text, int64 `[rows, k]`.

        a b c d e b c   "b c" was there before, a longer end was not: d e b follow

    The earlier place wins that agrees with the most of the last `MAX_NGRAM` tokens; the latest among equals.
    What followed it is read as far as the text goes and then from its beginning again, so text that repeats itself is
    continued. Where the last token is a new one, it is repeated.

    Args:
        history: ids, int32 `[rows, places]`, at least two places; what stands behind a text does not matter.
        num_tokens: of each text, int32 `[rows]`. A row where it is not in `[2, places]` gets any of its ids.
    """
    places = history.shape[1]
    last = (num_tokens.long() - 1).clamp(1, places - 1)[:, None]
    padded = pad(history, (MAX_NGRAM - 1, 0), value=-1)  # before a text there is no id
    # For each place, how many of the tokens that end there are the text's last ones.
    agrees = torch.ones_like(history, dtype=torch.bool)
    length = torch.zeros_like(history)
    for i in range(MAX_NGRAM):
        start = MAX_NGRAM - 1 - i
        agrees = agrees & (padded[:, start : start + places] == history.gather(1, (last - i).clamp(min=0)))
        length = length + agrees
    place = torch.arange(places, device=history.device)
    # Where nothing agrees, the place before the last one is the latest.
    best = torch.where(place < last, length * places + place, -1).amax(dim=1, keepdim=True) % places
    period, offset = last - best, torch.arange(k, device=history.device)
    # Not `%`: Inductor's vectors for CPUs end in lanes of zeros, and it refuses to divide integers by them.
    offset = offset - (offset / period).long() * period
    return history.gather(1, best + 1 + offset).long()


def record(history: Tensor, start: Tensor, tokens: Tensor, count: Tensor) -> None:
    """Write each row's first `count` `[rows]` of `tokens` `[rows, n]` into its history, from place `start` `[rows]`."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    # What does not count repeats the first token, or what is there, so no two values are written to one place.
    index = torch.where(index < count[:, None], index, 0)
    place = (start.long()[:, None] + index).clamp(max=history.shape[1] - 1)
    new = torch.where(count[:, None] > 0, tokens.gather(1, index).to(history.dtype), history.gather(1, place))
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None].expand_as(place)
    history.index_put_((rows, place), new)
