"""A row's text on the device: whatever drafts finds the prompt in it, and all that has been emitted."""

import random

import pytest
import torch
from torch import Tensor

from mla_compile.batch import ForwardOutput
from mla_compile.speculate import DecodeState, DrafterKind, DrafterSettings, PromptChunks, Verified
from mla_compile.speculate.ngram import record
from tests.engine.engines import engine
from tests.speculate.test_ngram import MIXED, PROMPTS, repeating


def test_a_row_that_emits_nothing_records_nothing_wherever_it_stands() -> None:
    history = torch.arange(24, dtype=torch.int32).view(4, 6)
    expected = history.clone()
    expected[1, 3:5] = torch.tensor([90, 91])
    expected[3, 5] = 90  # at the end of its places
    start, count = torch.tensor([2, 3, 2**20, 5]), torch.tensor([0, 2, 0, 1])
    record(history, start.int(), torch.tensor([90, 91, 92]).expand(4, 3), count.int())
    assert torch.equal(history, expected)


class Reader:
    """A drafter of one's own: remembers each row's text, and repeats the last token of it."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def fill(self, chunks: PromptChunks, output: ForwardOutput) -> None:
        pass

    def draft(self, state: DecodeState, verified: Verified) -> Tensor:
        assert state.history is not None
        num_tokens = verified.num_cached + 1
        for row in verified.count.nonzero()[:, 0]:
            self.texts.append(state.history[row, : num_tokens[row]].tolist())
        newest = state.history.gather(1, (num_tokens.long() - 1)[:, None])
        return newest.long().expand(-1, verified.k)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_rows": 1},  # each alone, in the row of the one before
        {"num_pages": 17},  # preempted
        {"max_tokens_per_step": 26},  # chunks beside rows that decode
    ],
    ids=str,
)
def test_a_drafter_of_ones_own_reads_prompt_and_emitted_text_at_every_step(k: int, settings: dict) -> None:
    read: list[list[int]] = []
    drafter = DrafterKind("reader", lambda _: Reader(read), needs_history=True)
    completions = engine(k, repeating(), drafter=drafter, **settings).generate(
        PROMPTS, MIXED, max_new_tokens=30
    )
    texts = [[*p, *c.token_ids] for p, c in zip(PROMPTS, completions, strict=True)]
    right = [
        text[:n] for p, text in zip(PROMPTS, texts, strict=True) for n in range(len(p) + 1, len(text) + 1)
    ]
    assert [text for text in read if text not in right] == []
    assert all(text in read for text in texts), "the last step's too"
    assert len(read) == sum(completion.num_prefills + completion.num_steps for completion in completions)


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_builds_one_drafter_for_all_of_its_steps(seed: int) -> None:
    draw = random.Random(seed)
    k = draw.choice([0, 1, 2, 5])
    max_rows = draw.choice([1, 4])
    params = [draw.choice(MIXED) for _ in PROMPTS]  # greedy and sampled steps take turns, where rows are few
    built: list[DrafterSettings] = []
    asked: set[tuple[int, bool]] = set()

    class Repeat(Reader):
        def draft(self, state: DecodeState, verified: Verified) -> Tensor:
            asked.add((verified.k, verified.sampled))
            return super().draft(state, verified)

    def build(settings: DrafterSettings) -> Repeat:
        built.append(settings)
        return Repeat([])

    def texts(k: int, **settings: object) -> list[list[int]]:
        completions = engine(k, repeating(), **settings).generate(PROMPTS, params, max_new_tokens=30)
        return [completion.token_ids for completion in completions]

    drafter = DrafterKind("repeat", build, needs_history=True)
    assert texts(k, drafter=drafter, max_rows=max_rows) == texts(0)
    assert [settings.num_speculative_tokens for settings in built] == [k] * (k > 0)
    assert {steps for steps, _ in asked} == {k} - {0}
