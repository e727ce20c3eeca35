"""Assigns running requests to rows of decode states, and writes the host's inputs into the states.

Captured graphs hold the addresses of a state's tensors, so there is one state for each number of rows and kind of
step. All of them begin at the same address: a state of few rows is the beginning of one of many, and a request keeps
its row if the number of rows grows. A row without a request is inactive and has a block table of zeros, also behind the
rows of the current state. All writes are ops on the stream of the steps, so the host never waits.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import chain

import torch
from torch import Tensor

from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Grant, Plan
from mla_compile.ops.attention.segments import copied_to
from mla_compile.sampling_params import MAX_STOP_IDS, SamplingParams
from mla_compile.speculate import DecodeState

FEW = 4
"""The state becomes smaller only if at most one row in `FEW` is used, as requests then move to the first rows."""

_PARAMETERS = [field.name for field in fields(SamplingParams) if field.type is float]
"""Each is a tensor of the state, `[rows]`; all are uploaded in one copy."""


class Rows:
    """The rows of the running requests.

    Args:
        state_for: `Steps.state_for`.
        max_rows: of the largest state.
        pages_per_grant: cache pages per page of a plan.
        device: of the states.

    state: the current state; None before the first.
    on_host: whether the host chooses or masks tokens of any running request.
    """

    def __init__(
        self,
        state_for: Callable[..., DecodeState],
        *,
        max_rows: int,
        pages_per_grant: int,
        device: torch.device,
    ) -> None:
        self._state_for, self._max_rows = state_for, max_rows
        self._pages_per_grant = pages_per_grant
        self._device = device
        self._row_of: dict[Request, int] = {}
        self._texts: dict[Request, array[int]] = {}
        self.state: DecodeState | None = None
        self.on_host = False

    def clear(self) -> None:
        """Forget all requests. The next `prepare` starts with inactive rows."""
        self._row_of, self._texts, self.state, self.on_host = {}, {}, None, False

    @property
    def sampled(self) -> bool:
        """Whether the current state serves requests that sample or change logits."""
        return self.state is not None and self.state.num_emitted is not None

    def __len__(self) -> int:
        return len(self._row_of)

    def __getitem__(self, request: Request) -> int:
        """A request's row in the current state."""
        return self._row_of[request]

    def of(self, requests: Iterable[Request]) -> list[int]:
        """The requests' rows in the current state."""
        return list(map(self._row_of.__getitem__, requests))

    def text(self, request: Request) -> "array[int]":
        """The tokens that a request was admitted with: its prompt, and what it had emitted before a preemption."""
        return self._texts[request]

    def prepare(self, plan: Plan) -> DecodeState:
        """The state that a plan's step runs on, with the plan's changes applied; admitted rows are inactive."""
        if self.state is not None and not (plan.removed or plan.admitted):
            self._grant(self.state, plan.grants)
            return self.state
        inactive = [self._row_of.pop(request) for request in plan.removed]
        for request in plan.removed:
            del self._texts[request]
        self._texts |= {request: array("q", request.tokens) for request in plan.admitted}
        before, had_counts = self.state, self.sampled
        self.state = state = self._fitting_state([*self._row_of, *plan.admitted])
        if before is None or not self._row_of or len(state.active) < len(before.active):
            _move_rows(self._state_for(self._max_rows, sampled=self.sampled), list(self._row_of.values()))
            self._row_of = {request: row for row, request in enumerate(self._row_of)}
            inactive = []
        if self._row_of and self.sampled and not had_counts:
            _zero_counts(state)
        free = sorted(set(range(len(state.active))) - set(self._row_of.values()), reverse=True)
        self._row_of |= {request: free.pop() for request in plan.admitted}
        inactive += [self._row_of[request] for request in plan.admitted]
        self._write(state, inactive, plan.admitted)
        self._grant(state, plan.grants)
        return state

    def _fitting_state(self, live: Sequence[Request]) -> DecodeState:
        """The current state if it serves these requests, else one that fits."""
        rows, sampled = len(live), any(not request.params.is_argmax for request in live)
        self.on_host = any(request.is_chosen_on_host for request in live)
        if self.state is not None and self._row_of:
            current = len(self.state.active)
            if rows <= current < FEW * rows:
                rows, sampled = current, sampled or self.sampled
        return self._state_for(rows, sampled=sampled)

    def _write(self, state: DecodeState, inactive: list[int], admitted: Sequence[Request]) -> None:
        """Upload integers in one copy and floats in another, then write them with ops on the device; then biases.

        inactive: rows to make inactive, among them those of `admitted`.
        """
        if not inactive:
            return
        at = [self._row_of[request] for request in admitted]
        k = state.drafts.shape[1]
        stop_ids = [[*r.stop_ids, *[-1] * (MAX_STOP_IDS - len(r.stop_ids))] for r in admitted]
        penalised = [
            (row, request) for row, request in zip(at, admitted, strict=True) if request.params.penalised
        ]
        prompts = [(row, token) for row, request in penalised for token in set(request.prompt)]
        emitted = [(row, token) for row, request in penalised for token in request.completion.token_ids]
        columns: dict[str, Sequence[int]] = {
            "inactive": inactive,
            "rows": at,
            "max_len": [request.max_len for request in admitted],
            "max_drafts": [
                k if request.max_drafts is None else min(k, request.max_drafts) for request in admitted
            ],
            "min_len": [min(len(r.prompt) + r.params.min_tokens, r.max_len) for r in admitted],
            "seed": [request.params.seed for request in admitted],
            "top_k": [request.params.top_k for request in admitted],
            "stop_ids": list(chain(*stop_ids)),
            "prompt_rows": [row for row, _ in prompts],
            "prompt_ids": [token for _, token in prompts],
            "emitted_rows": [row for row, _ in emitted],
            "emitted_ids": [token for _, token in emitted],
        }
        texts = [] if state.history is None else [request.tokens for request in admitted]
        uploaded = upload([*columns.values(), *texts], torch.int64, self._device)
        of = dict(zip(columns, uploaded))
        rows = of["rows"]
        state.active.index_fill_(0, of["inactive"], False)
        # Recurrent layers locate their states by it, also those of inactive rows.
        state.block_table.index_fill_(0, of["inactive"], 0)
        if not admitted:
            return
        values = {name: of[name] for name in ("max_len", "max_drafts", "min_len", "seed", "top_k")}
        values["stop_ids"] = of["stop_ids"].view(-1, MAX_STOP_IDS)
        params = [[getattr(request.params, name) for request in admitted] for name in _PARAMETERS]
        values |= zip(_PARAMETERS, upload(params, torch.float64, self._device), strict=True)
        for name, value in values.items():
            tensor: Tensor = getattr(state, name)
            tensor.index_copy_(0, rows, value.to(tensor.dtype))
        if state.bias_ids is not None and state.bias is not None:
            state.bias.index_fill_(0, rows, 0)
            self._write_biases(state.bias_ids, state.bias, admitted)
        if state.in_prompt is not None and state.num_emitted is not None:
            state.in_prompt.index_fill_(0, rows, False)
            state.num_emitted.index_fill_(0, rows, 0)
            if prompts:
                true = torch.ones_like(of["prompt_ids"], dtype=torch.bool)
                state.in_prompt.index_put_((of["prompt_rows"], of["prompt_ids"]), true)
            if emitted:
                ones = torch.ones_like(of["emitted_ids"], dtype=torch.int32)
                state.num_emitted.index_put_((of["emitted_rows"], of["emitted_ids"]), ones, accumulate=True)
        if state.history is not None:
            for place, text in zip(at, uploaded[len(columns) :], strict=True):
                state.history[place, : len(text)] = text

    def _write_biases(self, bias_ids: Tensor, bias: Tensor, admitted: Sequence[Request]) -> None:
        width, biased = bias_ids.shape[1], dict[int, list[tuple[int, float, float]]]()
        for request in admitted:
            if entries := _biases(request):
                # Unused places repeat an entry, as equal ids must change equally.
                biased[self._row_of[request]] = entries + entries[:1] * (width - len(entries))
        if biased:
            ids, early, late = zip(*chain(*biased.values()), strict=True)
            rows, uploaded_ids = upload([list(biased), ids], torch.int64, self._device)
            (values,) = upload([[*early, *late]], torch.float64, self._device)
            bias_ids.index_copy_(0, rows, uploaded_ids.view(-1, width))
            bias.index_copy_(0, rows, values.view(2, -1, width).transpose(0, 1).to(bias.dtype))

    def _grant(self, state: DecodeState, grants: Sequence[Grant]) -> None:
        """Write the pages of grants to the rows' block tables."""
        places = [
            (self._row_of[grant.request], index, page)
            for grant in grants
            for index, page in enumerate(self._pages(grant), start=grant.first * self._pages_per_grant)
        ]
        if places:
            row, index, page = upload(list(zip(*places, strict=True)), torch.int64, self._device)
            state.block_table.index_put_((row, index), page.to(torch.int32))

    def _pages(self, grant: Grant) -> list[int]:
        n = self._pages_per_grant
        return [1 + (page - 1) * n + i for page in grant.pages for i in range(n)]


def _biases(request: Request) -> list[tuple[int, float, float]]:
    """The ids whose logits a request changes, with the changes before its `min_len` and from there on."""
    later = request.params.logit_bias or {}
    ends = request.stop_ids if request.params.min_tokens else ()
    early = {**later, **dict.fromkeys(ends, -math.inf)}
    return [(token, bias, later.get(token, 0.0)) for token, bias in early.items()]


def upload(columns: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Columns of numbers, not all of them empty, uploaded to the device by one asynchronous copy.

    dtype: int64 or float64.
    """
    # An array takes a tenth of the time of `torch.tensor`, which inspects each number.
    numbers = array("q" if dtype == torch.int64 else "d", chain.from_iterable(columns))
    flat = copied_to(device, torch.frombuffer(numbers, dtype=dtype))
    return list(flat.split([len(column) for column in columns]))


def _move_rows(state: DecodeState, rows: list[int]) -> None:
    """Move these rows of a state to its first rows. All others become inactive, with a block table of zeros."""
    moved: dict[str, Tensor] = {}
    if rows:
        (source,) = upload([rows], torch.int64, state.active.device)
        moved = {name: tensor.index_select(0, source) for name, tensor in state.named().items()}
        del moved["report"]  # it has been copied already
    state.active.zero_()
    state.block_table.zero_()
    for name, values in moved.items():
        getattr(state, name)[: len(rows)] = values


def _zero_counts(state: DecodeState) -> None:
    """For rows that have come without counts and biases."""
    own = state.named().keys() - state.without_counts.named().keys()
    for name in sorted(own):
        getattr(state, name).zero_()
