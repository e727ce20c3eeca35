"""`decode_triton` in Triton's interpreter: the conformance suite, then what its plans may not change.

`tests/ops/test_interpreted.py` runs this file.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels.decode import decode_triton, decode_triton_invariant  # noqa: E402
from mla_compile.ops.attention.tiles import AttentionTiles  # noqa: E402
from tests.kernel_cases import BACKENDS, DecodeCase, check_decode, decode_case  # noqa: E402
from tests.ops.conformance import DecodeConformance, DecodeInvariance, Subject  # noqa: E402

SMALL = AttentionTiles(queries=16, keys=16, warps=4, stages=1)


slow = pytest.mark.slow


@pytest.fixture(scope="module", params=["triton", pytest.param("triton_invariant", marks=slow)])
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(BACKENDS[request.param])


class TestTriton(DecodeConformance):
    pass


in_small_splits = partial(decode_triton_invariant, tiles=SMALL, split_unit=16, split_block=2)
"""So that short texts have splits enough for some blocks of them, and programs some splits."""
in_turn = partial(in_small_splits, programs=2, at_once=1)


@slow
class TestBatchInvariant(DecodeInvariance):
    borders: tuple[int, ...] = (1, 16, 64, 96, 128, 192)

    @pytest.fixture(params=["in_small_splits", "in_turn"])
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        return Subject(replace(BACKENDS["triton_invariant"], function=f"{__name__}:{request.param}"))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=slow), torch.bfloat16], ids=str)
def test_one_drawn_set_of_texts_is_batch_invariant(dtype: torch.dtype) -> None:
    suite = TestBatchInvariant()
    suite.borders, suite.drawn = (16, 32, 64), 1
    suite.test_drawn_calls(
        Subject(replace(BACKENDS["triton_invariant"], function=f"{__name__}:in_turn")), dtype
    )


def test_splits_that_are_shares_of_a_row_are_not_batch_invariant() -> None:
    """The suite fails for them."""
    subject = Subject(replace(BACKENDS["triton"], function=f"{__name__}:in_shares"))
    with pytest.raises(AssertionError, match="q_len 2"):
        TestBatchInvariant().test_one_of_many_tokens(subject, 2)


in_shares = partial(decode_triton, tiles=SMALL, splits=3, min_keys=16)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)], ids=str)
def test_neither_programs_nor_rows_at_a_time_change_a_bit(dtype: torch.dtype) -> None:
    case = decode_case([150, 0, 33, 65, 20], q_len=3, q_lens=[3, 0, 2, 3, 1], heads=6, dtype=dtype)
    run = partial(decode_triton_invariant, case.operands(), tiles=SMALL, split_unit=16, split_block=4)
    first = run(programs=1, at_once=5)
    check_decode(case, first)
    for programs, at_once in ((1, 1), (2, 5), (9, 3)):
        assert all(map(torch.equal, first, run(programs=programs, at_once=at_once)))


def run(case: DecodeCase, **plan) -> None:
    check_decode(case, decode_triton(case.operands(), **plan))


@pytest.mark.parametrize(
    ("rank", "rope", "heads"), [(512, 64, 20), (256, 64, 32), (256, 32, 40), (48, 16, 5)]
)
def test_widths_and_heads_of_real_models(rank: int, rope: int, heads: int) -> None:
    run(decode_case([70, 3], rank=rank, rope=rope, heads=heads, page_size=64, dtype=torch.bfloat16))


@pytest.mark.parametrize("around", [32, 96, 128])
def test_lengths_about_the_borders_of_many_splits(around: int) -> None:
    lengths = [around - 1, around, around + 1, 128]
    run(decode_case(lengths, q_len=2, heads=4), tiles=SMALL, splits=4, min_keys=32)


def test_ragged_rows_in_many_splits() -> None:
    run(decode_case([9, 40, 2, 17, 33], q_len=4, q_lens=[4, 1, 3, 0, 2]), tiles=SMALL, splits=3, min_keys=16)
    run(decode_case([300, 1, 2, 170], heads=4), tiles=SMALL, splits=8, min_keys=32)


def test_an_inactive_row_is_not_read_whatever_its_state_holds() -> None:
    case = decode_case([20, 0, 30], q_len=2, q_lens=[2, 0, 1])
    out, lse = decode_triton(replace(case, seq_lens=torch.tensor([20, 30, 30]).int()).operands(), splits=2)
    check_decode(case, (out, lse))


def test_a_rows_bits_do_not_depend_on_the_other_rows() -> None:
    lengths = [70, 33, 0, 5]
    case = decode_case(lengths, q_len=2, heads=9)
    alone = decode_case([n if row == 1 else 0 for row, n in enumerate(lengths)], q_len=2, heads=9, columns=5)
    pages = case.block_table[1].clone()
    alone.block_table[1] = pages
    for name in ("q_latent", "q_pe"):
        getattr(alone, name)[2:4] = getattr(case, name)[2:4]
    alone.kv_cache = case.kv_cache
    for plan in ({}, {"tiles": SMALL, "splits": 3, "min_keys": 16}):
        together, by_itself = decode_triton(case.operands(), **plan), decode_triton(alone.operands(), **plan)
        assert all(torch.equal(a[2:4], b[2:4]) for a, b in zip(together, by_itself))


@settings(max_examples=6)
@given(st.data())
def test_drawn_batches_and_plans(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    q_len = data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(0, 90), min_size=rows, max_size=rows))
    q_lens = data.draw(st.none() | st.lists(st.integers(0, q_len), min_size=rows, max_size=rows))
    case = decode_case(
        lengths,
        q_len=q_len,
        q_lens=q_lens,
        heads=data.draw(st.integers(1, 9)),
        rank=16 * data.draw(st.integers(1, 4)),
        rope=16 * data.draw(st.integers(1, 2)),
        page_size=data.draw(st.sampled_from([1, 3, 16, 64])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=data.draw(st.integers(0, 99)),
    )
    tiles = AttentionTiles(
        data.draw(st.sampled_from([16, 32, 64])), data.draw(st.sampled_from([16, 32, 64])), 4, 1
    )
    run(
        case,
        tiles=tiles,
        splits=data.draw(st.integers(1, 6)),
        min_keys=data.draw(st.sampled_from([16, 32, 128])),
    )
