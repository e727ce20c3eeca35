"""How many drafts each row makes, from how many of its own were accepted; on the device, inside the step.

A step runs every row at one width. What a row that is seldom right saves by fewer drafts is what padding does not
cost: the experts' weights that only its tokens would read, in verification and in the MTP layer's passes.
"""

import torch
from torch import Tensor

START = 0.9
"""The share of accepted drafts that a new row is taken to have: it makes all, up to 28."""
MEMORY = 1 / 8
"""The weight of the newest draft in that share."""
WORTH = 0.05
"""A draft that is accepted, with all before it, with less than this probability is not made."""


def learn(acceptance: Tensor, verified: Tensor, accepted: Tensor) -> Tensor:
    """The share of each row's drafts that were accepted, old ones fading, after another step; float32 `[rows]`.

    verified: how many drafts a row had in it, int `[rows]`; accepted: how many of these it emitted. Those behind the
    first wrong one tell nothing.
    """
    raised = 1 - (1 - acceptance) * (1 - MEMORY) ** accepted
    return torch.where(accepted < verified, raised * (1 - MEMORY), raised)


def worthwhile(acceptance: Tensor, k: int) -> Tensor:
    """The largest n <= k with `acceptance ** n >= WORTH`, but 1 at least, which shows when that changes; int32."""
    made = torch.full_like(acceptance, min(1, k), dtype=torch.int32)
    for n in range(2, k + 1):
        made = made + (acceptance >= WORTH ** (1 / n))
    return made
