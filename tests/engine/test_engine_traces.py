"""Random traces through the real engine (`engine_traces.py`).

A failure prints its smallest trace, to be pasted into `run(...)`. `MLA_ENGINE_TRACES=10000` sets how many there are.
The tests that break a rule on purpose patch private methods: a rule has no public switch.
"""

import os
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_compile.engine import Request, rows
from mla_compile.engine.pages import PagePool
from mla_compile.engine.reports import RowReport
from mla_compile.engine.rows import Rows
from mla_compile.engine.scheduler import Scheduler
from mla_compile.sampling_params import SamplingParams
from mla_compile.speculate import DecodeState, SpeculativeDecoder
from tests.engine.engine_traces import POISONS, Outcome, prepare_texts, run
from tests.engine.toy_engine import Arrival, Trace, batch_invariant_traces, check_traces, traces


@pytest.mark.long
def test_a_requests_tokens_are_the_same_alone_and_in_any_trace() -> None:
    met = check_traces(run, 20)
    others = ("tokens", "num_failed")
    assert all(met[field.name] for field in fields(Outcome) if field.name not in others), met


@pytest.mark.long
def test_a_batch_invariant_engine_preempts_none() -> None:
    met = check_traces(run, 12, batch_invariant_traces())
    assert met["num_preemptions"] == 0, met


def poisoned_traces() -> st.SearchStrategy[Trace]:
    # Prompts are full of 3; 23 and 28 are emitted.
    poison = st.tuples(st.sampled_from(POISONS), st.sampled_from([23, 28, 3]))
    return st.builds(lambda trace, poison: replace(trace, poison=poison), traces(), poison)


@pytest.mark.long
def test_a_request_whose_logits_become_nan_ends_in_an_error_and_no_other_does() -> None:
    met = check_traces(run, 40, poisoned_traces())
    assert min(met["num_failed"], met["num_reused_tokens"], met["num_accepted"]) > 5, met


def test_a_row_whose_step_gave_no_token_is_read_in_the_step_that_others_launch() -> None:
    arrivals = [
        Arrival(0, num_shared, 2, max_new_tokens) for num_shared, max_new_tokens in ((4, 4), (0, 1), (0, 1))
    ]
    poison = "latents", 23
    trace = Trace(tuple(arrivals), page_size=1, spare_pages=0, max_rows=3, spare_tokens=0, lag=2, seed=543)
    run(replace(trace, acceptance=0.0, poison=poison))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_thousands_of_traces() -> None:
    met = check_traces(run, int(os.environ.get("MLA_ENGINE_TRACES", "300")))
    for name, count in met.items():
        assert count > met["traces"] / 50 or name == "num_failed", f"hardly any trace has {name}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_thousands_of_batch_invariant_traces() -> None:
    met = check_traces(run, int(os.environ.get("MLA_ENGINE_TRACES", "300")), batch_invariant_traces())
    assert met["num_preemptions"] == 0


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_thousands_of_poisoned_traces() -> None:
    met = check_traces(run, int(os.environ.get("MLA_ENGINE_TRACES", "300")), poisoned_traces())
    assert met["num_failed"] > met["traces"] / 10


def rows_stay_active(patch: pytest.MonkeyPatch) -> None:
    write = Rows._write
    patch.setattr(Rows, "_write", lambda self, state, off, admitted: write(self, state, [], admitted))


def a_state_serves_every_kind_of_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SamplingParams, "is_argmax", True)


def penalties_forget_what_a_preempted_row_has_said(patch: pytest.MonkeyPatch) -> None:
    write = Rows._write

    def forgets(self: Rows, state: DecodeState, off: list[int], admitted: list[Request]) -> None:
        write(self, state, off, admitted)
        if state.num_emitted is not None:
            state.num_emitted[self.of(admitted)] = 0

    patch.setattr(Rows, "_write", forgets)


def ended_requests_keep_their_pages(patch: pytest.MonkeyPatch) -> None:
    stop = Scheduler._stop

    def keeps(self: Scheduler, request: Request) -> None:
        if request.has_ended:
            request.pages = []
        stop(self, request)

    patch.setattr(Scheduler, "_stop", keeps)


def tokens_behind_a_stop_string_stay(patch: pytest.MonkeyPatch) -> None:
    take = Request.take

    def keeps(self: Request, report: RowReport, *, is_step: bool) -> None:
        everything = [*self.completion.token_ids, *report.tokens]
        take(self, report, is_step=is_step)
        self.completion.token_ids = everything

    patch.setattr(Request, "take", keeps)


def pages_are_shared_one_token_early(patch: pytest.MonkeyPatch) -> None:
    commit = PagePool.commit
    patch.setattr(
        PagePool,
        "commit",
        lambda self, pages, token_ids, num_cached: commit(
            self, pages, token_ids, min(num_cached + 1, len(pages) * self.page_size)
        ),
    )


def one_draft_too_many_is_accepted(patch: pytest.MonkeyPatch) -> None:
    accept = SpeculativeDecoder._accept

    def too_many(self: SpeculativeDecoder, state: DecodeState, targets: Tensor, q_lens: Tensor) -> object:
        count, active = accept(self, state, targets, q_lens)
        return torch.where(active, (count + 1).minimum(q_lens), count), active

    patch.setattr(SpeculativeDecoder, "_accept", too_many)


def moved_rows_leave_their_history_behind(patch: pytest.MonkeyPatch) -> None:
    move = rows._move_rows

    def moved(state: DecodeState, places: list[int]) -> None:
        move(state, places)
        if state.history is not None:
            state.history.zero_()

    patch.setattr(rows, "_move_rows", moved)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(rows_stay_active, marks=pytest.mark.slow),
        pytest.param(a_state_serves_every_kind_of_row, marks=pytest.mark.slow),
        pytest.param(penalties_forget_what_a_preempted_row_has_said, marks=pytest.mark.slow),
        ended_requests_keep_their_pages,
        pytest.param(tokens_behind_a_stop_string_stay, marks=pytest.mark.slow),
        pytest.param(pages_are_shared_one_token_early, marks=pytest.mark.slow),
        one_draft_too_many_is_accepted,
        pytest.param(moved_rows_leave_their_history_behind, marks=pytest.mark.slow),
    ],
)
def test_the_traces_notice(mistake: Callable[[pytest.MonkeyPatch], None]) -> None:
    def fails(trace: Trace) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            prepare_texts(trace)  # valid tokens are emitted before the mistake
            mistake(patch)
            try:
                run(trace)
            except (AssertionError, ValueError, LookupError):
                return True
        return False

    quick = settings(max_examples=500, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    assert find(traces(), fails, settings=quick)
