"""The conformance suite on the CPU: plain torch, and what becomes of the backends that take less than it does."""

from dataclasses import replace

import pytest
from torch import Tensor

from mla_compile.ops.backends import DECODE_BACKENDS, DecodeCall, QueryLenSupport
from mla_compile.ops.decode import decode_torch
from tests.ops.conformance import DecodeConformance, Subject

REFERENCE = DECODE_BACKENDS[-1]


def one_token_a_row(*args: Tensor) -> tuple[Tensor, Tensor]:
    *_, q_lens, q_len, _ = args
    assert q_lens is None and q_len == 1, "a SINGLE_ONLY backend got more than one token a row"
    return decode_torch(*args)


def as_many_in_every_row(*args: Tensor) -> tuple[Tensor, Tensor]:
    *_, q_lens, _, _ = args
    assert q_lens is None, "a UNIFORM backend got rows that differ"
    return decode_torch(*args)


SUBJECTS = [
    *(backend for backend in DECODE_BACKENDS if backend.why_not(DecodeCall("cpu")) is None),
    replace(
        REFERENCE,
        name="single",
        query_len_support=QueryLenSupport.SINGLE_ONLY,
        function=f"{__name__}:one_token_a_row",
    ),
    replace(
        REFERENCE,
        name="uniform",
        query_len_support=QueryLenSupport.UNIFORM,
        function=f"{__name__}:as_many_in_every_row",
    ),
]


@pytest.fixture(scope="module", params=SUBJECTS, ids=lambda backend: backend.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


class TestOnTheCpu(DecodeConformance):
    pass
