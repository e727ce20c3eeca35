"""In float32 on a CPU an engine runs steps eagerly until a thread has compiled them."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from mla_compile import Engine, SamplingParams
from mla_compile.engine.background import run_in_background
from tests.counters import compile_counters
from tests.engine.engines import engine, watch_eager_calls
from tests.models_for_tests import one_layer_model

PROMPTS = [[1, 2, 3], [4] * 10, [5, 6]]
SAMPLING = SamplingParams(temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture(autouse=True)
def compiles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_compile.engine.steps.EAGER_STEPS", 4)


@pytest.fixture
def eager_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the parts of steps that ran eagerly."""
    return watch_eager_calls(monkeypatch, "verify", "advance")


def test_a_function_that_a_job_traces_does_not_see_the_modules_that_steps_call() -> None:
    """Inductor traces one for some 20 ms; a tracer replaces `nn.Module.__call__` in the whole process."""
    traces, ends = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        traces.set()
        assert ends.wait(60)
        return x

    graphs: list[torch.fx.GraphModule] = []
    run_in_background("a trace", lambda: graphs.append(torch.fx.symbolic_trace(traced)))
    try:
        assert traces.wait(60)
        linear = torch.nn.Linear(2, 2)
        assert linear(torch.ones(1, 2)).shape == (1, 2)
    finally:
        ends.set()
    join_jobs()
    assert [node.op for node in graphs[0].graph.nodes] == ["placeholder", "output"]


def join_jobs() -> None:
    for thread in threading.enumerate():
        if thread.name == "mla-compile":
            thread.join()


def texts(of: Engine, sampling: SamplingParams | None = None) -> list[list[int]]:
    completions = of.generate(PROMPTS, sampling, max_new_tokens=16)
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]


@pytest.mark.long  # Inductor writes to caches in place; "aot_eager" writes back a copy of all pages
@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,  # of transformers' `generate`
        pytest.param(torch.enable_grad, marks=pytest.mark.slow),
        pytest.param(torch.inference_mode, marks=pytest.mark.slow),
    ],
)
def test_steps_run_eagerly_while_a_thread_compiles_them_and_compiled_afterwards(
    mode: Callable[[], AbstractContextManager[None]], eager_calls: list[str]
) -> None:
    """With the tokens of eager steps before, meanwhile and afterwards."""
    with mode():
        check_change_over(eager_calls)


def check_change_over(eager_calls: list[str]) -> None:
    model = one_layer_model(torch.float32)
    expected = {params: texts(engine(0, model), params) for params in (None, SAMPLING)}
    mine = engine(1, model, compile=None)
    before, interval = compile_counters()["graphs"], sys.getswitchinterval()
    deadline = time.monotonic() + 300
    num_batches, graphs = 0, 0
    while graphs < 3:
        for params, tokens in expected.items():
            assert texts(mine, params) == tokens
        num_batches += 1
        time.sleep(1)  # batches without a pause would take half of the interpreter's time from the thread
        assert time.monotonic() < deadline, f"{graphs} of 3 graphs after {num_batches} batches"
        graphs = compile_counters()["graphs"] - before
    join_jobs()
    assert sys.getswitchinterval() == interval
    assert num_batches > 1 and {"verify", "advance"} <= set(eager_calls)
    for params, tokens in expected.items():
        mine.reset_prefix_cache()
        mine.generate(PROMPTS, params, max_new_tokens=1)  # a prompt's step runs eagerly
        assert tokens_of_decode_steps(mine, params, eager_calls) == tokens[0]
        assert eager_calls == [], "every step without prompts ran compiled"
    assert compile_counters()["graphs"] - before == 3, "no step compiled by itself"


def tokens_of_decode_steps(of: Engine, params: SamplingParams | None, eager_calls: list[str]) -> list[int]:
    """Those of the first prompt; `eager_calls` are then those of all steps but the first, which runs the prompt."""
    request = of.add(PROMPTS[0], params, max_new_tokens=16)
    of.step()
    eager_calls.clear()
    while of.has_work():
        of.step()
    return request.completion.token_ids


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_steps_are_compiled_again_for_other_settings_of_torch(eager_calls: list[str]) -> None:
    of, threads = engine(1, one_layer_model(torch.float32), compile=None), torch.get_num_threads()
    try:
        for mode, number in (
            (torch.no_grad, threads),
            (torch.inference_mode, threads),
            (torch.no_grad, threads + 1),
        ):
            torch.set_num_threads(number)
            with mode():
                texts(of)
                assert "verify" in eager_calls
                join_jobs()
                tokens_of_decode_steps(of, None, eager_calls)
            assert eager_calls == []
    finally:
        torch.set_num_threads(threads)


def test_a_job_that_begins_at_the_end_of_the_program_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("threading._SHUTTING_DOWN", True)
    run_in_background("a job", lambda: None)
    assert "a job was not started" in caplog.text


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
def test_a_warm_up_reports_the_time_to_compile() -> None:
    buckets = engine(1, one_layer_model(torch.float32), compile=None, max_rows=3).warm_up().buckets
    assert [(bucket.step, bucket.rows, bucket.why_not) for bucket in buckets] == [
        ("greedy", 3, "the device is cpu"),
        ("sampled", 3, "the device is cpu"),
    ]
    assert all(bucket.compile_seconds > 0 for bucket in buckets)
