"""Which bucket serves a batch and which are captured within a budget, with a stand-in for torch's CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import groupby, islice, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mla_compile import MLAError, SamplingParams
from mla_compile.engine import Bucket, CaptureReport, Engine, rows, steps
from mla_compile.engine.buckets import row_sizes
from mla_compile.engine.capture import MAX_KEYS, Captures, Recording
from mla_compile.engine.config import FittedConfig
from mla_compile.models import MLAForCausalLM
from mla_compile.ops.attention.segments import chunk_lens_and_bounds
from mla_compile.packing import fitting_prompt_tokens, padded_prompt_tokens, prompt_padding, prompt_sizes
from mla_compile.speculate import DecodeState, PackedChunks, SpeculativeDecoder
from mla_compile.torch_internals import CompiledCall, compiled_calls, noted, would_repeat
from stress.faults import OpFault
from tests.counters import compile_counters
from tests.engine.engine_traces import check_invariants
from tests.engine.engines import engine, with_new_caches
from tests.engine.replays import Replay, recording
from tests.models_for_tests import caches_of, one_layer_model

K = 3
PROMPTS = [[1, 2, 3], [4, 5], [6]]


@cache
def state_of(rows: int) -> DecodeState:
    return DecodeState.allocate(rows, K, max_pages=1)


class Graphs:
    """A step, and a stand-in for its CUDA graphs: a smaller one fits in the memory pool of a larger one."""

    def __init__(self, cost: int, *, refused: bool = False) -> None:
        self.cost, self.refused = cost, refused
        self.recorded: set[int] = set()
        self.num_replays = 0
        self.code = noted(lambda *inputs: "ran")

    def step(self, state: DecodeState) -> object:
        return self.code(state.active)

    def replay(self) -> None:
        self.num_replays += 1

    def record(self, captures: Captures, step: Callable[..., Any], args: tuple[Any, ...]) -> Recording:
        if self.refused:
            raise RuntimeError("operation not permitted when stream is capturing\nSee the documentation.")
        with compiled_calls() as calls:
            step(*args)
        before, rows = max(self.recorded, default=0), len(args[0].active)
        self.recorded.add(rows)
        num_bytes = self.cost * (1 + max(0, rows - before))
        return Recording(cast("torch.cuda.CUDAGraph", self), args, "replayed", calls, num_bytes)

    @contextmanager
    def instead_of_torch(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Captures, "record", lambda captures, *args: self.record(captures, *args))
            patch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("the host waits"))
            yield


def captures_of(max_rows: int, budget: int | None, why_not: str | None = None) -> Captures:
    device = torch.device("cuda")
    config = SimpleNamespace(
        max_rows=max_rows, num_speculative_tokens=K, capture_budget=budget, captured_prompt_tokens=4096
    )
    return Captures(cast("FittedConfig", config), device, why_not)


def test_steps_of_many_prompt_tokens_or_keys_are_not_recorded() -> None:
    captures = captures_of(4, budget=None)
    reasons = [
        captures.why_not_recorded(captures.bucket("step", (1, *shape)))
        for shape in ((4096, 1, 0), (4097, 1, 0), (16, 1, MAX_KEYS + 1))
    ]
    assert (
        reasons[0] is None and "4,096 prompt tokens" in str(reasons[1]) and "32,768 keys" in str(reasons[2])
    )


def test_row_sizes_double_up_to_the_most_rows() -> None:
    assert row_sizes(1) == [1]
    assert row_sizes(8) == [1, 2, 4, 8]
    assert row_sizes(11) == [1, 2, 4, 8, 11]


@given(
    max_rows=st.integers(1, 20),
    budget=st.none() | st.integers(0, 60),
    batches=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), max_size=20),
)
def test_any_batches_are_served_and_nothing_is_recorded_beyond_the_budget(
    max_rows: int, budget: int | None, batches: list[tuple[int, int]]
) -> None:
    """batches: numbers of rows and of steps."""
    graphs, captures = Graphs(cost=1), captures_of(max_rows, budget)
    begun, uncaptured = set[int](), set[int]()
    with graphs.instead_of_torch():
        step = captures.measured("greedy", graphs.step)
        for count, steps in batches:
            count = min(count, max_rows)
            before, recorded = captures.report(), set(graphs.recorded)
            spent = budget is not None and before.num_bytes >= budget
            rows = min(size for size in captures.sizes if size >= count)
            done = [step(state_of(rows)) for _ in range(steps)]
            life = ["ran", *["replayed"] * steps]
            if rows in recorded:
                life = life[1:]
            elif spent or rows in uncaptured:
                life = ["ran"] * steps
                uncaptured.add(rows)
            elif rows in begun:
                life = life[1:]
            else:
                begun.add(rows)
            assert done == life[:steps], "the last recording may pass the budget, none may begin beyond it"
    after = captures.report()
    assert {bucket.rows for bucket in after.buckets if bucket.is_captured} == graphs.recorded <= begun
    assert after.num_bytes == max(graphs.recorded, default=0) + len(graphs.recorded)
    assert all(bucket.q_len == K + 1 for bucket in after.buckets)


def test_steps_share_the_budget_and_do_not_replay_each_others_buckets() -> None:
    greedy, sampled = Graphs(cost=1), Graphs(cost=1)
    captures = captures_of(8, budget=1)
    for name, graphs, expected in (
        ("greedy", greedy, ["ran", "replayed", "replayed"]),
        ("sampled", sampled, ["ran"] * 3),
    ):
        with graphs.instead_of_torch():
            step = captures.measured(name, graphs.step)
            assert [step(state_of(8)) for _ in range(3)] == expected


def test_a_graph_is_replayed_until_it_is_to_be_checked_and_recorded_again_if_the_step_has_changed() -> None:
    graphs, captures = Graphs(cost=1), captures_of(4, None)
    other = DecodeState.allocate(4, K, max_pages=1)
    with graphs.instead_of_torch():
        step = captures.measured("greedy", graphs.step)
        assert [step(state_of(4)) for _ in range(3)] == ["ran", "replayed", "replayed"]
        assert step(other) == "ran", "the graph is of another state"
        assert graphs.num_replays == 2
        before = captures.report()
        captures.check_again()
        assert [step(state_of(4)) for _ in range(2)] == ["replayed"] * 2
        assert step(other) == "ran"
        assert captures.report() == before, "a check costs no more than a call"
        assert [step(state_of(2)) for _ in range(2)] == ["ran", "replayed"]
        captures.check_again()
        graphs.code = noted(lambda *inputs: "ran, changed")
        assert [step(state_of(4)) for _ in range(2)] == ["ran, changed", "replayed"]
        captures.check_again()
        assert [step(state_of(4)) for _ in range(2)] == ["replayed"] * 2
    assert graphs.num_replays == 8


def test_a_replay_copies_the_tensors_of_a_call_and_no_state() -> None:
    graphs, state = Graphs(cost=1), state_of(2)
    own = torch.zeros(2, 4)
    recording = Recording(cast("torch.cuda.CUDAGraph", graphs), (state, own), own, [], 0)
    given = torch.randn(2, 4)
    assert recording.serves((state, given)) and not recording.serves((state_of(4), given))
    assert recording.replay((state, given)) is own
    assert torch.equal(own, given) and graphs.num_replays == 1


def test_a_check_runs_no_compiled_code_and_sees_other_states_weights_and_guards() -> None:
    model = one_layer_model(torch.float32)
    with_new_caches(engine(0, model), 5)
    decoder = SpeculativeDecoder(model, 0, page_size=4)
    state, other = (DecodeState.allocate(2, 0, max_pages=2) for _ in range(2))
    verify = torch.compile(decoder.verify, backend="mla", fullgraph=True)
    verify(state)

    def recorded() -> list[CompiledCall]:
        with compiled_calls() as found:
            verify(state)
        return found

    first = recorded()
    ((_, addresses, _),) = first
    weights = (*model.layers.parameters(), model.embed_tokens.weight, model.lm_head.weight)
    given = (*weights, caches_of(model)[0], state.num_cached, state.block_table)
    assert {tensor.data_ptr() for tensor in given} <= set(addresses)
    for pages in caches_of(model):
        pages.fill_(torch.nan)
    state.active.fill_(True)
    assert would_repeat(first, verify, state)
    assert all(pages.isnan().all() for pages in caches_of(model)), "nothing has run"
    assert not would_repeat(first, verify, other), "it is another state"
    assert not would_repeat(first * 2, verify, state) and not would_repeat([], verify, state)
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert not would_repeat(first, verify, state), "the same code reads weights elsewhere"
    assert would_repeat(moved := recorded(), verify, state)
    assert moved[0].function is first[0].function
    for _ in range(3):
        before = recorded()
        kept = model.lm_head.weight  # so that the next one is elsewhere
        model.lm_head.weight = nn.Parameter(kept.clone(), requires_grad=False)
        assert not would_repeat(before, verify, state)
    model.norm.eps = 0.5
    assert not would_repeat(recorded_with_eps := recorded(), verify, other)
    model.norm.eps = 0.25
    assert not would_repeat(recorded_with_eps, verify, state), "other code would run"


def test_a_bucket_whose_call_failed_takes_nothing_of_the_budget() -> None:
    graphs, captures = Graphs(cost=1), captures_of(4, budget=1)

    def out_of_memory(state: DecodeState) -> None:
        raise MemoryError

    with graphs.instead_of_torch():
        with pytest.raises(MemoryError):
            captures.measured("greedy", out_of_memory)(state_of(4))
        sampled = captures.measured("sampled", graphs.step)
        assert [sampled(state_of(1)) for _ in range(2)] == ["ran", "replayed"], "the budget is spent"


def test_a_step_that_cannot_be_recorded_runs_uncaptured_and_is_reported_so() -> None:
    graphs, captures = Graphs(cost=1, refused=True), captures_of(4, None)
    with graphs.instead_of_torch():
        step = captures.measured("greedy", graphs.step)
        assert step(state_of(4)) == "ran"
        assert "recorded on its next call" in captures.report().buckets[0].outcome
        assert [step(state_of(4)) for _ in range(3)] == ["ran"] * 3
    expected = "uncaptured: torch recorded no graph: operation not permitted when stream is capturing"
    assert captures.report().buckets[0].outcome == expected


def test_without_cuda_graphs_a_step_is_called_as_it_is() -> None:
    captures = captures_of(4, 0, why_not="the device is cpu")
    step = captures.measured("greedy", lambda state, *more: (state, *more))
    for _ in range(3):
        assert step(state_of(4), "hidden") == (state_of(4), "hidden")
    (bucket,) = captures.report().buckets
    assert bucket.outcome == "uncaptured: the device is cpu"
    assert (bucket.num_bytes, bucket.capture_seconds) == (0, 0)


def test_the_report_reads_as_a_table() -> None:
    buckets = [
        Bucket(
            "greedy", 8, 4, is_captured=True, num_bytes=6 << 20, compile_seconds=31.5, capture_seconds=0.0421
        ),
        Bucket("greedy", 4, 4, why_not="the budget is spent"),
        Bucket("mixed, greedy", 8, 4, 640, 2, 1152, why_not="the budget is spent"),
    ]
    assert str(CaptureReport(buckets, 1 << 20, None)).splitlines() == [
        "step               rows  q_len  prompt  chunks    keys  compile s  capture s       MiB  outcome",
        "greedy                8      4       0       0       0      31.50      0.042       6.0  captured",
        "greedy                4      4       0       0       0       0.00      0.000       0.0  "
        "uncaptured: the budget is spent",
        "mixed, greedy         8      4     640       2    1152       0.00      0.000       0.0  "
        "uncaptured: the budget is spent",
        "total                                                       31.50      0.042       6.0  "
        "1 of 3 captured, budget 1.0 MiB",
    ]


@pytest.fixture
def recorded() -> Iterator[tuple[MLAForCausalLM, list[Replay]]]:
    """A model whose engines record, and what they have recorded."""
    model = one_layer_model(torch.float32)
    with recording(model) as replays:
        yield model, replays


@pytest.mark.long
@pytest.mark.usefixtures("lowering")
def test_requests_of_every_kind_have_their_own_tokens_on_replayed_steps(
    recorded: tuple[MLAForCausalLM, list[Replay]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside prompts and without them, on graphs of whole steps and of parts, before and after weights move."""
    model, replays = recorded
    monkeypatch.setattr(steps, "EAGER_MIXED_STEPS", 4)
    settings = {"max_rows": 4, "max_tokens_per_step": 48, "max_model_len": 256}
    kinds = [{}, {"temperature": 1.0}, {"logprobs": 3}, {"repetition_penalty": 1.3}]
    prompts = [
        [1 + (7 * i + j) % 20 for j in range(length)] for i, length in enumerate((3, 90, 4, 17, 1, 40))
    ]

    def texts(of: Engine) -> list[list[int]]:
        requests = []
        for i, prompt in enumerate(prompts):
            requests.append(of.add(prompt, SamplingParams(**kinds[i % 4], seed=i), max_new_tokens=20))
            of.step()
        while of.has_work():
            of.step()
        return [request.completion.token_ids for request in requests]

    plain = engine(0, one_layer_model(torch.float32), **settings)
    mine = engine(2, model, compile=True, **settings)
    for _ in range(3):
        expected = texts(plain)
        before = len(replays)
        assert [texts(mine) for _ in range(2)] == [expected] * 2
        assert len(replays) > before
        for each in (plain, mine):
            for parameter in each.model.parameters():
                parameter.data = parameter.data * 0.9
            each.reset_prefix_cache()
    mine.add(prompts[1], max_new_tokens=40)
    mine.step()
    for each in (plain, mine):  # while a request runs
        each.model.norm.weight = nn.Parameter(each.model.norm.weight * 1.5, requires_grad=False)
    (expected,) = plain.generate(prompts[5:], max_new_tokens=20)
    request = mine.add(prompts[5], max_new_tokens=20)
    while mine.has_work():
        mine.step()
    assert request.completion.token_ids == expected.token_ids
    steps_captured = {bucket.step for bucket in mine.capture_report().buckets if bucket.is_captured}
    assert {"sampled", "mixed, sampled", "verify", "advance, sampled"} <= steps_captured


@pytest.mark.parametrize("place", ["record", "warm_up"])
@pytest.mark.parametrize("n", [1, 20, 60])
def test_memory_that_a_recording_lacks_ends_no_request(n: int, place: str) -> None:
    """Nor does memory that the warm-up lacks, whose caller gets the error."""
    model, fault = one_layer_model(torch.float64), OpFault(n, torch.OutOfMemoryError("no memory"))
    inside = fault.armed if place == "record" else nullcontext
    with (
        torch.compiler.set_stance("force_eager"),
        recording(model, inside=inside, eagerly=True) as replays,
    ):
        mine = engine(1, model, compile=True, max_rows=2)
        expected = [c.token_ids for c in engine(0, one_layer_model()).generate(PROMPTS, max_new_tokens=9)]
        if place == "warm_up":
            with pytest.raises(torch.OutOfMemoryError, match="no memory"), fault.armed():
                mine.warm_up()
        found = mine.generate(PROMPTS, max_new_tokens=9)
        (alone,) = mine.generate(PROMPTS[:1], max_new_tokens=9)
    assert fault.where is not None and replays
    assert [each.token_ids for each in (*found, alone)] == [*expected, expected[0]] and not any(
        each.error for each in found
    )
    check_invariants(mine)
    outcomes = [bucket.outcome for bucket in mine.capture_report().buckets]
    assert outcomes.count("uncaptured: torch recorded no graph: no memory") == (place == "record"), outcomes
    assert "captured" in outcomes


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_warming_up_reads_and_writes_no_page(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor needs it more pages than there are: two here, for 8 rows of 16."""
    allocate, allocated = DecodeState.allocate, []

    def watched(rows: int, *args: object, **sizes: object) -> DecodeState:
        allocated.append(rows)
        return allocate(rows, *args, **sizes)

    monkeypatch.setattr(DecodeState, "allocate", watched)
    mine = engine(K, max_rows=8)
    sampling = SamplingParams(temperature=temperature, seed=1)
    expected = mine.generate([[1, 2, 3]] * 3, max_new_tokens=20, sampling=sampling)
    report = with_new_caches(mine, 2).warm_up(sampling=sampling)
    assert report.why_not == "compile=False"
    assert all(cache.isnan().all() for cache in caches_of(mine.model))
    assert allocated == [8], "the other states are in its memory"
    with_new_caches(mine, mine.config.num_pages)
    assert mine.generate([[1, 2, 3]] * 3, max_new_tokens=20, sampling=sampling) == expected


@pytest.mark.parametrize("k", [0, K])
def test_states_of_all_sizes_and_kinds_share_memory(k: int) -> None:
    states = engine(k, max_rows=6)._launcher.steps.state_for
    sizes = [(count, sampled) for count in (2, 1, 6, 4) for sampled in (True, False)]
    greedy, most = states(6, sampled=False).named(), states(6, sampled=True).named()
    for count, sampled in sizes:
        for name, tensor in states(count, sampled=sampled).named().items():
            whole = greedy.get(name, most[name])
            assert (tensor.shape, tensor.stride()) == (whole[:count].shape, whole.stride()), name
            assert tensor.data_ptr() == whole.data_ptr() and not tensor._is_view(), name
    states(2, sampled=True).active[1] = True
    assert states(4, sampled=False).active.tolist() == [False, True, False, False]


def test_requests_move_only_to_a_smaller_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep their rows in larger states, and in one of the other kind."""
    move, moved = rows._move_rows, []

    def noted(state: DecodeState, places: list[int]) -> None:
        moved.append(places)
        move(state, places)

    prompts = [[i + 1, i + 2] for i in range(8)]
    kinds = [SamplingParams(temperature=float(i == 5), seed=i) for i in range(8)]
    lengths = [30 if i in (2, 6) else 9 for i in range(8)]
    expected = []
    for prompt, kind, length in zip(prompts, kinds, lengths, strict=True):
        expected += engine(0).generate([prompt], sampling=kind, max_new_tokens=length)
    monkeypatch.setattr(rows, "_move_rows", noted)
    mine, requests, sizes = engine(0, max_rows=8), [], []
    arrivals = zip(prompts, kinds, lengths, strict=True)
    while mine.has_work() or len(requests) < len(prompts):
        for prompt, kind, length in islice(arrivals, 1):
            requests.append(mine.add(prompt, kind, max_new_tokens=length))
        mine.step()
        check_invariants(mine)
        state = mine._launcher.rows.state
        assert state is not None
        sizes.append(len(state.active))
    assert [request.completion.token_ids for request in requests] == [each.token_ids for each in expected]
    assert [size for size, _ in groupby(sizes)] == [1, 2, 4, 8, 2]
    assert moved == [[], [2, 6]], "the engine was idle, then six of eight had ended"


@pytest.mark.parametrize(("budget", "longest"), [(None, 8192), (2**40, 4096)])
@pytest.mark.parametrize("k", [0, K])
def test_prompts_beside_few_rows_run_on_one_number_of_rows(k: int, budget: int | None, longest: int) -> None:
    with recording(one_layer_model(), eagerly=True):
        mine = engine(k, compile=True, max_rows=100, max_tokens_per_step=9000, capture_budget=budget)
        steps = mine._launcher.steps
        few = steps.mixed_state(3, 1000, sampled=False)
        assert few is steps.state_for(3, sampled=False), "prompts run eagerly so far"
        steps.warms_prompts = True
        for tokens in prompt_sizes(mine.config.prompt_tokens_per_step):
            affordable = [size for size in steps.sizes if size * (1 + k) * 8 <= tokens <= longest]
            for count in steps.sizes:
                state = steps.mixed_state(count, tokens - 1, sampled=True)
                assert state is steps.state_for(max(count, *affordable, 1), sampled=True)
        found = [
            len(steps.mixed_state(3, tokens, sampled=False).active) for tokens in (16, 300, 1000, longest + 1)
        ]
        assert found == ([4, 32, 100, 4] if k == 0 else [4, 8, 32, 4])


def test_a_step_with_prompts_has_more_rows_than_the_decode_steps_around_it() -> None:
    model = one_layer_model()
    with torch.compiler.set_stance("force_eager"), recording(model, eagerly=True):
        mine = engine(1, model, compile=True, max_rows=8, max_model_len=400, max_tokens_per_step=300)
        mine._launcher.steps.warms_prompts = True
        plain = engine(1, one_layer_model(), max_rows=8, max_model_len=400)
        prompts = [[1, 2, 3], [4, 5] * 32, [6] * 250]
        found = [mine.add(prompts[0], max_new_tokens=60)]
        for prompt in prompts[1:]:
            for _ in range(3):
                mine.step()
            found.append(mine.add(prompt, SamplingParams(logprobs=1), max_new_tokens=20))
        while mine.has_work():
            mine.step()
            check_invariants(mine)
    expected = [plain.generate([prompt], max_new_tokens=60)[0].token_ids for prompt in prompts]
    assert [each.completion.token_ids for each in found] == [expected[0], expected[1][:20], expected[2][:20]]
    buckets = [b for b in mine.capture_report().buckets if "advance" not in b.step]
    assert {(b.prompt_tokens, b.rows) for b in buckets if b.prompt_tokens} == {(16, 1), (64, 4), (256, 8)}
    assert max(b.rows for b in buckets if b.step == "verify") == 4, "decode steps keep their own states"


def test_prompts_are_padded_to_few_sizes() -> None:
    sizes = [padded_prompt_tokens(count) for count in range(1, 4097)]
    assert all(count <= size < count + max(16, count / 4) for count, size in enumerate(sizes, start=1))
    assert sorted(set(sizes[:256])) == [*range(16, 129, 16), 160, 192, 224, 256]
    assert all(len(set(sizes[n : 2 * n])) == 4 for n in (128, 256, 512, 1024, 2048))
    for most in range(1, 300):
        own = [padded_prompt_tokens(count, most) for count in range(1, 300)]
        assert all(max(count, 2) <= size <= sizes[count - 1] for count, size in enumerate(own, start=1))
        assert most < 2 or own[most - 1] == most, "as many as a full step has are not padded"


@pytest.mark.parametrize("most", [2, 10, 16, 100, 1000, 16_352])
def test_the_sizes_of_prompts_are_all_that_padding_gives(most: int) -> None:
    assert prompt_sizes(most) == sorted({padded_prompt_tokens(count, most) for count in range(1, most + 1)})


def test_prompts_that_no_graph_runs_are_padded_little() -> None:
    for count in range(1, 3000):
        size = padded_prompt_tokens(count, longest=1024)
        assert count <= size < count + 128 if count > 1024 else size == padded_prompt_tokens(count)
    sizes = sorted({padded_prompt_tokens(count, longest=1024) for count in range(1, 3000)})
    for room in range(16, 2900):
        assert fitting_prompt_tokens(room, 1024) == max(size for size in sizes if size <= room)


def test_long_steps_keep_no_tensors_and_share_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FittedConfig, "captured_prompt_tokens", 128)
    prompts = [[1 + i % 7] * length for i, length in enumerate((50, 300, 520, 640, 700, 900))]
    model, settings = one_layer_model(), {"max_rows": 1, "max_model_len": 1000, "max_tokens_per_step": 1000}
    expected = engine(1, one_layer_model(), **settings).generate(prompts, max_new_tokens=5)
    with torch.compiler.set_stance("force_eager"), recording(model, eagerly=True):
        mine = engine(1, model, compile=True, prefix_caching=False, **settings)
        mine._launcher.steps.warms_prompts = True
        found = mine.generate(prompts, max_new_tokens=5)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [sizes[0] for sizes in mine._launcher._chunks] == [64]
    buckets = {b.prompt_tokens: b.why_not for b in mine.capture_report().buckets if b.prompt_tokens}
    long = dict.fromkeys((384, 640, 768, 1024), "more than 128 prompt tokens")
    assert buckets == {64: None} | long


@pytest.mark.long
@pytest.mark.usefixtures("unlowered", "compiled_mixed_steps")
@pytest.mark.parametrize("lengths", [(200, 3), (3, 200)])
def test_long_and_short_steps_share_compiled_code(
    lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FittedConfig, "captured_prompt_tokens", 64)
    size = {"max_rows": 2, "max_model_len": 300, "max_tokens_per_step": 300}
    mine = engine(1, one_layer_model(torch.float32), compile=True, **size)
    mine._launcher.steps.warms_prompts = True
    counts = []
    for length in (*lengths, *lengths):
        mine.generate([[1 + length % 7] * length], max_new_tokens=3)
        counts.append(compile_counters()["graphs"])
    assert len(set(counts)) == 1


@pytest.mark.usefixtures("compiled_mixed_steps")
@pytest.mark.parametrize(("max_model_len", "after_keys"), [(64, []), (3000, [(16, 2048), (16, 4096)])])
def test_warming_up_runs_each_size_of_prompts_and_few_tokens_after_each_number_of_keys(
    max_model_len: int, after_keys: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more tokens than a row may have too, and writes to no page."""
    pack, sizes = PackedChunks.pack, []

    def noted(*args: Any, **kwargs: Any) -> PackedChunks:
        tokens, _, keys = pack(*args, **kwargs).sizes
        sizes.append((tokens, keys))
        return pack(*args, **kwargs)

    monkeypatch.setattr(PackedChunks, "pack", noted)
    mine = engine(K, max_rows=4, max_model_len=max_model_len, max_tokens_per_step=200)
    mine.warm_up()
    without = [(size, size) for size in prompt_sizes(mine.config.prompt_tokens_per_step)]
    few = [(size, 1024) for size in (16, 32, 48, 64)]
    largest_first = sorted([*without, *few, *after_keys], reverse=True)
    assert sizes == 2 * [(16, 16), *largest_first]  # for both kinds
    assert max(sizes)[0] > 64
    assert all(cache.isnan().all() for cache in caches_of(mine.model))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_warming_up_a_first_prompt_of_any_size_runs_on_a_graph(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and beside as many rows as leave the number of rows that its size has."""
    replay, replayed = Replay.replay, []

    def noted(self: Replay) -> None:
        replayed.append((len(self.args[0].active), *[each.sizes[0] for each in self.args[1:]]))
        replay(self)

    monkeypatch.setattr(Replay, "replay", noted)
    sampling, model = SamplingParams(temperature=temperature), one_layer_model()
    with torch.compiler.set_stance("force_eager"), recording(model, eagerly=True) as replays:
        mine = engine(
            1,
            model,
            compile=True,
            max_rows=8,
            max_model_len=400,
            max_tokens_per_step=316,
            prefix_caching=False,
        )
        report = mine.warm_up(sampling=sampling)
        sizes = prompt_sizes(mine.config.prompt_tokens_per_step)
        mixed = [bucket for bucket in report.buckets if bucket.prompt_tokens]
        assert all(bucket.is_captured for bucket in report.buckets)
        assert {bucket.prompt_tokens for bucket in mixed} == set(sizes) and len(mixed) == len(sizes)
        for least, size in pairwise([0, *sizes]):
            state = mine._launcher.steps.mixed_state(1, size, sampled=temperature > 0)
            for others in {0, len(state.active) - 1}:
                for length in (least + 1, size):
                    decoding = [mine.add([1], sampling, max_new_tokens=300) for _ in range(others)]
                    for _ in range(others):
                        mine.step()
                    before = len(replays), mine.capture_report()
                    request = mine.add([2] * length, sampling, max_new_tokens=4)
                    mine.step()
                    assert replayed[-1] == (len(state.active), size)
                    assert (len(replays), mine.capture_report()) == before
                    assert request.completion.token_ids and not any(each.has_ended for each in decoding)
                    for each in (request, *decoding):
                        mine.abort(each)
    assert len(state.active) == 8


@pytest.mark.parametrize("num_chunks", [1, 3, 4, 15, 16, 40])
def test_chunks_are_padded_to_few_numbers_of_chunks(num_chunks: int) -> None:
    for length in range(1, 64):
        lens, cached = [length] * num_chunks, [3] * num_chunks
        padded = prompt_padding(lens, cached, capacity=64, pad=True)
        sizes = {"num_tokens": padded["num_tokens"], "num_chunks": padded["num_chunks"]}
        rows, _ = chunk_lens_and_bounds(lens, cached, capacity=64, **sizes)
        assert len(rows) == padded["num_chunks"] in (4, 16, 64, 256)


@pytest.mark.long
@pytest.mark.usefixtures("unlowered", "compiled_mixed_steps")
@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_warming_up_prompts_beside_rows_that_decode_compile_nothing(k: int) -> None:
    """In one chunk or several, with rows to spare or none."""
    prompts = [[1, 2, 3], [4], [5] * 30, [6, 7], [8] * 12]
    model = one_layer_model(torch.float32)
    expected = engine(0, model).generate(prompts, max_new_tokens=12)
    mine = engine(k, model, compile=True, max_tokens_per_step=10)
    torch._dynamo.utils.counters.clear()
    mine.warm_up()
    assert compile_counters()["graphs"] == 4, (
        "the first part with prompts and without, the last with sampling and without"
    )
    assert all(cache.isnan().all() for cache in caches_of(model)), "the prompt of the warm-up wrote to a page"
    completions = mine.generate(prompts, max_new_tokens=12)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert mine.stats.num_mixed_steps > 3
    assert compile_counters()["graphs"] == 4, "nothing more was compiled"


@pytest.mark.long
@pytest.mark.usefixtures("unlowered", "compiled_mixed_steps")
def test_a_batch_compiles_one_step_and_a_stream_of_prompts_the_other_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mla_compile.engine.steps.EAGER_MIXED_STEPS", 3)
    prompts = [[1, 2, 3], [4] * 10, [5] * 20]
    model = one_layer_model(torch.float32)
    expected = [c.token_ids for c in engine(0, model).generate(prompts, max_new_tokens=12)]

    def graphs_of(mine: Engine) -> int:
        torch._dynamo.utils.counters.clear()
        found = mine.generate(prompts, max_new_tokens=12)
        assert [c.token_ids for c in found] == expected
        return compile_counters()["graphs"]

    mine = engine(0, model, compile=True, max_tokens_per_step=16, prefix_caching=False)
    mine.warm_up(prompts=False)
    assert graphs_of(mine) == 0
    exact = engine(0, model, compile=True, max_tokens_per_step=16, prefix_caching=False, batch_invariant=True)
    torch._dynamo.utils.counters.clear()
    exact.warm_up(prompts=False)
    assert compile_counters()["graphs"] == 7, (
        "three parts, and the choice of tokens, with grammars and without"
    )
    assert graphs_of(exact) == 1, "its steps with prompts are compiled from the first one on"
    mine = engine(0, model, compile=True, max_tokens_per_step=16, prefix_caching=False)
    assert graphs_of(mine) == 2 and 0 < mine.stats.num_mixed_steps <= 3
    assert graphs_of(mine) == 1 and mine.stats.num_mixed_steps > 3, "the step that has prompts in it"
    assert graphs_of(mine) == 0


def test_an_engine_does_not_warm_up_while_requests_are_under_way() -> None:
    mine = engine(0, max_rows=1)
    expected = mine.generate([[1]], max_new_tokens=20)
    stream = mine.stream([[1]], max_new_tokens=20)
    next(stream)
    with pytest.raises(MLAError, match="warm_up: expected an engine without requests, got 1 under way"):
        mine.warm_up()
    assert [*stream][-1] == expected
    mine.warm_up()
