"""Getting a step's results to the host without making the device wait."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.speculate.state import ACTIVE, COUNT, FIRST_TOKEN, DecodeState


@dataclass(frozen=True)
class Logprob:
    """Of one token at one place, by the model's own logits: before penalties and temperature.

    logprob: natural logarithm of the probability. rank: 1 + the number of more likely tokens.
    """

    logprob: float
    rank: int


@dataclass(frozen=True)
class RowReport:
    """What one step emitted in one row, and whether the row goes on.

    logprobs: for each token, the chosen token's and then those of the most likely ones, by token id; None where the
        row asked for none.
    error: why the row cannot go on, where it ended for that; None where it goes on or ended as it should.
    """

    tokens: list[int]
    active: bool
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None


class ReportReader:
    """A queue of copies of what `DecodeState` reports, small asynchronous ones for each step.

    On a device, `ready` holds a report back until the next step has been launched: reading it then waits for work
    that is already behind the step in progress.

    Args:
        state: written by the steps.
        num_logprobs: `SamplingParams.logprobs` of each prompt; the state has at least as many.
    """

    def __init__(self, state: DecodeState, num_logprobs: Sequence[int | None]) -> None:
        reported = state.report, state.logprobs, state.logprob_ids
        self._reported = [tensor for tensor in reported if tensor is not None]
        self._num_logprobs = num_logprobs
        self._on_device = state.report.is_cuda
        self._pending: deque[tuple[list[Tensor], torch.cuda.Event | None]] = deque()

    def push(self) -> None:
        """Queue a copy of the report that the last launched step writes."""
        if not self._on_device:
            self._pending.append(([tensor.clone() for tensor in self._reported], None))
            return
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in self._reported]
        for host, tensor in zip(hosts, self._reported, strict=True):
            host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending.append((hosts, event))

    def ready(self) -> bool:
        """Whether a report may be read without stalling the device."""
        return len(self._pending) > int(self._on_device)

    def pop(self) -> list[RowReport]:
        """The oldest report, one entry per prompt."""
        (report, *logprobs), event = self._pending.popleft()
        if event is not None:
            event.synchronize()
        told = [tensor.tolist() for tensor in logprobs]
        reports = []
        # Not strict: a bucket may have more rows than there are prompts.
        for i, (row, n) in enumerate(zip(report.tolist(), self._num_logprobs, strict=False)):
            tokens = row[FIRST_TOKEN : FIRST_TOKEN + row[COUNT]]
            places = None
            if n is not None:
                values, ids = (tensor[i] for tensor in told)
                places = [_by_id(token, values[j], ids[j], n) for j, token in enumerate(tokens)]
            reports.append(RowReport(tokens, bool(row[ACTIVE]), places))
        return reports


def _by_id(token: int, logprobs: list[float], ids: list[int], n: int) -> dict[int, Logprob]:
    """One place of `DecodeState.logprobs` and `logprob_ids`, the chosen `token` first and n likely ones after it."""
    found = {token: Logprob(logprobs[0], ids[0])}
    for rank, (likely, logprob) in enumerate(zip(ids[1 : 1 + n], logprobs[1 : 1 + n], strict=True), start=1):
        found.setdefault(likely, Logprob(logprob, rank))
    return found
