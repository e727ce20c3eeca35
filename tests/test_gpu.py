"""On a CUDA device: the ops, and the step as a captured graph."""

import copy
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor

from mla_compile import (
    MLABatch,
    MLAError,
    SamplingParams,
    decode_segment,
    load_model,
    mla_attention,
    pack_batch,
    prefill_segment,
)
from mla_compile.caches import allocate
from mla_compile.defaults import DrafterName
from mla_compile.engine import Engine, capture, steps
from mla_compile.engine.text import SHIPPED_MODEL
from mla_compile.models import MLAForCausalLM
from mla_compile.ops.adjacent import lies_before
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.linear import matmul
from mla_compile.passes import pipeline
from mla_compile.passes.fuse_linear import fuse_linear
from tests.cases import Case, make_case, relative_error
from tests.counters import compile_counters
from tests.cuda_graphs import num_recorded
from tests.engine.engines import finish, texts
from tests.engine.test_grammar import grammar
from tests.models.small import randomize
from tests.models_for_tests import caches_of, poison_caches, tiny_config, tiny_model
from tests.reference import mla_attention_reference
from tests.shadow_streams import run_checked_streams
from tests.test_packing import KINDS

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams()
SPENT = "uncaptured: the budget is spent"
PARTS = 3
"""The compiled graphs of a step: `verify`, `choose_targets`, `advance`."""


def on_cuda(case: Case) -> tuple:
    def move(segment):
        if segment is None:
            return None
        tensors = {k: v.cuda() for k, v in vars(segment).items() if torch.is_tensor(v) and k != "host_lens"}
        return replace(segment, **tensors)

    batch = MLABatch(move(case.batch.decode), move(case.batch.prefill))
    return (*(x.cuda() for x in case.args()[:7]), batch, case.softmax_scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_mixed_batch_on_poisoned_pages_equals_the_definition(dtype: torch.dtype) -> None:
    case = make_case([5, 3, 8], [(5, 3), (2, 0)], q_len=4, q_lens=[4, 0, 2], dtype=dtype)
    expected = mla_attention_reference(*case.clone().args())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert relative_error(mla_attention(*on_cuda(case)).cpu(), expected) < tolerance


def test_a_mixed_step_of_a_users_own_is_one_cuda_graph() -> None:
    torch._dynamo.reset()
    before = num_recorded()
    eager, model = (tiny_model(torch.float64).cuda() for _ in range(2))
    for each in (eager, model):
        allocate(each.cache_specs(), num_pages=41, page_size=4)
    step = torch.compile(model, backend="mla", mode="reduce-overhead", fullgraph=True)
    tables = 1 + torch.randperm(40).int().view(4, 10).cuda()
    for decoded, prefilled in (([5, 3], [0, 0]), ([1, 20], [9, 2]), ([30, 8], [0, 31]), ([2, 2], [7, 0])):
        poison_caches(eager)  # and then the same latents in both, for all that rows see
        for cache in caches_of(eager):
            cache[tables.long().flatten()] = torch.randn_like(cache[1:])
        for mine, its in zip(caches_of(model), caches_of(eager), strict=True):
            mine.copy_(its)
        cached = torch.tensor(decoded, dtype=torch.int32, device="cuda")
        rows, positions = decode_segment(cached, tables[:2].clone(), q_len=3, page_size=4)
        chunks, chunk_positions = prefill_segment(
            [4, 2], prefilled, tables[2:].clone(), page_size=4, num_keys=64
        )
        tokens = torch.randint(0, 40, (12,), device="cuda")
        args = tokens, torch.cat([positions, chunk_positions]), MLABatch(rows, chunks)
        with torch.no_grad():
            assert (
                relative_error(step(*args).hidden.cpu(), eager(*args).hidden.cpu()) < 1e-6
            )  # rotary angles are float32
    assert num_recorded() - before == 1


def test_any_batches_of_a_users_own_module_make_three_graphs_and_few_recordings() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    before = num_recorded()
    exact, eager, model = (
        load_model(SHIPPED_MODEL, dtype=dtype, device="cuda")
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    for each in (exact, eager, model):
        allocate(each.cache_specs(), num_pages=41, page_size=64)
    compiled = torch.compile(model, backend="mla", mode="reduce-overhead", fullgraph=True)
    tables = 1 + torch.randperm(40).int().view(10, 4).cuda()
    sizes = set()
    errors: list[list[torch.Tensor]] = [[], []]
    for turn in range(3):  # a shape is warmed up, recorded and replayed
        for rows in KINDS:
            lens, cached, sampled = (list(column) for column in zip(*rows))
            cached = [min(200, held * (1 + 17 * turn)) for held in cached]
            ids = torch.randint(0, 512, (sum(lens),), device="cuda")
            packed = pack_batch(
                lens,
                cached,
                tables[: len(rows)],
                ids,
                has_sampled=sampled,
                page_size=64,
                num_speculative_tokens=2,
            )
            for cache, *others in zip(caches_of(eager), caches_of(model), caches_of(exact), strict=True):
                cache.normal_()
                for other in others:
                    other.copy_(cache)
            args = *packed.tensors, packed.positions, packed.batch
            with torch.no_grad():
                logits, *roundings = (
                    run(*args).hidden[packed.order].float() for run in (exact, eager, compiled)
                )
            for found, got in zip(errors, roundings, strict=True):  # of each token
                found.append((got - logits).norm(dim=-1) / logits.norm(dim=-1))
            prefill = packed.batch.prefill
            keys = None if prefill is None else (prefill.key_slots.shape, len(prefill.seq_lens))
            rows_decoding = None if packed.batch.decode is None else len(packed.batch.decode.seq_lens)
            sizes.add((rows_decoding, keys, len(args[0])))
    eagerly, captured = (torch.cat(found) for found in errors)
    assert captured.median() < 1.2 * eagerly.median(), "no more than bfloat16's own error"
    assert captured.max() < 2 * eagerly.max()
    assert compile_counters() == {"graphs": 3, "cudagraph_skips": 0}
    assert num_recorded() - before <= len(sizes)


def generate(engine: Engine, rows: int, params: SamplingParams, tokens: int) -> list[list[int]]:
    prompts = [[(7 * row + i) % 40 for i in range(1 + 3 * row)] for row in range(rows)]
    sampling = [replace(params, seed=params.seed + row) for row in range(rows)]
    out = engine.generate(prompts, max_new_tokens=tokens, sampling=sampling)
    return [c.token_ids for c in out]


@pytest.mark.usefixtures("eager_mixed_steps")
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=20, seed=5)], ids=str
)
@pytest.mark.parametrize(("drafter", "k"), [("mtp", 1), ("mtp", 2), ("mtp", 3), ("mtp", 5), ("ngram", 3)])
def test_captured_steps_give_the_tokens_of_eager_one_token_decoding(
    drafter: DrafterName, k: int, params: SamplingParams
) -> None:
    """Large -> small -> large buckets, padded ones, with NaN in every page, page 0 included, before each batch."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = {"max_rows": 8, "max_model_len": 256, "page_size": 4, "prefix_caching": False}
    captured = Engine(tiny_model(torch.float64).cuda(), num_speculative_tokens=k, drafter=drafter, **settings)
    plain = Engine(tiny_model(torch.float64).cuda(), num_speculative_tokens=0, compile=False, **settings)
    for rows in (8, 1, 3, 8):
        poison_caches(captured.model)
        assert generate(captured, rows, params, 200) == generate(plain, rows, params, 200), f"{rows} rows"
    assert compile_counters()["graphs"] == PARTS
    assert set(outcomes(captured).values()) == {"captured"}, captured.capture_report()


def fresh_engines(k: int, **settings: object) -> tuple[Engine, Engine]:
    """An engine that captures, with nothing recorded yet, and an eager one without drafts."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    sizes = {"max_rows": 8, "max_model_len": 256, "page_size": 4, "prefix_caching": False}
    captured = Engine(tiny_model(torch.float64).cuda(), num_speculative_tokens=k, **sizes, **settings)
    return captured, Engine(
        tiny_model(torch.float64).cuda(), num_speculative_tokens=0, compile=False, **sizes
    )


@pytest.mark.usefixtures("eager_mixed_steps")
def test_rows_may_have_any_numbers_of_drafts_without_another_recording() -> None:
    captured, plain = fresh_engines(3)
    report = captured.warm_up(sampling=GREEDY)
    assert outcomes(captured) == dict.fromkeys([8, 4, 2, 1], "captured"), report
    prompts = [[3 + row] * (1 + row) for row in range(8)]
    expected = [c.token_ids for c in plain.generate(prompts, max_new_tokens=100)]
    for rows in (8, 1, 3, 8):
        poison_caches(captured.model)
        requests = [captured.add(prompts[i], max_new_tokens=100, max_drafts=i % 5) for i in range(rows)]
        finish(captured)
        assert texts(requests) == expected[:rows], f"{rows} rows"
    assert compile_counters()["graphs"] == PARTS
    assert captured.capture_report() == report, "nothing was recorded again"


def outcomes(engine: Engine) -> dict[int, str]:
    buckets = engine.capture_report().buckets
    return {bucket.rows: bucket.outcome for bucket in buckets if not bucket.prompt_tokens}


@pytest.mark.usefixtures("eager_mixed_steps")
@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (0, dict.fromkeys([2, 8, 1, 4], SPENT)),
        (1, {2: "captured", 8: SPENT, 1: SPENT, 4: SPENT}),
        (None, dict.fromkeys([2, 8, 1, 4], "captured")),
    ],
    ids=["no recording", "one recording", "no limit"],
)
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=20, seed=5)], ids=str
)
def test_beyond_the_budget_batches_are_uncaptured_and_the_tokens_stay(
    params: SamplingParams, budget: int | None, expected: dict[int, str]
) -> None:
    captured, plain = fresh_engines(3, capture_budget=budget)
    for rows in (2, 8, 1, 3, 8, 2):
        poison_caches(captured.model)
        assert generate(captured, rows, params, 60) == generate(plain, rows, params, 60), f"{rows} rows"
    assert outcomes(captured) == expected, captured.capture_report()
    report = captured.capture_report()
    assert compile_counters()["graphs"] == PARTS, "what runs uncaptured is the same compiled code"
    assert (report.num_bytes > 0) == (report.capture_seconds > 0) == (budget != 0)
    assert report.compile_seconds > 0


@pytest.mark.usefixtures("eager_mixed_steps")
@pytest.mark.parametrize("budget", [None, 1])
def test_a_warmed_up_engine_records_nothing_more(budget: int | None) -> None:
    captured, plain = fresh_engines(3, capture_budget=budget)
    poison_caches(captured.model)
    report = captured.warm_up(sampling=GREEDY)
    others = "captured" if budget is None else SPENT
    assert outcomes(captured) == {8: "captured", 4: others, 2: others, 1: others}, report
    assert list(outcomes(captured)) == [8, 4, 2, 1], "largest first"
    assert all(cache.isnan().all() for cache in caches_of(captured.model)), "no page is written"
    for rows in (8, 1, 3, 8):
        assert generate(captured, rows, SamplingParams(), 40) == generate(plain, rows, SamplingParams(), 40)
    assert captured.capture_report() == report


def test_tokens_chosen_on_the_host_do_not_depend_on_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    # A byte for each recording, as small graphs fit in the memory of large ones.
    num_calls = count()
    monkeypatch.setattr(capture, "cuda_graph_usage", lambda *_: (next(num_calls), 0))

    def choose(logits: torch.Tensor, drafts: torch.Tensor, completions: object) -> torch.Tensor:
        return logits.argmax(dim=-1)

    captured, plain = fresh_engines(2, capture_budget=1)
    for rows in (2, 4, 1):
        prompts = [[1 + row] * 3 for row in range(rows)]
        *_, out = captured.stream(prompts, max_new_tokens=40, choose=choose)
        expected = plain.generate(prompts, max_new_tokens=40)
        assert [c.token_ids for c in out] == [c.token_ids for c in expected]
    captured_steps = [b.rows for b in captured.capture_report().buckets if b.outcome == "captured"]
    assert captured_steps == [2]
    assert all(b.outcome in ("captured", SPENT) for b in captured.capture_report().buckets)


def test_a_step_that_waits_for_the_device_runs_uncaptured_and_the_next_is_captured() -> None:
    captured, _ = fresh_engines(0)
    captures = captured._launcher.steps._captures  # private: no model's own step may wait
    state = captured._launcher.steps.state_for(2, sampled=False)
    waits = captures.measured("waits", lambda state: int(state.active.sum()))
    doubles = captures.measured("doubles", lambda state, x: x * 2)
    assert [waits(state) for _ in range(3)] == [0, 0, 0]
    assert torch.rand(2, device="cuda").isfinite().all(), "torch's generator is not in a recording"
    for number in range(4):
        x = torch.full((2,), number, device="cuda")
        assert doubles(state, x).tolist() == [2 * number] * 2
    stream = torch.cuda.current_stream()
    assert stream == torch.cuda.default_stream()
    first, second = captured.capture_report().buckets
    assert first.outcome.startswith("uncaptured: torch recorded no graph: ") and second.is_captured
    assert captured.generate([[1, 2, 3]] * 2, max_new_tokens=8)[0].error is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt("stopped")])
@pytest.mark.parametrize("when", ["before the step", "after it"])
def test_a_recording_that_fails_leaves_an_engine_that_serves_and_records(
    when: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, recorded = capture.Captures.record, 0

    def fails_once(self: capture.Captures, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        def failing(*own: Any) -> None:
            if when == "after it":
                step(*own)
            raise error

        nonlocal recorded
        recorded += 1
        return record(self, failing if recorded == 1 else step, args)

    captured, plain = fresh_engines(2)
    prompts = [[1, 2, 3], [4, 5]]
    expected = [each.token_ids for each in plain.generate(prompts, max_new_tokens=24)]
    monkeypatch.setattr(capture.Captures, "record", fails_once)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt, match="stopped"):
            captured.generate(prompts, max_new_tokens=24)
    for _ in range(2):
        found = captured.generate(prompts, max_new_tokens=24)
        (alone,) = captured.generate(prompts[:1], max_new_tokens=24)
        assert [each.token_ids for each in (*found, alone)] == [*expected, expected[0]]
    outcomes = [bucket.outcome for bucket in captured.capture_report().buckets]
    refused = "uncaptured: torch recorded no graph: no memory"
    assert outcomes.count(refused) == isinstance(error, RuntimeError) and "captured" in outcomes, outcomes
    assert torch.rand(2, device="cuda").isfinite().all(), "torch's generator is not in a recording"


@pytest.mark.usefixtures("compiled_mixed_steps")
def test_both_halves_of_a_mixed_step_whose_tokens_the_host_chooses_are_captured() -> None:
    def choose(logits: torch.Tensor, drafts: torch.Tensor, completions: object) -> torch.Tensor:
        return logits.argmax(dim=-1)

    captured, plain = fresh_engines(2, max_tokens_per_step=48)
    prompts = [[1 + (5 * row + j) % 20 for j in range(30)] for row in range(4)]
    expected = [c.token_ids for c in plain.generate(prompts, max_new_tokens=30)]
    for _ in range(3):
        poison_caches(captured.model)
        *_, out = captured.stream(prompts, max_new_tokens=30, choose=choose)
        assert [c.token_ids for c in out] == expected
    buckets = captured.capture_report().buckets
    mixed = [bucket for bucket in buckets if bucket.step == "mixed, verify"]
    assert mixed and all(bucket.is_captured and bucket.prompt_tokens for bucket in mixed)
    advance = [bucket for bucket in buckets if bucket.step.startswith("advance")]
    assert advance and all(bucket.is_captured for bucket in advance)


def test_after_warming_up_no_kind_of_request_compiles_anything_or_pauses_another() -> None:
    """The longest step takes no longer than 20 of them. Each size of prompts is captured before."""
    torch.compiler.reset()
    model, rng = tiny_model(torch.bfloat16).cuda(), random.Random(0)
    mine = Engine(model, num_speculative_tokens=2, max_rows=4, max_model_len=128)
    mine.warm_up()
    kinds = [
        {"logprobs": 20},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.2, "logprobs": 1},
        {"presence_penalty": 1.0, "temperature": 1.0},
        {"stop_token_ids": [*range(40)]},
        {},
    ]

    def ask(seed: int) -> None:
        params = SamplingParams(**rng.choice(kinds), seed=seed)
        prompt = [1 + rng.randrange(20) for _ in range(rng.randint(1, 40))]
        given = grammar("regex") if rng.random() < 0.2 else None
        mine.add(prompt, params, max_new_tokens=rng.randint(2, 40), stop_ids=[0], grammar=given)

    for seed in range(300):  # records the graphs of prompts
        ask(seed)
    while mine.has_work():
        mine.step()
    graphs, seconds = compile_counters()["graphs"], []
    for seed in range(200):
        ask(seed)
        for _ in range(rng.randint(1, 5)):
            begin = time.perf_counter()
            mine.step()
            seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    assert compile_counters()["graphs"] == graphs
    assert max(seconds) < 20 * statistics.median(seconds), f"{max(seconds):.4f} s"


@pytest.mark.usefixtures("compiled_mixed_steps")
def test_prompts_that_are_read_in_parts_run_uncaptured_and_the_tokens_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("ops.attention.segments", "packing", "engine.config", "engine.capture"):
        monkeypatch.setattr(f"mla_compile.{module}.MAX_KEYS", 64)
    captured, plain = fresh_engines(2, max_tokens_per_step=56)
    prompts = [[1 + (5 * row + j) % 20 for j in range(150)] for row in range(2)]
    expected = [c.token_ids for c in plain.generate(prompts, max_new_tokens=30)]
    for _ in range(3):
        poison_caches(captured.model)
        assert [c.token_ids for c in captured.generate(prompts, max_new_tokens=30)] == expected
    outcome = {b.prompt_keys > 64: b.outcome for b in captured.capture_report().buckets if b.prompt_tokens}
    assert outcome[False] == "captured" and outcome[True].startswith("uncaptured: more than 64 keys")


@pytest.mark.parametrize(("k", "dtype"), [(1, torch.float32), (3, torch.float64)], ids=str)
def test_thousands_of_captured_steps_do_what_eager_ones_do(k: int, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    run_checked_streams(tiny_model(dtype).cuda(), k, steps=2000, every=2)
    graphs = compile_counters()["graphs"]
    assert graphs == 2 * PARTS - 1, "greedy and sampled steps share one part; prompts come beside no row"


def test_weights_that_moved_between_streams_are_noticed() -> None:
    captured, plain = fresh_engines(1)
    for _ in range(2):
        assert generate(captured, 2, SamplingParams(), 40) == generate(plain, 2, SamplingParams(), 40)
        for engine in (captured, plain):
            for parameter in engine.model.parameters():
                parameter.data = parameter.data * 0.9  # at another address than in the recorded graph


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_captured_engine_multiplies_once_by_adjacent_weights(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, device="cuda")
    settings = {"max_rows": 4, "max_model_len": 128, "batch_invariant": batch_invariant}
    plain = [p for p in pipeline.PASSES if p is not fuse_linear]
    seen = []

    def noted(first: torch.Tensor, second: torch.Tensor) -> bool:
        found = lies_before(first, second)
        if not isinstance(first, FakeTensor):  # Inductor gives each its own storage
            seen.append(found)
        return found

    monkeypatch.setattr(matmul, "lies_before", noted)
    joined = generate(Engine(model, num_speculative_tokens=1, **settings), 4, GREEDY, 40)
    assert seen and all(seen)
    seen.clear()
    monkeypatch.setattr(pipeline, "PASSES", plain)
    torch.compiler.reset()
    assert joined == generate(Engine(model, num_speculative_tokens=1, **settings), 4, GREEDY, 40)
    assert not seen


def test_requests_that_come_and_go_have_the_tokens_that_they_have_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether steps with prompts run eagerly, as the first few do, or compiled.

    The third time nothing is compiled or recorded, and the host must not wait for the device.
    """
    replay, has_prompts = capture.Recording.replay, set()

    def noted(recording: capture.Recording, args: tuple[Any, ...]) -> Any:
        has_prompts.add(len(args) > 1)
        return replay(recording, args)

    monkeypatch.setattr(capture.Recording, "replay", noted)
    monkeypatch.setattr(steps, "EAGER_MIXED_STEPS", 4)
    lengths = (3, 90, 4, 17, 150, 1, 40, 5, 33, 8)
    prompts = [[1 + (7 * i + 3 * j * j) % 20 for j in range(length)] for i, length in enumerate(lengths)]
    captured, plain = fresh_engines(3, max_tokens_per_step=48)
    expected = [plain.generate([prompt], max_new_tokens=60)[0].token_ids for prompt in prompts]
    poison_caches(captured.model)
    for mode in ("default", "default", "error"):
        captured.reset_prefix_cache()
        mixed, generations = captured.stats.num_mixed_steps, []
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for prompt in prompts:
                generations.append(captured.add(prompt, max_new_tokens=60))
                for _ in range(3):
                    captured.step()
            while captured.has_work():
                captured.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [generation.completion.token_ids for generation in generations] == expected
        assert captured.stats.num_mixed_steps > mixed + 5
    buckets = [bucket for bucket in captured.capture_report().buckets if bucket.prompt_tokens]
    assert len(buckets) > 3 and all(bucket.is_captured for bucket in buckets)
    assert has_prompts == {False, True}


def wide_model() -> MLAForCausalLM:
    """A small model with the widths of DeepSeek's attention, and an MTP layer, in bfloat16."""
    config = copy.deepcopy(tiny_config())
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 72, "head_dim": 64}
    for name, size in {**sizes, "num_attention_heads": 16, "num_key_value_heads": 16}.items():
        setattr(config, name, size)
    model = MLAForCausalLM(config, mtp=True)
    randomize(model, 0)
    return model.to("cuda", torch.bfloat16)


def test_flash_mla_serves_steps_of_many_queries_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled step: its graph for 8 rows has FlashMLA's plan, those for fewer rows do not."""
    pytest.importorskip("flash_mla")
    from mla_compile.ops.attention import decode_backends
    from mla_compile.ops.attention.kernels import flash_mla

    monkeypatch.setattr(decode_backends, "MANY_QUERIES", 8 * 3 * 16)
    monkeypatch.setattr(decode_backends, "MANY_QUERIES_OF_ROW", 3 * 16)
    planner, plans = flash_mla.PLANNER, []

    def plan(operands: DecodeOperands, place: int) -> list[torch.Tensor]:
        plans.append(len(operands.seq_lens))
        return planner.plan(operands, place)

    monkeypatch.setattr(flash_mla, "PLANNER", planner._replace(plan=plan))
    model = wide_model()
    prompts = [[1, 2, 3, 4, 5 + i][: 1 + i % 5] for i in range(8)]
    found = []
    for backend in (None, "gluon"):
        engine = Engine(
            model,
            num_speculative_tokens=2,
            max_rows=8,
            max_model_len=128,
            page_size=64,
            decode_backend=backend,
        )
        engine.warm_up(prompts=False)
        found.append(engine.generate(prompts, max_new_tokens=8))
        assert any(bucket.is_captured for bucket in engine.capture_report().buckets)
    assert set(plans) == {8}
    agreeing = sum(a == b for x, y in zip(*found) for a, b in zip(x.token_ids, y.token_ids))
    assert agreeing >= 8 * 4, "near-ties may flip in bfloat16"


def test_flashinfer_plans_once_a_step_for_all_layers_of_a_compiled_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("flashinfer")
    from mla_compile.ops.attention.kernels import flashinfer_mla

    model = wide_model()
    plans: list[int] = []
    planner = flashinfer_mla.PLANNER

    def plan(operands: DecodeOperands, place: int) -> list[torch.Tensor]:
        plans.append(place)
        return planner.plan(operands, place)

    monkeypatch.setattr(flashinfer_mla, "PLANNER", planner._replace(plan=plan))
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    found = []
    for backend in ("flashinfer", None):
        engine = Engine(
            model,
            num_speculative_tokens=2,
            max_rows=2,
            max_model_len=64,
            mode="default",
            decode_backend=backend,
        )
        found.append(engine.generate(prompts, max_new_tokens=12))
        if backend is not None:
            assert sorted(plans[-6:]) == [0, 0, 0, 0, 1, 1], "verify; the MTP layer, then its drafts"
            with pytest.raises(MLAError, match="needs the host in every step"):
                Engine(model, max_rows=2, max_model_len=64, decode_backend="flashinfer")
    agreeing = sum(a == b for x, y in zip(*found) for a, b in zip(x.token_ids, y.token_ids))
    assert agreeing >= 16, "near-ties may flip in bfloat16"
