"""Random traces through the real engine (`engine_traces.py`).

A failure prints its smallest trace, to be pasted into `run(...)`. `MLA_ENGINE_TRACES=10000` sets how many there are.
"""

import os
from collections import Counter
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings

from tests.engine_traces import Outcome, run
from tests.toy_engine import Trace, traces


def check_traces(count: int) -> Counter[str]:
    met: Counter[str] = Counter()

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(traces())
    def check(trace: Trace) -> None:
        outcome = run(trace)
        met["traces"] += 1
        for name, value in vars(outcome).items():
            if isinstance(value, int):
                met[name] += value > 0

    check()
    print(dict(met))
    return met


def test_a_requests_tokens_are_the_same_alone_and_in_any_trace() -> None:
    met = check_traces(50)
    assert all(met[field.name] for field in fields(Outcome) if field.name != "tokens"), met


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_thousands_of_traces() -> None:
    met = check_traces(int(os.environ.get("MLA_ENGINE_TRACES", "300")))
    for name, count in met.items():
        assert count > met["traces"] / 50, f"hardly any trace has {name}"
