"""The reports of a step, and their copy to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.errors import request_error
from mla_compile.speculate.state import ACTIVE, COUNT, FAILED_AT, FIRST_TOKEN, NUM_VERIFIED, DecodeState


@dataclass(frozen=True)
class Logprob:
    """The probability of one token at one position by the model's own logits: before penalties and temperature.

    logprob: natural logarithm of the probability. rank: 1 + the number of more likely tokens.
    """

    logprob: float
    rank: int


@dataclass(slots=True)  # not frozen: that would make it the slowest part of reading a step's reports
class RowReport:
    """What one step emitted in one row.

    active: whether the row goes on.
    num_verified: drafts that the row had.
    logprobs: for each token, the chosen token's and then those of the most likely ones, by token id; None if the row
        requested none.
    error: the error that ended the row; None without one.
    """

    tokens: list[int]
    active: bool
    num_verified: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None


class StepReport:
    """A copy of a launch's results; on a GPU it is asynchronous, and `read` waits for it.

    Args:
        rows: the state's rows that the launch samples in.
        num_logprobs: the `SamplingParams.logprobs` of each of them.
        logprobs: `top_logprobs` of the targets; None if no row requested any.
    """

    def __init__(
        self,
        state: DecodeState,
        rows: Sequence[int],
        num_logprobs: Sequence[int | None],
        logprobs: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._rows, self._num_logprobs = rows, num_logprobs
        reported = [state.report, *(logprobs or ())]
        self._event: torch.Event | None = None
        if not state.report.is_cuda:
            self._copies = [tensor.clone() for tensor in reported]
            return
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in reported]  # to pinned memory
        # Not `torch.cuda.Event`, which asks Python for the current stream: four times as long.
        self._event = torch.Event(state.report.device)
        self._event.record()

    def read(self) -> list[RowReport]:
        """A report for each row; waits for the device if the copy has not finished."""
        if self._event is not None:
            self._event.synchronize()
        report, *logprobs = self._copies
        lines = report.tolist()
        return [
            self._read_row(row, lines[row], n, logprobs)
            for row, n in zip(self._rows, self._num_logprobs, strict=True)
        ]

    def _read_row(self, row: int, line: list[int], n: int | None, logprobs: list[Tensor]) -> RowReport:
        tokens = line[FIRST_TOKEN : FIRST_TOKEN + line[COUNT]]
        places = error = None
        if n is not None:
            values, ids = (tensor[row].tolist() for tensor in logprobs)
            try:
                places = [_by_id(token, values[j], ids[j], n) for j, token in enumerate(tokens)]
            except BaseException as failed:
                error = str(request_error("reading log-probabilities", failed))
                return RowReport([], False, line[NUM_VERIFIED], error=error)
        if line[FAILED_AT]:
            error = f"the model's logits for position {line[FAILED_AT]} are NaN or infinite"
        return RowReport(tokens, bool(line[ACTIVE]), line[NUM_VERIFIED], places, error)


def _by_id(token: int, logprobs: list[float], ids: list[int], n: int) -> dict[int, Logprob]:
    """One position of `top_logprobs`: the chosen `token`, then the n most likely ones."""
    found = {token: Logprob(logprobs[0], ids[0])}
    for rank, (likely, logprob) in enumerate(zip(ids[1 : 1 + n], logprobs[1 : 1 + n], strict=True), start=1):
        found.setdefault(likely, Logprob(logprob, rank))
    return found
