"""`prefill_torch`, and the implementation of batch-invariant calls on the CPU."""

import pytest

from mla_compile.ops.dispatch import Call
from tests.ops.prefill_conformance import (
    INVARIANT,
    PrefillConformance,
    PrefillInvariance,
    Subject,
    subject_of,
)

ON_THE_CPU = [row.name for row in INVARIANT if row.why_not(Call("cpu")) is None]


@pytest.fixture(scope="module", params=["reference", *ON_THE_CPU])
def subject(request: pytest.FixtureRequest) -> Subject:
    return subject_of(request.param)


class TestOnTheCpu(PrefillConformance):
    pass


class TestBatchInvariantOnTheCpu(PrefillInvariance):
    @pytest.fixture(params=ON_THE_CPU)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        return subject_of(request.param, drawn_weights=True)
