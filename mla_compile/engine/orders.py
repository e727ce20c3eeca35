"""What rank 0's engine tells the other ranks of a model that processes share: orders, as integers of 64 bits.

The first number says which order it is, the others are the bytes of JSON.
"""

import json
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
"""The sampling parameters that are numbers; of the others a step reads `logprobs` alone."""


def order_with(order: Order, content: Any) -> "array[int]":
    """An order with what JSON can hold."""
    text = json.dumps(content).encode()
    numbers = array("q", [order])
    numbers.frombytes(text.ljust(-(-len(text) // 8) * 8))
    return numbers


def content_of(numbers: "array[int]") -> Any:
    """What such an order comes with."""
    return json.loads(numbers[1:].tobytes())


def plan_of(order: "array[int]", requests: dict[int, Request]) -> Plan:
    """The plan that rank 0 launches.

    requests: those that run, by rank 0's numbers, which stand for rank 0's; brought up to date.
    """
    removed, admitted, grants, decodes, chunks = content_of(order)
    ended = [requests.pop(number) for number in removed]
    requests |= {number: _read(content) for number, content in admitted}
    return Plan(
        ended,
        [requests[number] for number, _ in admitted],
        [Grant(requests[number], *grant) for number, *grant in grants],
        [requests[number] for number in decodes],
        [Chunk(requests[number], *chunk) for number, *chunk in chunks],
    )


def written(request: Request) -> dict[str, Any]:
    """What a step reads of a request."""
    params = {name: kind(getattr(request.params, name)) for name, kind in _TYPES.items()}
    return {
        "prompt": request.prompt,
        "max_len": request.max_len,
        "max_drafts": request.max_drafts,
        "stop_ids": sorted(request.stop_ids),
        "params": params | {"logprobs": request.params.logprobs},
        "emitted": request.completion.token_ids,
        "is_chosen_on_host": request.is_chosen_on_host,
    }


def _read(content: dict[str, Any]) -> Request:
    return Request(
        content["prompt"],
        content["max_len"],
        params=SamplingParams(**content["params"]),
        stop_ids=frozenset(content["stop_ids"]),
        completion=Completion(token_ids=content["emitted"]),
        choose=_chosen_by_rank_0 if content["is_chosen_on_host"] else None,
        max_drafts=content["max_drafts"],
    )


def _chosen_by_rank_0(logits: Tensor, drafts: Tensor, completions: Sequence[Completion]) -> Tensor:
    """Stands for what chooses on the host: `HostChoice` takes over what rank 0 has chosen."""
    raise AssertionError("rank 0 chooses")
