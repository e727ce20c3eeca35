"""Times of steps, and the bytes that a step must read. It imports no transformers, which takes seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from mla_compile.engine.launch import Launcher

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Marks:
    """Points in time on the stream, or on the host without a GPU.

    As a stopping criterion of transformers' `generate` it marks each token.
    """

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def __len__(self) -> int:
        return len(self._marks)

    def mark(self) -> None:
        if DEVICE == "cpu":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.mark()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def intervals_ms(self) -> list[float]:
        """Between one mark and the next."""
        if DEVICE == "cpu":
            return [(end - start) * 1e3 for start, end in pairwise(self._marks)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(self._marks)]

    @contextmanager
    def after_launches(self, rows: int) -> Iterator[None]:
        """Mark the end of each of our steps in which `rows` rows decode and no prompt runs."""
        launch = Launcher.launch

        def marked(launcher: Launcher, plan: Any) -> Any:
            launched = launch(launcher, plan)
            if len(plan.decodes) == rows and not plan.chunks:
                self.mark()
            return launched

        with patch.object(Launcher, "launch", marked):
            yield


def read_bandwidth(num_bytes: int) -> float:
    """Bytes per second of a plain read, the maximum of this many bytes."""
    data, marks = torch.ones(num_bytes // 8, dtype=torch.int64, device=DEVICE), Marks()
    marks.mark()
    for _ in range(10):
        data.amax()
        marks.mark()
    return num_bytes / min(marks.intervals_ms()) * 1e3


def floor_bytes(model: Any, batch: int, context: int, *, drafts: int = 0, by_mtp: bool = True) -> float:
    """Bytes that a step of `batch` rows reads: weights, experts as often as random routing hits them, and latents.

    drafts: of each row. Each draft reads the head once more, and the layer `mtp` of the package's own model, which is
    not read without drafts. by_mtp: False if another drafter drafts, whose bytes are not counted.
    """
    config, tokens, passes = model.config, batch * (1 + drafts), drafts if by_mtp else 0
    total = 0.0
    for name, parameter in model.named_parameters():
        times = 1.0
        if ".experts." in name:
            times = share_of_experts(config, tokens)
        elif "embed_tokens" in name:
            times = tokens / config.vocab_size
        if name.startswith("mtp."):
            times *= passes
        elif name.startswith("lm_head."):
            times *= 1 + passes
        total += times * parameter.numel() * parameter.element_size()
    return total + latent_bytes(config, batch * context) * (config.num_hidden_layers + passes)


def share_of_experts(config: Any, tokens: int) -> float:
    """The expected share of a layer's routed experts that this many tokens choose, by random routing."""
    return 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens


def latent_bytes(config: Any, tokens: int) -> int:
    """Bytes of latents of one layer, in half precision."""
    return tokens * (config.kv_lora_rank + config.qk_rope_head_dim) * 2


def figures(gaps: list[float], tokens: int, seconds: float) -> dict[str, float]:
    """gaps: seconds between two of a request's tokens."""
    gaps = sorted(gaps)
    return {
        "tokens_per_s": round(tokens / seconds),
        "p50_ms": round(gaps[len(gaps) // 2] * 1e3, 2),
        "p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 2),
        "worst_ms": round(gaps[-1] * 1e3, 2),
    }
