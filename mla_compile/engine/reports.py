"""Getting a step's results to the host without making the device wait."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.speculate.state import ACTIVE, COUNT, FIRST_TOKEN, DecodeState


@dataclass(frozen=True)
class RowReport:
    """What one step emitted in one row, and whether the row goes on."""

    tokens: list[int]
    active: bool


class ReportReader:
    """A queue of `DecodeState.report` copies, one small asynchronous copy per step.

    On a device, `ready` holds a report back until the next step has been launched: reading it then waits for work
    that is already behind the step in progress.
    """

    def __init__(self, state: DecodeState) -> None:
        self._state = state
        self._on_device = state.report.is_cuda
        self._pending: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def push(self) -> None:
        """Queue a copy of the report that the last launched step writes."""
        report = self._state.report
        if not self._on_device:
            self._pending.append((report.clone(), None))
            return
        host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        host.copy_(report, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((host, event))

    def ready(self) -> bool:
        """Whether a report may be read without stalling the device."""
        return len(self._pending) > int(self._on_device)

    def pop(self) -> list[RowReport]:
        """The oldest report, one entry per row of the bucket."""
        host, event = self._pending.popleft()
        if event is not None:
            event.synchronize()
        return [
            RowReport(row[FIRST_TOKEN : FIRST_TOKEN + row[COUNT]], bool(row[ACTIVE])) for row in host.tolist()
        ]
