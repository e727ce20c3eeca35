"""The pauses of a stream while other clients ask for every kind of request at random."""

import asyncio
import json
import os
import random
import time
from typing import Any

import pytest

from benchmarks.http_client import ask, stream
from tests.serving.load import ENGINE_THREADS, MODEL
from tests.serving.servers import served

SECONDS = float(os.environ.get("PAUSES_SECONDS", "40"))
"""At 150, both kinds of step are compiled in between on 2 cores; less keeps CI short."""

SCHEMAS = [
    {
        "type": "object",
        "properties": {name: {"type": kind}},
        "required": [name],
        "additionalProperties": False,
    }
    for name in ("name", "number", "city", "verse")
    for kind in ("string", "integer", "boolean")
]


def asked(rng: random.Random) -> dict[str, Any]:
    """A request of any kind, of a kind that another one has not compiled, perhaps."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "And he said " * rng.randint(1, 60), "max_tokens": 24}
    kinds: list[dict[str, Any]] = [
        {"logprobs": rng.randint(1, 20)},
        {"temperature": rng.random(), "top_p": 0.9, "seed": rng.randrange(99)},
        {"presence_penalty": 1.0, "frequency_penalty": rng.random()},
        {"repetition_penalty": 1.2, "temperature": 0.8},
        {"temperature": 0.8, "top_k": rng.randint(1, 50), "min_p": 0.1, "n": rng.randint(1, 3)},
        {"stop": ["e "], "stop_token_ids": [rng.randrange(3, 3000) for _ in range(rng.randint(1, 60))]},
        {"min_tokens": rng.randint(1, 20), "logit_bias": {str(rng.randrange(3000)): 5}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "any", "schema": rng.choice(SCHEMAS)},
            }
        },
    ]
    for kind in rng.sample(kinds, rng.randint(1, 2)):
        body |= kind
    return body


async def watch(url: str, end: float, gaps: list[float]) -> None:
    """Read one plain stream after another; add the seconds between the events of each."""
    while time.monotonic() < end:
        body = {"model": MODEL, "prompt": "In the beginning", "max_tokens": 400, "ignore_eos": True}
        last = None
        async for event in stream(url, body):
            now = time.monotonic()
            if last is not None:
                gaps.append(now - last)
            last = now
            if event == b"[DONE]":
                break


async def ask_for_every_kind(url: str, end: float, statuses: list[int]) -> None:
    rng = random.Random(0)
    while time.monotonic() < end:
        await asyncio.sleep(rng.expovariate(0.7))
        answer = await ask(url, "POST", "/v1/completions", asked(rng))
        statuses.append(answer.status)
        assert answer.status == 200, answer.body.decode()


def histogram(gaps: list[float]) -> dict[str, int]:
    """The number of gaps below each bound, in seconds."""
    bounds = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 10.0, 1000.0]
    return {
        f"{low} to {high}": sum(low <= gap < high for gap in gaps)
        for low, high in zip([0.0, *bounds], bounds, strict=False)
    }


@pytest.mark.load
@pytest.mark.timeout(600 + 2 * SECONDS)
def test_no_kind_of_request_pauses_the_stream_of_another() -> None:
    gaps: list[float] = []
    statuses: list[int] = []

    async def load(url: str) -> None:
        end = time.monotonic() + SECONDS
        await asyncio.gather(
            watch(url, end, gaps), *(ask_for_every_kind(url, end, statuses) for _ in range(2))
        )

    with served("--served-model-name", MODEL, **ENGINE_THREADS) as server:
        asyncio.run(load(server.url()))
    print(json.dumps({"requests": len(statuses), "longest": round(max(gaps), 3), "gaps": histogram(gaps)}))
    assert len(statuses) > SECONDS / 10
    assert max(gaps) < 2
