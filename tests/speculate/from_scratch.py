"""Target and drafts computed from nothing but the text, without any state that a step could have spoilt."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from mla_compile import MLABatch, prefill_segment
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import SamplingParams
from mla_compile.speculate.sampling import sample
from tests.speculate.defined_sampling import arguments_of

PAGE = 4


Choose = Callable[[Tensor, int], int]
"""Logits `[vocab]` and the position that the token will take, to the token."""


def greedy(logits: Tensor, position: int) -> int:
    return int(logits.argmax())


def sampler(params: SamplingParams) -> Choose:
    """Draws one token at a time, each in a call of its own."""
    row = arguments_of(params)

    def choose(logits: Tensor, position: int) -> int:
        return int(sample(SimpleNamespace(**row), logits[None, None], torch.tensor([[position]])))

    return choose


class FromScratch:
    """Runs whole texts through a copy of the model's caches, by the prefill path."""

    def __init__(self, model: MLAForCausalLM) -> None:
        self.model = model

    def _batch(self, count: int, cached: int = 0) -> tuple[MLABatch, Tensor]:
        pages = -(-(count + cached) // PAGE)
        table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
        segment, positions = prefill_segment([count], [cached], table, page_size=PAGE)
        return MLABatch(prefill=segment), positions

    def continuation(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens, each from a whole new forward."""
        text = list(prompt)
        for _ in range(count):
            hidden = self.trunk(text)
            text.append(int(self.model.logits(hidden[-1]).argmax()))
        return text[len(prompt) :]

    def trunk(self, text: list[int]) -> Tensor:
        allocate(self.model.cache_specs(), 2 + (len(text) + 8) // PAGE, PAGE)
        batch, positions = self._batch(len(text))
        return self.model(torch.tensor(text), positions, batch).hidden

    def drafts(self, text: list[int], count: int, choose: Choose = greedy) -> list[int]:
        """What the MTP layer proposes after `text`, whose last token the target has just sampled."""
        hidden = self.trunk(text[:-1])
        batch, positions = self._batch(len(text) - 1)
        out = self.model.forward_mtp(torch.tensor(text[1:]), hidden, positions, batch)[-1:]
        drafts = [choose(self.model.logits(out[0]), len(text))]
        for j in range(1, count):
            batch, positions = self._batch(1, len(text) - 2 + j)
            out = self.model.forward_mtp(torch.tensor(drafts[-1:]), out, positions, batch)
            drafts.append(choose(self.model.logits(out[0]), len(text) + j))
        return drafts
