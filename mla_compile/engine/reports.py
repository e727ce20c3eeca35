"""Getting a step's results to the host without making the device wait."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.speculate.state import ACTIVE, COUNT, FIRST_TOKEN, NUM_VERIFIED, DecodeState


@dataclass(frozen=True)
class Logprob:
    """Of one token at one place, by the model's own logits: before penalties and temperature.

    logprob: natural logarithm of the probability. rank: 1 + the number of more likely tokens.
    """

    logprob: float
    rank: int


@dataclass(slots=True)  # not frozen: that would make it the slowest part of reading a step's reports
class RowReport:
    """What one step emitted in one row, and whether the row goes on.

    num_verified: drafts that the row had.
    logprobs: for each token, the chosen token's and then those of the most likely ones, by token id; None where the
        row asked for none.
    error: why the row cannot go on, where it ended for that; None where it goes on or ended as it should.
    """

    tokens: list[int]
    active: bool
    num_verified: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None


Pending = tuple[list[Tensor], torch.cuda.Event | None, list[int], dict[int, int]]
"""Copies, the event after them, and what `ReportReader.push` was told of their rows."""


class ReportReader:
    """A queue of copies of what launches report, small asynchronous ones for each launch.

    On a device a report is held back until the next step has been launched: reading it then waits for work that is
    already behind the step in progress.

    lag: launches whose reports are held back.
    """

    def __init__(self, device: torch.device) -> None:
        self.lag = int(device.type == "cuda")
        self._pending: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def clear(self) -> None:
        """Drop what was not read."""
        self._pending.clear()

    def push(self, state: DecodeState, rows: list[int], num_logprobs: dict[int, int]) -> None:
        """Queue a copy of what the last launch writes to `state`.

        rows: those that it samples in.
        num_logprobs: `SamplingParams.logprobs` of those that asked for any.
        """
        reported = [t for t in (state.report, state.logprobs, state.logprob_ids) if t is not None]
        if not state.report.is_cuda:
            self._pending.append(([tensor.clone() for tensor in reported], None, rows, num_logprobs))
            return
        hosts = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) for x in reported]
        for host, tensor in zip(hosts, reported, strict=True):
            host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((hosts, event, rows, num_logprobs))

    def pop(self) -> list[RowReport]:
        """The oldest report, one entry for each of its rows."""
        (report, *logprobs), event, rows, num_logprobs = self._pending.popleft()
        if event is not None:
            event.synchronize()
        lines = report.tolist()
        reports = []
        for row in rows:
            line = lines[row]
            tokens = line[FIRST_TOKEN : FIRST_TOKEN + line[COUNT]]
            places = None
            if row in num_logprobs:
                values, ids = (tensor[row].tolist() for tensor in logprobs)
                places = [
                    _by_id(token, values[j], ids[j], num_logprobs[row]) for j, token in enumerate(tokens)
                ]
            error = None
            if line[ACTIVE] < 0:
                error = f"the model's logits for position {-line[ACTIVE]} are NaN or infinite"
            reports.append(RowReport(tokens, line[ACTIVE] > 0, line[NUM_VERIFIED], places, error))
        return reports


def _by_id(token: int, logprobs: list[float], ids: list[int], n: int) -> dict[int, Logprob]:
    """One place of `DecodeState.logprobs` and `logprob_ids`, the chosen `token` first and n likely ones after it."""
    found = {token: Logprob(logprobs[0], ids[0])}
    for rank, (likely, logprob) in enumerate(zip(ids[1 : 1 + n], logprobs[1 : 1 + n], strict=True), start=1):
        found.setdefault(likely, Logprob(logprob, rank))
    return found
