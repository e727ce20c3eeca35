"""Target and drafts computed from nothing but the text, without any state that a step could have spoilt."""

import torch
from torch import Tensor

from mla_compile import MLABatch, prefill_segment
from mla_compile.models import MLAForCausalLM

PAGE = 4


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
            hidden = self._trunk(text)
            text.append(int(self.model.logits(hidden[-1]).argmax()))
        return text[len(prompt) :]

    def _trunk(self, text: list[int]) -> Tensor:
        self.model.allocate_cache(2 + (len(text) + 8) // PAGE, PAGE)
        batch, positions = self._batch(len(text))
        return self.model(torch.tensor(text), positions, batch)

    def drafts(self, text: list[int], count: int) -> list[int]:
        """What the MTP layer proposes after `text`, whose last token the target has just sampled."""
        hidden = self._trunk(text[:-1])
        batch, positions = self._batch(len(text) - 1)
        out = self.model.forward_mtp(torch.tensor(text[1:]), hidden, positions, batch)[-1:]
        drafts = [int(self.model.logits(out).argmax())]
        for j in range(1, count):
            batch, positions = self._batch(1, len(text) - 2 + j)
            out = self.model.forward_mtp(torch.tensor(drafts[-1:]), out, positions, batch)
            drafts.append(int(self.model.logits(out).argmax()))
        return drafts
