"""What rank 0's engine tells the other ranks of a model that processes share: orders, as integers of 64 bits.

The first number says which order it is.
"""

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Any

from torch import Tensor

from mla_compile.engine.completion import Completion
from mla_compile.engine.request import Request
from mla_compile.engine.scheduler import Chunk, Grant, Plan
from mla_compile.sampling_params import SamplingParams


class Order(IntEnum):
    """LOAD: a checkpoint, by the arguments of `load_model`. ENGINE: make one, with these settings.

    LAUNCH: a plan. WARM_UP: for a kind of step. BEGIN_ANEW: forget all requests. CLOSE: no engine is left to follow.
    """

    LOAD = 0
    ENGINE = 1
    LAUNCH = 2
    WARM_UP = 3
    BEGIN_ANEW = 4
    CLOSE = 5


_TYPES = {field.name: field.type for field in fields(SamplingParams) if field.type in (int, float)}
"""The sampling parameters that are numbers; of the others a step reads `logprobs` alone, which may be None."""
_NONE = -1
_MANY = 2**31
"""More drafts than a step makes."""


def order_with(order: Order, settings: dict[str, Any]) -> "array[int]":
    """An order with settings, which JSON can hold."""
    return array("q", [order, *json.dumps(settings).encode()])


def settings_of(numbers: "array[int]") -> dict[str, Any]:
    """The settings of such an order."""
    found: dict[str, Any] = json.loads(bytes(numbers[1:].tolist()))
    return found


class PlanWriter:
    """Writes plans; a request is known by a number from its admission until it is removed."""

    def __init__(self) -> None:
        self._number_of: dict[Request, int] = {}
        self._next = 0

    def order(self, plan: Plan) -> "array[int]":
        """To launch a plan."""
        numbers = array("q", [Order.LAUNCH])
        _append_list(numbers, [self._number_of.pop(request) for request in plan.removed])
        numbers.append(len(plan.admitted))
        for request in plan.admitted:
            self._number_of[request] = self._next
            _append_request(numbers, self._next, request)
            self._next += 1
        number_of = self._number_of
        numbers.append(len(plan.grants))
        for grant in plan.grants:
            numbers.extend((number_of[grant.request], grant.first))
            _append_list(numbers, grant.pages)
        _append_list(numbers, [number_of[request] for request in plan.decodes])
        numbers.append(len(plan.chunks))
        for chunk in plan.chunks:
            numbers.extend((number_of[chunk.request], chunk.start, chunk.length, chunk.is_last))
        return numbers

    def forget_all(self) -> None:
        """No request runs any more."""
        self._number_of.clear()


class PlanReader:
    """Reads what a `PlanWriter` has written: plans of requests that stand for those of rank 0."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def plan(self, order: "array[int]") -> Plan:
        read = _Numbers(order)
        removed = [self._requests.pop(number) for number in read.list()]
        admitted = []
        for _ in range(read.one()):
            number, request = read.one(), _read_request(read)
            self._requests[number] = request
            admitted.append(request)
        requests = self._requests
        grants = [Grant(requests[read.one()], read.one(), read.list()) for _ in range(read.one())]
        decodes = [requests[number] for number in read.list()]
        chunks = [
            Chunk(requests[read.one()], read.one(), read.one(), bool(read.one())) for _ in range(read.one())
        ]
        return Plan(removed, admitted, grants, decodes, chunks)

    def forget_all(self) -> None:
        """See `PlanWriter`."""
        self._requests.clear()


class _Numbers:
    """The numbers of an order behind the first, one after the other."""

    def __init__(self, order: "array[int]") -> None:
        self._order, self._place = order, 1

    def one(self) -> int:
        self._place += 1
        return self._order[self._place - 1]

    def list(self) -> list[int]:
        """A length, and so many numbers."""
        length = self.one()
        self._place += length
        return self._order[self._place - length : self._place].tolist()


def _append_list(numbers: "array[int]", values: Sequence[int]) -> None:
    numbers.append(len(values))
    numbers.extend(values)


def _append_request(numbers: "array[int]", number: int, request: Request) -> None:
    params = request.params
    logprobs = _NONE if params.logprobs is None else params.logprobs
    max_drafts = _NONE if request.max_drafts is None else min(request.max_drafts, _MANY)
    numbers.extend((number, request.max_len, max_drafts, request.is_chosen_on_host, logprobs))
    numbers.extend(_bits(getattr(params, name), kind) for name, kind in _TYPES.items())
    for values in (sorted(request.stop_ids), request.prompt, request.said.token_ids):
        _append_list(numbers, values)


def _read_request(read: _Numbers) -> Request:
    max_len, max_drafts, is_chosen_on_host, logprobs = (read.one() for _ in range(4))
    told: dict[str, Any] = {name: _value(read.one(), kind) for name, kind in _TYPES.items()}
    if logprobs != _NONE:
        told["logprobs"] = logprobs
    stop_ids, prompt, said = (read.list() for _ in range(3))
    return Request(
        prompt,
        max_len,
        params=SamplingParams(**told),
        stop_ids=frozenset(stop_ids),
        completion=Completion(token_ids=said),
        choose=_chosen_by_rank_0 if is_chosen_on_host else None,
        max_drafts=None if max_drafts == _NONE else max_drafts,
    )


def _bits(value: float, kind: object) -> int:
    """A parameter as an integer: of a float its bits."""
    if kind is int:
        return int(value)
    bits: int = struct.unpack("q", struct.pack("d", value))[0]
    return bits


def _value(bits: int, kind: object) -> float:
    if kind is int:
        return bits
    value: float = struct.unpack("d", struct.pack("q", bits))[0]
    return value


def _chosen_by_rank_0(logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
    """Stands for what chooses on the host: `Launcher` takes over what rank 0 has chosen."""
    raise AssertionError("rank 0 chooses")
