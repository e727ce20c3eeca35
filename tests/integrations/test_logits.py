"""Prefill, decode and verify steps of an accelerated model compute the logits of the stock one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile.batch import MLABatch
from mla_compile.caches import allocate
from mla_compile.integrations.transformers.target import TransformersTarget
from mla_compile.ops.attention.segments import decode_segment, prefill_segment
from mla_compile.torch_internals import capture_graph
from tests.integrations import stock
from tests.integrations.families import FAMILIES, RECURRENT, VOCAB_SIZE, stock_model

PAGE_SIZE, PAGES = 4, 12
PROMPTS, STEPS = (9, 1, 17, 4), 8
TABLE = 1 + torch.arange(len(PROMPTS) * PAGES, dtype=torch.int32).view(-1, PAGES)


def texts() -> list[list[int]]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB_SIZE, (length + STEPS,), generator=g).tolist() for length in PROMPTS]


class Reader:
    """Reads the texts through a target, a few tokens of every row at a time."""

    def __init__(self, family: str, **changes: Any) -> None:
        self.model = stock_model(family, **changes)
        self.target = TransformersTarget(self.model, None)
        self.target.prepare(1 + TABLE.numel())
        allocate(self.target.cache_specs(), 1 + TABLE.numel(), PAGE_SIZE)
        self.done = [0] * len(PROMPTS)

    def prefill(self, lengths: list[int]) -> list[Tensor]:
        segment, positions = prefill_segment(lengths, self.done, TABLE, page_size=PAGE_SIZE)
        return self._run(lengths, positions, MLABatch(prefill=segment))

    def decode(self, q_len: int) -> list[Tensor]:
        num_cached = torch.tensor(self.done, dtype=torch.int32)
        segment, positions = decode_segment(num_cached, TABLE, q_len=q_len, page_size=PAGE_SIZE)
        return self._run([q_len] * len(PROMPTS), positions, MLABatch(decode=segment))

    @torch.no_grad()
    def _run(self, lengths: list[int], positions: Tensor, batch: MLABatch) -> list[Tensor]:
        """Logits of each row's next tokens, `[n, vocab_size]`."""
        rows = zip(texts(), self.done, lengths, strict=True)
        tokens = torch.tensor([token for text, start, n in rows for token in text[start : start + n]])
        with self.target.installed(64):
            logits = self.target.logits(self.target(tokens, positions, batch).hidden)
        self.done = [start + n for start, n in zip(self.done, lengths, strict=True)]
        return list(logits.split(lengths))

    def assert_as_stock(self, logits: list[Tensor]) -> None:
        for text, end, own in zip(texts(), self.done, logits, strict=True):
            expected = stock.logits(self.model, text[:end])[end - len(own) :]
            error = (own - expected).abs().max() / expected.abs().max()
            assert error < 1e-5, f"{len(own)} tokens up to {end}: relative error {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_prefill_decode_and_verify_steps_are_those_of_stock(family: str) -> None:
    reader = Reader(family)
    first = [max(1, length // 2) for length in PROMPTS]
    reader.assert_as_stock(reader.prefill(first))
    rest = [max(1, length - n) for length, n in zip(PROMPTS, first, strict=True)]
    reader.assert_as_stock(reader.prefill(rest))
    reader.assert_as_stock(reader.decode(1))
    reader.assert_as_stock(reader.decode(1))
    if family not in RECURRENT:  # their states take no drafts
        reader.assert_as_stock(reader.decode(4))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_layers_are_those_of_stock(family: str) -> None:
    model, text = stock_model(family), texts()[0]
    target = TransformersTarget(model, None)
    target.prepare(PAGES)
    allocate(target.cache_specs(), 1 + PAGES, PAGE_SIZE)
    if target.is_recurrent:
        assert target.num_aux_layers == 0
        return
    layers = tuple(range(target.num_aux_layers))[-2::-1]
    assert layers
    segment, positions = prefill_segment([len(text)], [0], TABLE[:1], page_size=PAGE_SIZE)
    with torch.no_grad():
        with target.installed(64):
            aux = target(torch.tensor(text), positions, MLABatch(prefill=segment), layers).aux
            embedded = target.embed(torch.tensor(text))
            plain = target, (torch.tensor(text), positions, MLABatch(prefill=segment)), {}
            (graph, _) = capture_graph(*plain)
            assert len(graph.graph.output_node().args[0]) == 1, (
                "what is not asked for is no result of a graph"
            )
        assert not any(layer._forward_hooks for layer in model.get_decoder().layers)
        ids = torch.tensor([text])
        stocks = model.get_decoder()(ids, use_cache=False, output_hidden_states=True).hidden_states
        assert torch.equal(embedded, model.get_input_embeddings()(ids)[0])
    for layer, mine in zip(layers, aux, strict=True):
        torch.testing.assert_close(mine, stocks[layer + 1][0], rtol=1e-4, atol=3e-5)
