"""A step's report is neither lost nor another step's: its copy and an event follow the step, and reading waits for it.

Stand-ins for a device and its events: a GPU's own are never late in a way that a test decides.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mla_compile import SamplingParams
from mla_compile.engine import reports
from mla_compile.engine.reports import StepReport
from mla_compile.speculate import DecodeState
from tests.engine.engine_traces import check_invariants
from tests.engine.engines import engine, finish, pool_of, texts, with_lag
from tests.models_for_tests import one_layer_model

LOST = "CUDA error: an illegal memory access was encountered"


class Device:
    """Runs what is launched on it when an event is waited for, in the order of the launches."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def report(self, values: torch.Tensor) -> Any:
        def to(place: str, non_blocking: bool) -> torch.Tensor:
            copy = torch.full_like(values, -1)
            self.launched.append(lambda: copy.copy_(values))
            assert place == "cpu" and non_blocking
            return copy

        return SimpleNamespace(is_cuda=True, device=self, to=to)

    def event(self, _: object) -> Any:
        recorded: list[int] = []

        def synchronize() -> None:
            for launch in self.launched[: recorded[0]]:
                launch()

        return SimpleNamespace(record=lambda: recorded.append(len(self.launched)), synchronize=synchronize)


def test_a_report_has_the_step_before_it_and_nothing_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    device, values = Device(), torch.zeros(1, 6, dtype=torch.int64)
    monkeypatch.setattr(torch, "Event", device.event)
    found = []
    for step in (1, 2, 3):
        line = torch.tensor([[2, 1, 1, 0, step, 10 * step]])
        device.launched.append(lambda line=line: values.copy_(line))
        state = cast("DecodeState", SimpleNamespace(report=device.report(values)))
        found.append(StepReport(state, [0], [None], None))
    assert [report.read()[0].tokens for report in found] == [[1, 10], [2, 20], [3, 30]]


class LateEvent:
    """In place of an event of the device that runs the steps: the n-th ends with the device's error."""

    num_left = 0

    def __init__(self, *_: object) -> None: ...

    def synchronize(self) -> None:
        LateEvent.num_left -= 1
        if LateEvent.num_left == 0:
            raise torch.AcceleratorError(LOST)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_report_that_is_lost_ends_the_requests_by_the_devices_error(
    n: int, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = StepReport.__init__

    def copied(self: StepReport, *args: Any) -> None:
        begin(self, *args)
        self._event = cast("torch.Event", LateEvent())

    prompts, params = [[1, 2, 3], [4] * 9, [5, 6]], SamplingParams(logprobs=1)
    mine = with_lag(engine(1, one_layer_model(), max_rows=2), lag)
    expected = [c.token_ids for c in mine.generate(prompts, params, max_new_tokens=12)]
    monkeypatch.setattr(reports.StepReport, "__init__", copied)
    monkeypatch.setattr(LateEvent, "num_left", n)
    requests = [mine.add(prompt, params, max_new_tokens=12) for prompt in prompts]
    with pytest.raises(RuntimeError, match=LOST):
        finish(mine)
    for request, tokens in zip(requests, expected, strict=True):
        assert (request.completion.finish_reason, request.completion.error) == ("error", LOST)
        assert request.completion.token_ids == tokens[: len(request.completion.token_ids)]
    check_invariants(mine)
    again = [mine.add(prompt, params, max_new_tokens=12) for prompt in prompts]
    finish(mine)
    assert texts(again) == expected
    assert pool_of(mine).num_free == pool_of(mine).num_pages - 1
