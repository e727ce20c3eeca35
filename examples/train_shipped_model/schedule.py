"""Learning rate, optimizer, and how far a phase has come."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import nn

WARMUP = 0.03


def schedule(progress: float, peak: float) -> float:
    """Linear warm-up, then a cosine to 1% of the peak; progress in [0, 1]."""
    if progress < WARMUP:
        return peak * max(progress, 0.001) / WARMUP
    turn = (progress - WARMUP) / (1 - WARMUP)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(turn, 1.0))))


def optimizer(modules: list[nn.Module], device: torch.device) -> torch.optim.AdamW:
    parameters = list(dict.fromkeys(p for m in modules for p in m.parameters() if p.requires_grad))
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")


def ticks(until: float, steps: int | None) -> Iterator[float]:
    """Progress in [0, 1): step over steps where these are given, else by the clock from the third step (which ends the
    compiling) to `until`."""
    if steps is not None:
        yield from (step / steps for step in range(steps))
        return
    yield from (0.0, 0.0, 0.0)
    begin = time.monotonic()
    while (progress := (time.monotonic() - begin) / max(until - begin, 1.0)) < 1:
        yield progress
