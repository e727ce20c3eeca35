"""`shadow_check`: healthy steps pass unchanged, and the error of each planted fault names its place."""

import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.start import start
from mla_compile import Engine, MLAError, SamplingParams
from mla_compile.speculate import DecodeState, PackedChunks, PromptChunk, SpeculativeDecoder
from mla_compile.speculate.state import FIRST_TOKEN
from mla_compile.testing import ShadowCheckError, checked_step, shadow_check
from tests.counters import compile_counters
from tests.engine.engines import engine
from tests.models_for_tests import caches_of, one_layer_model, tiny_model
from tests.shadow_streams import run_checked_streams

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
PAGES = 6
NAMES = ["layers.0.self_attn", "layers.1.self_attn", "mtp.layer.self_attn"]
"""Of 4 tokens, of each row: row 0 has pages 1 to 6, row 1 has 7 to 12, row 2 has 13 to 18; the bucket's row 3 has none,
and pages 19 to 24 belong to no row."""


def small_engine(k: int = 3, dtype: torch.dtype = torch.float64, **settings: object) -> Engine:
    return engine(k, tiny_model(dtype), max_model_len=4 * PAGES, **settings)


class Started:
    """An engine's step, which a test makes faulty."""

    def __init__(self, k: int = 3, dtype: torch.dtype = torch.float64, max_new_tokens: int = 15) -> None:
        self.engine = small_engine(k, dtype)
        _, self.state = start(self.engine, PROMPTS, max_new_tokens, [SamplingParams()] * 3, [])
        # Private: a fault is added to what the engine runs, which no public call returns.
        self.decoder: SpeculativeDecoder = self.engine._launcher.steps._decoders[False]
        self.caches = caches_of(self.engine.model)

    def message(self, fault: Callable[["Started"], None], steps: int = 2) -> str:
        """The check's error for a run in which the last step does `fault`."""
        calls = 0

        def step(state: DecodeState) -> None:
            nonlocal calls
            calls += 1
            self.decoder(state)
            if calls == steps:
                fault(self)

        step = checked_step(step, self.decoder)
        for _ in range(steps - 1):
            step(self.state)
        with pytest.raises(ShadowCheckError) as error:
            step(self.state)
        first, *lines = str(error.value).split("\n  ")
        assert first == f"step {steps} and its eager run on the same inputs differ:"
        return "\n".join(lines)


@pytest.mark.parametrize("k", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3))])
def test_healthy_eager_steps_pass(k: int) -> None:
    run_checked_streams(tiny_model(), k, steps=40, every=1, compile=False)


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(
    ("k", "dtype", "temperature"),
    [pytest.param(3, torch.float64, 1.0, marks=pytest.mark.slow), (1, torch.float32, 0.0)],
    ids=str,
)
def test_healthy_compiled_steps_pass_and_checking_compiles_nothing_more(
    k: int, dtype: torch.dtype, temperature: float
) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = one_layer_model(dtype)
    run_checked_streams(model, k, steps=60, every=2, temperatures=(temperature,), compile=True)
    assert compile_counters()["graphs"] == 2


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_what_nobody_reads_may_differ(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU shared experts are computed by `moe_experts`, which gives zeros for padding."""
    monkeypatch.setattr("mla_compile.passes.fuse_shared_experts.first_serves", lambda *call: True)
    with caplog.at_level(logging.INFO, "mla_compile.passes.fuse_shared_experts"):
        run_checked_streams(
            tiny_model(torch.float32), 2, steps=40, every=2, temperatures=(1.0,), compile=True
        )
    assert "fused: " in caplog.text


def test_a_step_of_bfloat16_passes_within_its_tolerance() -> None:
    started = Started(dtype=torch.bfloat16)
    step = checked_step(started.decoder, started.decoder)
    while started.state.active.any():
        step(started.state)


def fault_in(name: str, index: tuple[int, ...], value: int) -> Callable[[Started], None]:
    def fault(started: Started) -> None:
        getattr(started.state, name)[index] += value

    return fault


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (fault_in("drafts", (1, 2), 1), r"drafts: row 1, column 2: (\d+), eager (\d+)"),
        (fault_in("last_token", (2,), 1), r"last_token: row 2: (\d+), eager (\d+)"),
        (fault_in("num_cached", (0,), 1), r"num_cached: row 0: (\d+), eager (\d+)"),
        (fault_in("report", (1, 0), 1), r"report: row 1, column 0: (\d+), eager (\d+)"),
        (
            fault_in("report", (1, FIRST_TOKEN), 1),
            rf"report: row 1, column {FIRST_TOKEN}: (\d+), eager (\d+)",
        ),
        (fault_in("max_len", (3,), 1), r"max_len: row 3: (\d+), eager (\d+)"),
    ],
    ids=lambda value: None if callable(value) else value.split(":")[0],
)
def test_a_wrong_state_is_told_by_its_row(fault: Callable[[Started], None], message: str) -> None:
    found = re.fullmatch(message, Started().message(fault))
    assert found and int(found[1]) == int(found[2]) + 1


def test_a_row_that_should_have_ended_is_told() -> None:
    def fault(started: Started) -> None:
        started.state.active[2] = True

    assert Started(max_new_tokens=3).message(fault, 2) == "active: row 2: True, eager False"


def test_a_state_that_stays_as_it_was_is_told() -> None:
    def stays(state: DecodeState) -> None:
        pass

    started = Started()
    with pytest.raises(ShadowCheckError, match=r"num_cached: row 0: 3, eager [4-7]; 2 more differ"):
        checked_step(stays, started.decoder)(started.state)


def half(_: Tensor) -> float:
    return 0.5


def into(layer: int, page: int, slot: int, change: Callable[[Tensor], Tensor | float]) -> Callable:
    """A fault in column 5 of a slot and, where the page has one more, of the next one."""

    def fault(started: Started) -> None:
        values = started.caches[layer][page, slot : slot + 2, 5]
        values.copy_(torch.as_tensor(change(values)))

    return fault


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_latent_is_compared_within_the_tolerance_of_its_dtype(layer: int, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 3.5e-4, torch.float32: 3.5e-4, torch.bfloat16: 0.09}[dtype]
    # The first step runs row 1's positions 5 to 8: slots 1 to 3 of its second page, and one of the third.
    page, slot = 8, 2
    for times, is_told in ((0.5, False), (3, True)):
        started = Started(dtype=dtype)

        def fault(started: Started, times: float = times) -> None:
            latent = started.caches[layer][page, slot]
            latent[5] += times * tolerance * latent.abs().max()

        def step(state: DecodeState, started: Started = started, fault: Callable = fault) -> None:
            started.decoder(state)
            fault(started)

        checked = checked_step(step, started.decoder)
        if is_told:
            place = rf"{NAMES[layer]}: page 8, slot 2 of it, column 5: \S+, eager \S+$"
            with pytest.raises(ShadowCheckError, match=place):
                checked(started.state)
            checked_step(started.decoder, started.decoder, tolerance=0)(started.state)
        else:
            checked(started.state)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (into(1, 0, 2, half), r"layers.1.self_attn: page 0, slot 2 of it, column 5: 0.5, eager"),
        (into(0, 20, 0, half), r"layers.0.self_attn: page 20, slot 0 of it, column 5: 0.5, eager"),
        (into(2, 7, 1, torch.neg), r"mtp.layer.self_attn: page 7, slot 1 of it, column 5: "),
        # Positions from max_len - 1 on, 17 of row 0, are not run.
        (into(0, 5, 1, half), r"layers.0.self_attn: page 5, slot 1 of it, column 5: 0.5, eager"),
    ],
    ids=["page 0", "a page of no row", "text that is cached", "past the end"],
)  # fmt: skip
def test_a_write_where_no_row_may_write_is_told(fault: Callable[[Started], None], message: str) -> None:
    line = Started().message(fault)
    assert line.startswith(message)
    assert line.endswith("; eager writes nothing there; 1 more differ")


def test_a_latent_that_is_not_written_is_told() -> None:
    def fault(started: Started) -> None:
        started.caches[1][8, 2] = torch.nan

    started = Started()
    assert re.fullmatch(
        r"layers.1.self_attn: page 8, slot 2 of it, column 0: nan, eager \S+; 23 more differ",
        started.message(fault, steps=1),
    )


def test_everything_that_differs_is_told_layers_first() -> None:
    def fault(started: Started) -> None:
        into(1, 0, 3, half)(started)
        fault_in("drafts", (0, 0), 1)(started)
        fault_in("report", (2, FIRST_TOKEN), 1)(started)

    lines = Started().message(fault).splitlines()
    assert [line.split(":")[0] for line in lines] == ["layers.1.self_attn", "drafts", "report"]


def everything(of: Started) -> list[Tensor]:
    return [*of.caches, *of.state.tensors()]


def test_a_checked_step_leaves_what_the_step_left_where_it_left_it() -> None:
    started, plain = Started(), Started()
    places = [tensor.data_ptr() for tensor in everything(started)]
    step = checked_step(started.decoder.forward, started.decoder)
    for _ in range(3):
        step(started.state)
        plain.decoder(plain.state)
        for got, expected in zip(everything(started), everything(plain), strict=True):
            assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
    assert [tensor.data_ptr() for tensor in everything(started)] == places


def test_after_a_difference_the_faulty_results_are_there_to_look_at() -> None:
    started = Started()

    def fault(started: Started) -> None:
        started.caches[1][0] = 0.5
        started.state.drafts.fill_(-1)

    started.message(fault)
    assert (started.caches[1][0] == 0.5).all() and (started.state.drafts == -1).all()


def test_every_nth_step_is_checked_from_the_first_on() -> None:
    started = Started()
    calls = []
    forward = started.decoder.forward
    started.decoder.forward = lambda state: calls.append(len(steps)) or forward(state)
    steps: list[int] = []

    def step(state: DecodeState) -> None:
        steps.append(1)
        forward(state)

    checked = checked_step(step, started.decoder, every=3)
    for _ in range(8):
        checked(started.state)
    assert len(steps) == 8 and calls == [1, 4, 7]


@pytest.mark.long
@pytest.mark.parametrize(
    "what", ["compiled", pytest.param("compiled in place", marks=pytest.mark.slow), "around a compiled model"]
)
def test_whatever_is_compiled_is_checked_against_eager(what: str) -> None:
    started = Started()
    step = started.decoder

    def faulty(gm: torch.fx.GraphModule, _: list) -> Callable:
        def run(*args: object) -> object:
            out = gm(*args)
            started.caches[0][8, 2, 5] += 1
            return out

        return run

    if what == "compiled":
        step = torch.compile(step, backend=faulty, fullgraph=True)
    elif what == "compiled in place":
        step.compile(backend=faulty, fullgraph=True)
    else:
        step.model.compile(backend=faulty, fullgraph=True)
    with pytest.raises(ShadowCheckError, match=r"layers.0.self_attn: page 8, slot 2 of it, column 5"):
        checked_step(step, started.decoder)(started.state)


def test_an_engine_checks_its_own_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small_engine().generate(PROMPTS, max_new_tokens=12)
    checked = small_engine()
    with shadow_check(checked, every=2):
        assert checked.generate(PROMPTS, max_new_tokens=12) == plain
    accept = SpeculativeDecoder._accept  # a fault inside of the compiled step
    monkeypatch.setattr(
        SpeculativeDecoder,
        "_accept",
        lambda self, state, tokens, lens: accept(self, state, tokens.random_(40), lens),
    )
    with pytest.raises(ShadowCheckError, match="report: row 0"), shadow_check(checked):
        checked.generate(PROMPTS, max_new_tokens=12)
    checked.generate(PROMPTS, max_new_tokens=12)


@pytest.mark.usefixtures("unlowered", "compiled_mixed_steps")
def test_an_engine_checks_its_steps_with_prompts_too() -> None:
    prompts = [[1 + (5 * row + j) % 20 for j in range(n)] for row, n in enumerate((12, 3, 17))]
    plain = small_engine(1, max_tokens_per_step=12, compile=False).generate(prompts, max_new_tokens=6)
    checked = small_engine(1, max_tokens_per_step=12)
    with shadow_check(checked):
        assert checked.generate(prompts, max_new_tokens=6) == plain
    assert checked.stats.num_mixed_steps > 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (None, None),
        ((8, 0), r"layers.1.self_attn: page 8, slot 0 of it, column 2: .*, eager"),
        (
            (8, 2),
            r"layers.1.self_attn: page 8, slot 2 of it, column 2: .*; eager writes nothing there",
        ),
        (
            (7, 3),
            r"layers.1.self_attn: page 7, slot 3 of it, column 2: .*; eager writes nothing there",
        ),
    ],
)
def test_a_fault_in_a_step_with_prompts_is_told(fault: tuple[int, int] | None, message: str | None) -> None:
    """Row 0 decodes, tokens 4 and 5 of row 1's prompt of 9 are prefilled, and row 2's prompt ends."""
    started = Started(k=2)
    decoder, state = started.decoder, started.state
    state.active[1:] = False
    chunks = [PromptChunk(1, list(range(9)), 4, 6), PromptChunk(2, [3, 4, 5], 1, 3)]
    packed = PackedChunks.pack(chunks, state, page_size=4)

    def step(state: DecodeState, packed: PackedChunks) -> None:
        decoder(state, packed)
        if fault is not None:
            started.caches[1][*fault, 2] = 0.5

    checked = checked_step(step, decoder)
    if message is None:
        checked(state, packed)
        assert state.active.tolist()[:3] == [True, False, True]
    else:
        with pytest.raises(ShadowCheckError, match=message):
            checked(state, packed)


def test_what_cannot_be_checked_is_refused_by_name() -> None:
    started = Started()
    with (
        pytest.raises(MLAError, match="every: expected an integer >= 1, got 0"),
        shadow_check(started.engine, every=0),
    ):
        pass
    tolerance = "tolerance: expected a finite number >= 0, got -1"
    with pytest.raises(MLAError, match=tolerance), shadow_check(started.engine, tolerance=-1):
        pass
    fresh = SpeculativeDecoder(tiny_model(), 3, page_size=4)
    with pytest.raises(MLAError, match=r"layers.0.self_attn: expected an allocated cache"):
        checked_step(fresh, fresh)(started.state)
