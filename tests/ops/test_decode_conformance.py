"""The conformance suite on the CPU: plain torch, alone and as a backend with constraints."""

from dataclasses import replace

import pytest
from torch import Tensor

from mla_compile.ops.attention.decode import decode_torch
from mla_compile.ops.attention.decode_backends import DECODE_BACKENDS, QueryLenSupport
from mla_compile.ops.attention.operands import DecodeOperands
from mla_compile.ops.dispatch import Call
from tests.kernel_cases import BACKENDS
from tests.ops.conformance import INVARIANT, DecodeConformance, DecodeInvariance, Shown, Subject, Texts

REFERENCE = BACKENDS["reference"]


def one_token_a_row(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    assert operands.q_lens is None and operands.q_len == 1, (
        "a SINGLE_ONLY backend got more than one token a row"
    )
    return decode_torch(operands)


def as_many_in_every_row(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    assert operands.q_lens is None, "a UNIFORM backend got rows that differ"
    return decode_torch(operands)


SUBJECTS = [
    *(backend for backend in DECODE_BACKENDS if backend.why_not(Call("cpu")) is None),
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


class TestBatchInvariantOnTheCpu(DecodeInvariance):
    @pytest.fixture(params=[b for b in INVARIANT if b.why_not(Call("cpu")) is None], ids=lambda b: b.name)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        return Subject(request.param)


@pytest.mark.parametrize("row", [Shown(0, 70, 2), Shown(0, 70, 1)], ids=["q_len", "table"])
def test_the_suite_notices_a_backend_that_is_not_batch_invariant(row: Shown) -> None:
    texts = Texts(Subject(replace(REFERENCE, function=f"{__name__}:sums_by_batch")), [70])
    with pytest.raises(AssertionError, match=r"\(0, 6[89]\) in "):
        texts.check([row], row.valid, more_columns=1)


def sums_by_batch(operands: DecodeOperands) -> tuple[Tensor, Tensor]:
    """The difference, a unit in the last place, that product shapes which depend on the batch may make."""
    out, lse = decode_torch(operands)
    return out if operands.q_latent.shape[0] * operands.block_table.shape[1] == 5 else out.nextafter(
        out + 1
    ), lse
