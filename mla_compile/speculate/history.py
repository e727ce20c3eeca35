"""The rows' texts on the device, `DecodeState.history`: the host writes prompts into it, each step what it emits."""

import torch
from torch import Tensor


def record(history: Tensor, start: Tensor, tokens: Tensor, count: Tensor) -> None:
    """Write each row's first `count` `[rows]` of `tokens` `[rows, n]` into its history, from place `start` `[rows]`."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    # What does not count repeats the first token, or what is there, so no two values are written to one place.
    index = torch.where(index < count[:, None], index, 0)
    place = (start.long()[:, None] + index).clamp(max=history.shape[1] - 1)
    new = torch.where(count[:, None] > 0, tokens.gather(1, index).to(history.dtype), history.gather(1, place))
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None].expand_as(place)
    history.index_put_((rows, place), new)
