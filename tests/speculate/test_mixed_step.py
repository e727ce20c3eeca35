"""The mixed step: decode rows that keep speculating and prompt chunks in one forward, against each row alone."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mla_compile import MLABatch, prefill_segment
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import DecodeState, PromptChunk, PromptChunks, SamplingParams, SpeculativeDecoder
from tests.models_for_tests import VOCAB, poison_caches, tiny_model
from tests.speculate.from_scratch import PAGE

GREEDY = SamplingParams()
MAX_PAGES = 16
ROOM = 24
"""Tokens that a row may generate, where a test does not say."""


@dataclass
class Row:
    """A request: what it asks for, and what the steps said of it, one entry a step that it decoded in."""

    prompt: list[int]
    sampling: SamplingParams = GREEDY
    max_new_tokens: int = ROOM
    stop_id: int = -1
    tokens: list[list[int]] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    logprobs: list[list[list[float]]] = field(default_factory=list)

    def fresh(self) -> "Row":
        return Row(self.prompt, self.sampling, self.max_new_tokens, self.stop_id)


class Runner:
    """A decoder and a state of `rows` rows on poisoned caches, where requests take rows and pages of their own."""

    def __init__(self, model: MLAForCausalLM, k: int, rows: int, *, penalised: bool = False) -> None:
        self.model, self.k = model, k
        model.allocate_cache(1 + rows * MAX_PAGES, PAGE)
        poison_caches(model)
        self.decoder = SpeculativeDecoder(model, k, page_size=PAGE, sampled=True)
        self.step: Callable[[DecodeState], None] = self.decoder
        self.mixed: Callable[[DecodeState, PromptChunks], None] = self.decoder.mixed
        self.state = DecodeState.allocate(
            rows, k, max_pages=MAX_PAGES, penalised_vocab=VOCAB if penalised else None, num_logprobs=2
        )
        self.requests: dict[int, Row] = {}

    def admit(self, row: int, request: Row) -> None:
        """Everything of a row but what its prompt's last chunk sets, which is nonsense."""
        state, sampling = self.state, request.sampling
        self.requests[row] = request
        for name in ("seed", "temperature", "top_k", "top_p", "min_p"):
            getattr(state, name)[row] = getattr(sampling, name)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            getattr(state, name)[row] = getattr(sampling, name)
        if state.in_prompt is not None and state.num_emitted is not None:
            state.num_emitted[row] = 0
            state.in_prompt[row] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(
                0, torch.tensor(request.prompt), True
            )
        state.stop_ids[row] = request.stop_id
        state.max_len[row] = len(request.prompt) + request.max_new_tokens
        state.block_table[row] = 1 + row * MAX_PAGES + torch.arange(MAX_PAGES).flip(0)
        state.active[row] = False
        state.num_cached[row] = 2**20
        state.last_token[row] = VOCAB - 1
        state.drafts[row] = torch.arange(self.k)

    def run(self, chunks: Sequence[tuple[int, int, int]] = ()) -> None:
        """A step with parts `(row, start, stop)` of prompts, all decode rows beside them."""
        before = self.state.active.tolist()
        parts = [PromptChunk(row, self.requests[row].prompt, *part) for row, *part in chunks]
        if parts:
            self.mixed(self.state, PromptChunks.pack(parts, self.state, page_size=PAGE))
        else:
            self.step(self.state)
        self.note(before, {row for row, _, stop in chunks if stop == len(self.requests[row].prompt)})

    def note(self, before: list[bool], begun: set[int]) -> None:
        """Write down what the report says."""
        for row, (count, active, *tokens) in enumerate(self.state.report.tolist()):
            assert bool(active) == bool(self.state.active[row])
            if not before[row] and row not in begun:
                assert (count, active) == (0, 0), f"row {row} has nothing to say"
                continue
            request = self.requests[row]
            request.tokens.append(tokens[:count])
            request.logprobs.append(self.state.logprobs[row, :count].tolist())
            if active:
                request.drafts.append(self.state.drafts[row].tolist())

    def latents(self, row: int) -> list[Tensor]:
        """Of each layer, what later steps read of a row."""
        slots = self.state.block_table[row].long()[:, None] * PAGE + torch.arange(PAGE)
        slots = slots.view(-1)[: self.state.num_cached[row]]
        caches = [cache for cache in self.model.caches() if cache is not None]
        # Without drafts nobody runs the MTP layer, whose cache is the last.
        return [cache.flatten(0, 1)[slots] for cache in (caches if self.k else caches[:-1])]


@pytest.fixture(scope="module")
def model() -> MLAForCausalLM:
    return tiny_model()


def alone(model: MLAForCausalLM, k: int, request: Row, steps: int) -> tuple[Row, list[Tensor]]:
    """The request by itself: its prompt in one piece, then `steps` plain steps."""
    request = request.fresh()
    runner = Runner(copy.deepcopy(model), k, 1, penalised=request.sampling.penalised)
    runner.admit(0, request)
    state, prompt = runner.state, request.prompt
    segment, positions = prefill_segment([len(prompt)], [0], state.block_table, page_size=PAGE)
    hidden = runner.decoder.prefill(
        torch.tensor(prompt),
        torch.tensor([*prompt[1:], 0]),
        positions,
        MLABatch(prefill=segment),
        torch.tensor([len(prompt) - 1]),
    )
    state.num_cached[0], state.active[0] = len(prompt), True
    runner.decoder.start(state, hidden)
    runner.note([True], set())
    for _ in range(steps):
        if state.active[0]:
            runner.run()
    return request, runner.latents(0)


def check(runner: Runner) -> None:
    """Every request that decodes, or did, has said and cached what it says and caches alone."""
    for row, got in runner.requests.items():
        if not got.tokens:
            continue
        expected, latents = alone(runner.model, runner.k, got, len(got.tokens) - 1)
        assert got.tokens == expected.tokens, f"row {row}"
        assert got.drafts == expected.drafts, f"row {row}"
        for mine, theirs in zip(got.logprobs, expected.logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-5)
        if runner.state.active[row]:
            for mine, theirs in zip(runner.latents(row), latents, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def pieces(row: int, length: int, size: int) -> list[tuple[int, int, int]]:
    return [(row, start, min(start + size, length)) for start in range(0, length, size)]


PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14, 15]]


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("k", [0, 1, 3])
def test_prompts_in_chunks_beside_decode_rows_say_what_each_says_alone(
    model: MLAForCausalLM, k: int, size: int
) -> None:
    """Row 0 decodes from the start, the others arrive one after the other, chunks of two in one call."""
    runner = Runner(model, k, 5)
    for row, prompt in enumerate(PROMPTS):
        runner.admit(row, Row(prompt))
    queues = [pieces(row, len(prompt), size) for row, prompt in enumerate(PROMPTS)]
    for call in range(16):
        chunks = [queue.pop(0) for row, queue in enumerate(queues) if queue and call >= row // 2]
        runner.run(chunks)
    check(runner)
    assert all(len(request.tokens) > 3 for request in runner.requests.values())
