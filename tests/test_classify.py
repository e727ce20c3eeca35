"""Which rows decode with how many query tokens, and which take the prefill path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_compile import MLAError
from mla_compile.engine.layout import RowLayout, classify
from mla_compile.ops.backends import QueryLenSupport

SINGLE_ONLY, UNIFORM, VARLEN = QueryLenSupport


@pytest.mark.parametrize("support", QueryLenSupport)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_one_length_all_decode(support: QueryLenSupport, padded: bool) -> None:
    found = classify([2, 2, 2, 2], threshold=2, support=support, padded=padded)
    assert found == RowLayout(decode=[0, 1, 2, 3], q_len=2, q_lens=None, prefill=[])


def test_the_shortest_rows_govern_a_uniform_backend_without_padding() -> None:
    found = classify([1, 2, 2, 1], threshold=2, support=UNIFORM, padded=False)
    assert found == RowLayout(decode=[0, 3], q_len=1, q_lens=None, prefill=[1, 2])


@pytest.mark.parametrize("support", [VARLEN, SINGLE_ONLY])  # the latter gets them flattened
def test_rows_of_any_length_decode_where_the_backend_takes_them(support: QueryLenSupport) -> None:
    found = classify([1, 2, 2, 1], threshold=4, support=support, padded=False)
    assert found == RowLayout(decode=[0, 1, 2, 3], q_len=2, q_lens=[1, 2, 2, 1], prefill=[])


@pytest.mark.parametrize("support", QueryLenSupport)
def test_padded_rows_all_decode_in_one_shape(support: QueryLenSupport) -> None:
    found = classify([1, 2, 2, 1], threshold=4, support=support, padded=True)
    assert found == RowLayout(decode=[0, 1, 2, 3], q_len=4, q_lens=[1, 2, 2, 1], prefill=[])


def test_rows_beyond_the_threshold_prefill() -> None:
    assert classify([3, 1, 9], threshold=1, support=SINGLE_ONLY, padded=False) == RowLayout(
        [1], 1, None, [0, 2]
    )
    assert classify([5, 6], threshold=4, support=VARLEN, padded=True) == RowLayout([], 0, None, [0, 1])
    assert classify([], threshold=4, support=UNIFORM, padded=False) == RowLayout([], 0, None, [])


@pytest.mark.parametrize(("lens", "threshold", "name"), [([1], 0, "threshold"), ([1, 0], 2, "query_lens")])
def test_lengths_below_one_are_refused(lens: list[int], threshold: int, name: str) -> None:
    with pytest.raises(MLAError, match=name):
        classify(lens, threshold=threshold, support=VARLEN, padded=False)


@given(st.lists(st.integers(1, 9)), st.integers(1, 9), st.sampled_from(QueryLenSupport), st.booleans())
def test_every_row_is_dealt_once_and_within_what_the_backend_takes(
    lens: list[int], threshold: int, support: QueryLenSupport, padded: bool
) -> None:
    found = classify(lens, threshold=threshold, support=support, padded=padded)
    assert sorted(found.decode + found.prefill) == list(range(len(lens)))
    own = [lens[row] for row in found.decode]
    assert all(length <= min(threshold, found.q_len) for length in own)
    assert found.q_lens == (None if set(own) <= {found.q_len} else own)
    if support is UNIFORM and not padded:
        assert len(set(own)) <= 1
    else:
        assert all(lens[row] > threshold for row in found.prefill)
