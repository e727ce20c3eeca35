"""An interrupt before lines that steps run, on one trace; `stress.faults` has random lines of random traces.

`MLA_FAULT_LINES=1000` has each line of the trace, which takes two minutes.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stress.engines import drawn_trace
from stress.faults import MESSAGE, FaultRun, LineFault
from stress.runner import Draw

NUM_LINES = int(os.environ.get("MLA_FAULT_LINES", "20"))
TRACE = replace(drawn_trace(Draw(142)), poison=None)
"""It runs nearly every line that any trace does, in 13 steps."""
LAGS = [1, 0, 2]


class Counted(LineFault):
    """No fault: the numbers of the events before each line."""

    def __init__(self) -> None:
        super().__init__(0, KeyboardInterrupt())
        self.num_events = 0
        self.before: dict[str, list[int]] = {}

    def happens(self, place: Callable[[], str]) -> None:
        self.num_events += 1
        self.before.setdefault(place(), []).append(self.num_events)


@pytest.mark.long
@torch.compiler.set_stance("force_eager")
def test_an_interrupt_before_a_line_of_a_step_loses_no_request_and_no_page() -> None:
    counted = Counted()
    outcome = FaultRun(TRACE, counted, "step", LAGS, captured=False).run()
    assert (
        outcome.num_preemptions and outcome.num_accepted and outcome.num_mixed_steps and outcome.num_aborted
    )
    lines = list(counted.before)
    assert len(lines) > 500
    for line in lines[:: -(-len(lines) // NUM_LINES)]:
        events = counted.before[line]
        fault = LineFault(events[len(events) // 2], KeyboardInterrupt(MESSAGE))
        FaultRun(TRACE, fault, "step", LAGS, captured=False).run()
        assert fault.where == line
