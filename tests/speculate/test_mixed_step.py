"""The mixed step: decode rows that keep speculating and prompt chunks in one forward, against each row alone."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from mla_compile import MLABatch
from mla_compile.batch import ForwardOutput
from mla_compile.caches import allocate
from mla_compile.models import MLAForCausalLM
from mla_compile.passes import pipeline
from mla_compile.passes.effects import live_nodes
from mla_compile.passes.nodes import op_name
from mla_compile.speculate import DecodeState, PackedChunks, PromptChunk, SamplingParams, SpeculativeDecoder
from mla_compile.speculate.state import FIRST_TOKEN
from mla_compile.torch_internals import (
    capture_graph,
    know_least_sizes,
    mark_varying,
    with_own_code,
)
from tests.counters import compile_counters
from tests.host_sync import NoHostSync
from tests.models_for_tests import VOCAB, caches_of, one_layer_model, poison_caches
from tests.passes.capture import nodes_of, shape
from tests.speculate.eager_start import start_alone
from tests.speculate.from_scratch import PAGE, FromScratch

Part = tuple[int, int, int]
"""Of a prompt: row, start, stop."""

GREEDY = SamplingParams()
MAX_ROWS = 5
MAX_PAGES = 16
ROOM = 24
"""Tokens that a row may generate, where a test does not say."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    max_new_tokens: int = ROOM
    stop_id: int = -1


@dataclass
class Emitted:
    """What the steps reported of a request, one entry for each step that it decoded in."""

    tokens: list[list[int]] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    latents: list[list[Tensor]] = field(default_factory=list)

    def text(self) -> list[int]:
        return [token for tokens in self.tokens for token in tokens]


class Runner:
    """A decoder and a state of `rows` rows on poisoned caches, where requests take rows and pages of their own."""

    def __init__(self, model: MLAForCausalLM, k: int, rows: int) -> None:
        self.model, self.k = model, k
        if not caches_of(model):  # compiled code knows the caches that it was compiled with
            allocate(model.cache_specs(), 1 + MAX_ROWS * MAX_PAGES, PAGE)
        poison_caches(model)
        self.decoder = SpeculativeDecoder(model, k, page_size=PAGE, sampled=True)
        self.step: Callable[[DecodeState], None] = self.decoder
        self.mixed: Callable[[DecodeState, PackedChunks], None] = self.decoder
        self.state = DecodeState.allocate(rows, k, max_pages=MAX_PAGES, penalised_vocab=VOCAB)
        self.requests: dict[int, Request] = {}
        self.row_output: dict[int, Emitted] = {}

    def admit(self, row: int, request: Request) -> None:
        """Everything of a row but what its prompt's last chunk sets, which is nonsense."""
        state = self.state
        self.requests[row], self.row_output[row] = request, Emitted()
        for name, value in vars(request.sampling).items():
            if name != "logprobs" and hasattr(state, name):  # the others say when a request ends
                getattr(state, name)[row] = value
        assert state.in_prompt is not None and state.num_emitted is not None
        state.num_emitted[row] = 0
        state.in_prompt[row] = False
        state.in_prompt[row, torch.tensor(request.prompt)] = True
        state.stop_ids[row] = request.stop_id
        state.max_len[row] = len(request.prompt) + request.max_new_tokens
        state.block_table[row] = 1 + row * MAX_PAGES + torch.arange(MAX_PAGES).flip(0)
        self.suspend(row)

    def suspend(self, row: int) -> None:
        state = self.state
        state.active[row] = False
        state.num_cached[row] = 2**20
        state.last_token[row] = VOCAB - 1
        state.drafts[row] = torch.arange(self.k)

    def chunks(self, parts: Sequence[Part], **settings: bool) -> PackedChunks:
        chunks = [PromptChunk(row, self.requests[row].prompt, start, stop) for row, start, stop in parts]
        return PackedChunks.pack(chunks, self.state, page_size=PAGE, **settings)

    def run(self, parts: Sequence[Part] = (), **settings: bool) -> None:
        """A step with parts of prompts, all decode rows beside them."""
        decoded = self.state.active.tolist()
        if parts:
            self.mixed(self.state, self.chunks(parts, **settings))
        else:
            self.step(self.state)
        for row, _, stop in parts:
            decoded[row] = stop == len(self.requests[row].prompt)
        self.note(decoded)

    def note(self, decoded: Sequence[bool]) -> None:
        """Record the report of the rows that decoded; the others have none."""
        state = self.state
        for row, (count, active, _, _, *tokens) in enumerate(state.report.tolist()):
            assert bool(active) == bool(state.active[row])
            assert (count > 0) == decoded[row], f"row {row}"
            if not decoded[row]:
                assert not active
                continue
            row_output = self.row_output[row]
            row_output.tokens.append(tokens[:count])
            if active:
                row_output.drafts.append(state.drafts[row].tolist())
                row_output.latents.append(self.latents(row))

    def latents(self, row: int) -> list[Tensor]:
        """Of each layer, what later steps read of a row."""
        slots = self.state.block_table[row].long()[:, None] * PAGE + torch.arange(PAGE)
        slots = slots.view(-1)[: self.state.num_cached[row]]
        caches = caches_of(self.model)
        # Without drafts the MTP layer, whose cache is the last, does not run.
        return [cache.flatten(0, 1)[slots] for cache in (caches if self.k else caches[:-1])]

    def check(self, tolerance: float = 1e-9) -> None:
        """Every request has emitted and cached, after each of its steps, what it emits and caches alone."""
        for row, request in self.requests.items():
            got, expected = self.row_output[row], alone(self.k, request)
            assert got.tokens == expected.tokens[: len(got.tokens)], f"row {row}"
            assert got.drafts == expected.drafts[: len(got.drafts)], f"row {row}"
            for mine, theirs in zip(got.latents, expected.latents, strict=False):
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@cache
def alone(k: int, request: Request) -> Emitted:
    """The request by itself: its prompt in one piece, then plain steps until it has ended."""
    runner = Runner(one_layer_model(), k, 1)
    runner.admit(0, request)
    state = runner.state
    start_alone(runner.decoder, state, request.prompt)
    runner.note([True])
    while state.active[0]:
        runner.run()
    return runner.row_output[0]


@pytest.fixture(scope="module")
def model() -> MLAForCausalLM:
    return one_layer_model()


@pytest.fixture(scope="module")
def oracle() -> FromScratch:
    return FromScratch(one_layer_model())


def parts(row: int, length: int, size: int) -> list[Part]:
    return [(row, start, min(start + size, length)) for start in range(0, length, size)]


PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8, 9, 10), (11,), (12, 13, 14, 15)]
SAMPLED = [
    SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.4),
    SamplingParams(frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1.2, seed=2, top_k=9, top_p=0.9, presence_penalty=0.3),
    GREEDY,
]


def serve(runner: Runner, requests: Sequence[Request], size: int, calls: int) -> None:
    """Row 0 decodes early, the others arrive one after the other; some calls have the chunks of two prompts."""
    for row, request in enumerate(requests):
        runner.admit(row, request)
    queues = [parts(row, len(request.prompt), size) for row, request in enumerate(requests)]
    for call in range(calls):
        runner.run([queue.pop(0) for row, queue in enumerate(queues) if queue and call >= row // 2])


@pytest.mark.parametrize("size", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5, 6)), 7])
@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_prompts_in_chunks_beside_decode_rows_say_what_each_says_alone(
    model: MLAForCausalLM, oracle: FromScratch, k: int, size: int
) -> None:
    runner = Runner(model, k, 5)
    serve(runner, [Request(prompt) for prompt in PROMPTS], size, 14)
    runner.check()
    for prompt, row_output in zip(PROMPTS, runner.row_output.values(), strict=True):
        text = [*prompt, *row_output.text()]
        assert k == 0 or row_output.drafts[-1] == oracle.drafts(text, k)
        assert row_output.text() == oracle.continuation(list(prompt), len(row_output.text()))


@pytest.mark.long
@pytest.mark.parametrize("k", [0, 1, 3])
def test_sampled_and_penalised_rows_with_log_probabilities_say_what_each_says_alone(
    model: MLAForCausalLM, k: int
) -> None:
    for size in (2, 3, 7):
        runner = Runner(model, k, 4)
        serve(runner, [Request(*pair) for pair in zip(PROMPTS, SAMPLED, strict=True)], size, 14)
        runner.check()
        assert all(len(row_output.tokens) > 3 for row_output in runner.row_output.values())


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_prompt_of_as_many_tokens_as_a_decode_row_has_is_prefilled(
    model: MLAForCausalLM, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By state, not by shape."""
    runner = Runner(model, k, 2)
    runner.admit(0, Request(PROMPTS[1]))
    runner.run([(0, 0, 7)])
    runner.admit(1, Request(tuple(range(1, k + 2))))
    batches: list[MLABatch] = []
    forward = model.forward

    def spy(
        token_ids: Tensor, positions: Tensor, batch: MLABatch, aux_layers: tuple[int, ...]
    ) -> ForwardOutput:
        batches.append(batch)
        return forward(token_ids, positions, batch, aux_layers)

    monkeypatch.setattr(model, "forward", spy)
    runner.run([(1, 0, k + 1)])
    runner.run()
    (first, second) = batches
    assert first.prefill is not None and first.prefill.host_lens[0].tolist() == [k + 1] * 2
    assert [batch.decode.q_lens.tolist() for batch in batches] == [[k + 1, 0], [k + 1, k + 1]]
    assert second.prefill is None
    runner.check()


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_first_token_that_is_a_stop_id_or_the_last_ends_its_row_at_once(
    model: MLAForCausalLM, k: int
) -> None:
    (first,) = alone(k, Request(PROMPTS[1])).tokens[0]
    runner = Runner(model, k, 4)
    runner.admit(0, Request(PROMPTS[0]))
    runner.run([(0, 0, 3)])
    runner.admit(1, Request(PROMPTS[1], stop_id=first))
    runner.admit(2, Request(PROMPTS[1], max_new_tokens=1))
    runner.admit(3, Request(PROMPTS[1], max_new_tokens=2))
    runner.run([(1, 0, 4), (2, 0, 7)])
    runner.run([(1, 4, 7), (3, 0, 7)])
    assert runner.state.active.tolist() == [True, False, False, True]
    for _ in range(3):
        runner.run()
    assert [row_output.text() for row_output in runner.row_output.values()][1:3] == [[first]] * 2
    assert len(runner.row_output[3].text()) == 2
    runner.check()


def test_what_a_row_held_before_it_began_is_never_accepted(model: MLAForCausalLM) -> None:
    """Its drafts agree with the target's tokens at positions that are not valid."""
    k = 3
    runner = Runner(model, k, 2)
    runner.admit(1, Request(PROMPTS[1]))
    chunks = runner.chunks([(1, 0, 7)])
    for j in range(k):
        runner.suspend(1) if j == 0 else runner.state.active.fill_(False)
        logits, _ = runner.decoder.verify(runner.state, chunks)
        targets = runner.decoder.choose_targets(runner.state, logits)
        runner.state.drafts[1, j] = targets[1, j]
    runner.state.active.fill_(False)
    runner.run([(1, 0, 7)])
    assert runner.state.report[1, FIRST_TOKEN:].tolist()[:k] == targets[1, :k].tolist(), (
        "else this tests nothing"
    )
    assert len(runner.row_output[1].text()) == 1
    runner.run()
    runner.check()


def test_a_middle_chunk_and_an_inactive_row_change_no_state(model: MLAForCausalLM) -> None:
    runner = Runner(model, 3, 3)
    for row in (0, 1):
        runner.admit(row, Request(PROMPTS[row]))
    runner.suspend(2)
    runner.run([(0, 0, 3)])
    before = {name: tensor.clone() for name, tensor in runner.state.named().items()}
    runner.run([(1, 0, 5)])
    for name in set(before) - {"report", "drafts"}:
        assert torch.equal(runner.state.named()[name][1:], before[name][1:]), name
    assert runner.state.report[1:, :2].tolist() == [[0, 0]] * 2


def test_nothing_is_written_but_positions_of_the_rows_that_run(model: MLAForCausalLM) -> None:
    k = 3
    runner = Runner(model, k, 4)
    serve(runner, [Request(prompt, max_new_tokens=4) for prompt in PROMPTS[:3]], 3, 14)
    assert not runner.state.active.any()
    last = [len(prompt) + 3 for prompt in PROMPTS[:3]] + [0]
    for layer in caches_of(model):
        assert layer is not None
        written = layer.flatten(0, 1).isfinite().all(-1)
        assert not written[:PAGE].any(), "page 0 belongs to no row"
        for row, end in enumerate(last):
            slots = runner.state.block_table[row].long()[:, None] * PAGE + torch.arange(PAGE)
            assert not written[slots.view(-1)[end:]].any() or end == 0
        own = torch.zeros_like(written)
        own[PAGE : PAGE * (1 + 3 * MAX_PAGES)] = True
        assert not written[~own].any(), "row 3 never ran"


@pytest.mark.long
@pytest.mark.parametrize("k", [0, 3])
def test_a_preempted_row_prefills_what_it_has_said_and_goes_on_as_if_nothing_had_been(
    model: MLAForCausalLM, k: int
) -> None:
    for sampling in SAMPLED:
        runner = Runner(model, k, 2)
        runner.admit(0, Request(PROMPTS[1], sampling))
        runner.admit(1, Request(PROMPTS[0]))
        runner.run([(0, 0, 7), (1, 0, 3)])
        for _ in range(3):
            runner.run()
        text = runner.row_output[0].text()
        runner.suspend(0)
        poison_pages(runner, 0)
        everything = (*PROMPTS[1], *text)
        for chunk in ((0, 4), (4, len(everything))):
            chunks = PackedChunks.pack([PromptChunk(0, everything, *chunk)], runner.state, page_size=PAGE)
            runner.mixed(runner.state, chunks)
            assert runner.state.report[0, 0] == (chunk[1] == len(everything))
        text.append(int(runner.state.last_token[0]))
        while runner.state.active[0]:
            runner.step(runner.state)
            count = int(runner.state.report[0, 0])
            text += runner.state.report[0, FIRST_TOKEN : FIRST_TOKEN + count].tolist()
        assert text == alone(k, Request(PROMPTS[1], sampling)).text()


def poison_pages(runner: Runner, row: int) -> None:
    for layer in caches_of(runner.model):
        assert layer is not None
        layer[runner.state.block_table[row].long()] = torch.nan


def test_padding_changes_nothing(model: MLAForCausalLM) -> None:
    runner = Runner(model, 3, 2)
    for row in (0, 1):
        runner.admit(row, Request(PROMPTS[row]))
        chunks = [(row, 0, 2), (row, 2, len(PROMPTS[row]))]
        assert runner.chunks(chunks[1:], pad=True).token_ids.shape == (16,)
        for chunk in chunks:
            runner.run([chunk], pad=True)
    runner.run()
    runner.check()
    for layer in caches_of(model):
        assert layer is not None and layer[0].isnan().all(), "page 0 belongs to no row"


def test_tokens_may_be_chosen_between_the_halves_of_a_mixed_step(model: MLAForCausalLM) -> None:
    """As a grammar does: each row is held to its own tokens, whatever precedes it in the batch."""
    runner = Runner(model, 3, 3)
    for row in (0, 1):
        runner.admit(row, Request(PROMPTS[row]))
    runner.run([(0, 0, 3)])
    allowed = torch.ones(3, 4, VOCAB, dtype=torch.bool)
    allowed[1] = False
    allowed[1, :, 17] = True
    chunks = runner.chunks([(1, 0, 7)])
    logits, output = runner.decoder.verify(runner.state, chunks)
    targets = runner.decoder.choose_targets(runner.state, logits, allowed)
    runner.decoder.advance(runner.state, targets, output, chunks.begins)
    assert runner.state.last_token[1] == 17
    runner.note([True, True, False])
    row_output = runner.row_output.pop(1)
    assert (row_output.tokens, runner.requests.pop(1).prompt) == ([[17]], PROMPTS[1])
    assert row_output.drafts[0] == FromScratch(one_layer_model()).drafts([*PROMPTS[1], 17], 3)
    runner.check()


@st.composite
def mixes(draw: st.DrawFn) -> tuple[int, list[Request], list[list[Part]]]:
    """k, requests of rows of their own, and the chunks of each call, in which prompts come in any pieces."""
    k = draw(st.sampled_from([0, 1, 2, 3]))
    token = st.integers(0, VOCAB - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=9), min_size=1, max_size=4))
    requests = [
        Request(
            tuple(prompt),
            draw(st.sampled_from(SAMPLED)),
            draw(st.sampled_from([1, 2, 5, ROOM])),
            draw(st.sampled_from([-1, 3])),
        )
        for prompt in prompts
    ]
    done = [0] * len(requests)
    calls: list[list[Part]] = []
    while any(n < len(request.prompt) for n, request in zip(done, requests, strict=True)):
        call: list[Part] = []
        for row in draw(st.permutations(range(len(requests)))):
            rest = len(requests[row].prompt) - done[row]
            size = draw(st.integers(0, rest))
            if size:
                call.append((row, done[row], done[row] + size))
                done[row] += size
        calls.append(call)
        if len(calls) > 12:
            calls.append([(row, n, len(requests[row].prompt)) for row, n in enumerate(done)])
            calls[-1] = [part for part in calls[-1] if part[1] < part[2]]
            break
    return k, requests, calls


@pytest.mark.long
@settings(max_examples=20)
@given(mixes())
def test_any_mix_of_chunks_and_decode_rows_says_what_each_row_says_alone(
    mix: tuple[int, list[Request], list[list[Part]]],
) -> None:
    k, requests, calls = mix
    runner = Runner(one_layer_model(), k, len(requests) + 1)
    for row, request in enumerate(requests):
        runner.admit(row, request)
    for call in [*calls, [], []]:
        runner.run(call)
    runner.check()


class NoWait(NoHostSync):
    """Lets checks and our ops read the chunks' lengths, which are on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if func.namespace == "mla_compile" or devices == {"cpu"}:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("k", [0, 3])
def test_a_mixed_step_never_waits_for_the_device(k: int) -> None:
    """On meta tensors, which have no values to read."""
    model = one_layer_model().to("meta")
    allocate(model.cache_specs(), 9, PAGE)
    state = DecodeState.allocate(4, k, max_pages=2, device="meta")
    host = DecodeState.allocate(4, k, max_pages=2)
    chunks = PackedChunks.pack([PromptChunk(1, [1, 2, 3], 0, 3)], host, page_size=PAGE)

    def meta(holder: Any) -> Any:
        moved = {
            name: x.to("meta")
            for name, x in vars(holder).items()
            if isinstance(x, Tensor) and name != "host_lens"
        }
        return replace(holder, **moved)

    chunks = meta(chunks)
    with NoWait():
        SpeculativeDecoder(model, k, page_size=PAGE, sampled=True)(state, chunks)


def test_chunks_of_padding_have_no_row_and_no_keys() -> None:
    """Recurrent layers find a row's state by its pages, a chunk of padding's too."""
    state = DecodeState.allocate(2, 0, max_pages=MAX_PAGES)
    state.block_table.copy_(torch.arange(1, 1 + state.block_table.numel()).view_as(state.block_table))
    packed = PackedChunks.pack([PromptChunk(1, [1, 2, 3], 2, 3)], state, page_size=PAGE, pad=True)
    segment = packed.chunks(state).segment
    assert segment.host_lens.tolist() == [[1, 3], [15, 15], [0, 0], [0, 0]]
    assert segment.block_table[0].equal(state.block_table[1]) and not segment.block_table[1:].any()
    assert (segment.slot_mapping >= 0).tolist() == [True] + [False] * 15
    assert segment.cu_seqlens_k.tolist() == [[0, 3, 3, 3, 3]]


def test_chunks_of_the_same_sizes_are_kept_in_the_same_place() -> None:
    state, kept = DecodeState.allocate(2, 0, max_pages=MAX_PAGES), {}
    state.block_table.fill_(1)
    first, second = (
        PackedChunks.pack(
            [PromptChunk(row, list(range(20)), 4, stop)], state, page_size=PAGE, pad=True, kept=kept
        )
        for row, stop in ((0, 9), (1, 20))
    )
    assert first is second and len(kept) == 1
    fresh = PackedChunks.pack([PromptChunk(1, list(range(20)), 4, 20)], state, page_size=PAGE, pad=True)
    for name, mine in vars(fresh).items():
        if name != "room" and isinstance(mine, Tensor):
            assert mine.equal(getattr(second, name)), name


def test_what_the_host_sends_lies_side_by_side_and_no_tensor_is_a_view() -> None:
    """One copy to the device fills all of it; a view would be compiled with what it is a view of."""
    state = DecodeState.allocate(3, 0, max_pages=MAX_PAGES)
    packed = PackedChunks.pack([PromptChunk(1, [1, 2, 3], 0, 3)], state, page_size=PAGE)
    sent = packed.sent
    given = (
        packed.token_ids,
        packed.next_token_ids,
        packed.last_of_row,
        packed.rows,
        packed.lens,
        packed.bounds,
    )
    assert [list(tensor.shape) for tensor in given] == [[3], [3], [3], [1], [1, 2], [1, 2]]
    for tensor, place in zip(given, packed.places, strict=True):
        assert tensor._base is None and tensor.storage_offset() == 0 and tensor.is_contiguous()
        assert tensor.data_ptr() == sent.data_ptr() + 8 * place and tensor.data_ptr() % 16 == 0
        assert tensor.untyped_storage().nbytes() == 8 * tensor.numel()
        assert tensor.equal(sent[place : place + tensor.numel()].view(tensor.shape))


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
@pytest.mark.parametrize("k", [*(pytest.param(k, marks=pytest.mark.slow) for k in (0, 3)), 1])
def test_one_compiled_mixed_step_serves_every_number_of_rows_chunks_and_tokens(
    model: MLAForCausalLM, k: int
) -> None:
    torch._dynamo.utils.counters.clear()
    compiled = None
    for rows, size in ((3, 2), (1, 1), (5, 4)):
        runner = Runner(model, k, rows)
        if compiled is None:
            decoder = runner.decoder
            mixed = with_own_code(decoder.forward)
            compiled = torch.compile(mixed, backend="mla", mode="reduce-overhead", fullgraph=True)
        runner.mixed = compiled
        requests = [Request(*pair) for pair in zip(PROMPTS, SAMPLED, strict=True)]
        serve(runner, requests[:rows], size, 10)
        runner.check(tolerance=1e-5)  # rotary angles are float32
    assert compile_counters()["graphs"] == 1


@pytest.mark.slow
def test_each_half_of_a_mixed_step_compiles_by_itself(model: MLAForCausalLM) -> None:
    """For tokens that are chosen on the host."""
    torch._dynamo.utils.counters.clear()
    runner = Runner(model, 3, 3)
    decoder = runner.decoder
    verify, advance = (
        torch.compile(with_own_code(half), backend="mla", fullgraph=True)
        for half in (decoder.verify, decoder.advance)
    )

    def mixed(state: DecodeState, chunks: PackedChunks) -> None:
        logits, output = verify(state, chunks)
        targets = decoder.choose_targets(state, logits)
        begins = chunks.begins
        for tensor in (targets, output.hidden, begins):
            mark_varying(tensor)
        advance(state, targets, output, begins)

    runner.mixed = mixed
    serve(runner, [Request(prompt) for prompt in PROMPTS[:3]], 2, 8)
    runner.check(tolerance=1e-5)
    assert compile_counters()["graphs"] == 2


@pytest.mark.long
@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_mixed_steps_graph_has_one_forward_and_one_gather(model: MLAForCausalLM, k: int) -> None:
    runner = Runner(model, k, 2)
    runner.admit(0, Request(PROMPTS[0]))

    class Mixed(nn.Module):
        def forward(self, state: DecodeState, chunks: PackedChunks) -> None:
            runner.decoder(state, chunks)

    found = capture_graph(Mixed(), (runner.state, runner.chunks([(0, 0, 2)])), {})
    assert found is not None
    hidden = model.arch.hidden_size
    logits = [n for n in nodes_of(found[0], "linear") if shape(n)[-1] == VOCAB]
    gathers = [n for n in nodes_of(found[0], "index_select") if shape(n)[1:] == (hidden,)]
    assert len(logits) == 1 + k, "of verification, then of each draft"
    of_all = [n for n in gathers if "+" in str(shape(n.all_input_nodes[0])[0])]
    assert len(of_all) == 1, "k + 1 tokens a row of all that were run"
    assert logits[0].all_input_nodes[0] is of_all[0]

    graph = pipeline.run(*found)
    live = live_nodes(graph.graph)
    ops = Counter(op_name(node) for node in live if node.op == "call_function")
    layers = len(model.layers)
    # Verification's; the chunks' latents for the drafter; its own pass and those of further drafts.
    assert ops["mla_append"] == layers + (1 + k if k else 0)
    assert ops["mla_decode"] == layers + k
    assert ops["mla_prefill"] == layers, "the drafter's outputs for a prompt are unused"


@pytest.mark.long
def test_torch_can_compare_the_strides_of_all_that_a_mixed_step_is_given(model: MLAForCausalLM) -> None:
    """As torch 2.11 does with a CUDA graph's inputs; what it cannot compare is an error."""
    compared = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        know_least_sizes(example_inputs)
        for node in gm.graph.find_nodes(op="placeholder"):
            value = node.meta["example_value"]
            if isinstance(value, Tensor):
                assert not any(stride == 0 for stride in value.stride())
                compared.append(sorted(value.stride()))
        return gm.forward

    runner = Runner(model, 1, 2)
    runner.mixed = torch.compile(with_own_code(runner.decoder.forward), backend=backend, fullgraph=True)
    runner.admit(0, Request(PROMPTS[0]))
    runner.run([(0, 0, 2)])
    assert any(len(strides) == 2 and "u" in str(strides) for strides in compared), "bounds among them"
