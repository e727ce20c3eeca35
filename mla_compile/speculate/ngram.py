"""Prompt lookup on the device: drafts copy the tokens that followed an earlier occurrence of the text's last tokens.

The texts are `DecodeState.history`: the host writes prompts into it, each step the tokens that it emits.

The method is that of vLLM's `ngram` speculation and of transformers' `prompt_lookup_num_tokens`.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

MAX_NGRAM = 4
"""The maximum number of tokens that are compared."""


def lookup_drafts(history: Tensor, num_tokens: Tensor, k: int) -> Tensor:
    """The k draft tokens after each text, int64 `[rows, k]`.

        a b c d e b c   "b c" occurred before, "e b c" did not: the drafts are d e b

    The earlier place that agrees with the most of the last `MAX_NGRAM` tokens wins; the latest among equals. They copy
    what followed it up to the text's end, and then start over at the same place, so periodic text is continued. If the
    last token occurs for the first time, it is repeated.

    Args:
        history: ids, int32 `[rows, places]`, at least two places; ids after a text are ignored.
        num_tokens: of each text, int32 `[rows]`. A row with a number outside `[2, places]` gets arbitrary ids of it.
    """
    places = history.shape[1]
    last = (num_tokens.long() - 1).clamp(1, places - 1)[:, None]
    padded = pad(history, (MAX_NGRAM - 1, 0), value=-1)  # -1 matches no id
    # For each place, how many tokens up to it agree with the text's last ones.
    agrees = torch.ones_like(history, dtype=torch.bool)
    length = torch.zeros_like(history)
    for i in range(MAX_NGRAM):
        start = MAX_NGRAM - 1 - i
        agrees = agrees & (padded[:, start : start + places] == history.gather(1, (last - i).clamp(min=0)))
        length = length + agrees
    place = torch.arange(places, device=history.device)
    # If nothing agrees, the latest place wins, the one before the last token.
    best = torch.where(place < last, length * places + place, -1).amax(dim=1, keepdim=True) % places
    period, offset = last - best, torch.arange(k, device=history.device)
    # Not `%`: Inductor pads CPU vectors with zero lanes, and its integer division rejects zeros.
    offset = offset - (offset / period).long() * period
    return history.gather(1, best + 1 + offset).long()


def record(history: Tensor, start: Tensor, tokens: Tensor, count: Tensor) -> None:
    """Write each row's first `count` `[rows]` of `tokens` `[rows, n]` into its history, from place `start` `[rows]`."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    # Tokens beyond `count` repeat the first token, or the current id, so that no place gets two different values.
    index = torch.where(index < count[:, None], index, 0)
    place = (start.long()[:, None] + index).clamp(max=history.shape[1] - 1)
    new = torch.where(count[:, None] > 0, tokens.gather(1, index).to(history.dtype), history.gather(1, place))
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None].expand_as(place)
    history.index_put_((rows, place), new)
