"""The ops against the float64 definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_compile import MLABatch, mla_attention, prefill_segment
from mla_compile.ops.attention import prefill as prefill_module
from mla_compile.ops.paging import visible_keys
from tests.cases import Case, make_case, relative_error
from tests.reference import mla_attention_reference

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def check(case: Case, tolerance: float) -> None:
    expected_cache = case.clone()
    expected = mla_attention_reference(*expected_cache.args())
    out = mla_attention(*case.args())
    assert out.is_contiguous()
    assert relative_error(out, expected) < tolerance
    torch.testing.assert_close(case.kv_cache, expected_cache.kv_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"decode": [5, 0, 7]},
        {"decode": [5, 1, 8], "q_len": 4},
        {"decode": [5, 3, 8], "q_len": 4, "q_lens": [4, 0, 2]},
        {"prefill": [(5, 0), (1, 0), (9, 0)]},
        {"prefill": [(5, 3), (2, 0), (1, 12)]},
        {"decode": [4, 9], "q_len": 2, "prefill": [(5, 3), (3, 0)]},
    ],
    ids=["decode", "multi-token", "padded", "prefill", "chunked", "mixed"],
)
def test_attention_equals_the_definition_on_poisoned_pages(shape: dict, dtype: torch.dtype) -> None:
    check(make_case(**shape, dtype=dtype), TOLERANCE[dtype])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 20), max_size=4),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=3),
    st.integers(1, 6),
    st.sampled_from([1, 2, 16]),
    st.data(),
)
def test_attention_equals_the_definition_on_drawn_batches(
    decode: list[int], prefill: list[tuple[int, int]], q_len: int, page_size: int, data: st.DataObject
) -> None:
    if not decode and not prefill:
        return
    q_lens = data.draw(
        st.none() | st.lists(st.integers(0, q_len), min_size=len(decode), max_size=len(decode))
    )
    case = make_case(decode, prefill, q_len=q_len, q_lens=q_lens, page_size=page_size, dtype=torch.float64)
    check(case, 1e-11)


@pytest.mark.parametrize("chunk", range(1, 14))
def test_chunked_prefill_equals_one_pass_for_every_chunk_size(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_module, "KEY_BLOCK", 4)
    whole = make_case(prefill=[(13, 0)], seed=3)
    expected = mla_attention_reference(*whole.clone().args())
    cache = whole.kv_cache.clone()
    outputs = []
    for start in range(0, 13, chunk):
        n = min(chunk, 13 - start)
        part = slice(start, start + n)
        segment, _ = prefill_segment([n], [start], whole.batch.prefill.block_table, page_size=4)
        outputs.append(
            mla_attention(
                whole.q_nope[part],
                whole.q_pe[part],
                whole.kv_c[part],
                whole.k_pe[part],
                cache,
                whole.w_uk,
                whole.w_uv,
                MLABatch(prefill=segment),
                0.2,
            )
        )
    assert relative_error(torch.cat(outputs), expected) < 1e-5


def test_what_a_padded_row_holds_does_not_change_the_real_rows_bits() -> None:
    case = make_case([5, 9, 3], q_len=2, q_lens=[2, 2, 0], poison=False)
    other = case.clone()
    other.q_nope, other.q_pe = case.q_nope.clone(), case.q_pe.clone()
    other.q_nope[4:], other.q_pe[4:] = 1e6, -1e6
    assert torch.equal(mla_attention(*case.args())[:4], mla_attention(*other.args())[:4])
    assert torch.equal(case.kv_cache, other.kv_cache)


@pytest.mark.parametrize(
    ("seq_len", "q_lens", "expected"),
    [(7, None, [5, 6, 7]), (7, 2, [6, 7, 0]), (2, None, [0, 1, 2]), (0, 0, [0, 0, 0]), (1, 1, [1, 0, 0])],
)
def test_each_token_sees_its_own_number_of_keys(
    seq_len: int, q_lens: int | None, expected: list[int]
) -> None:
    valid = None if q_lens is None else torch.tensor([q_lens], dtype=torch.int32)
    assert visible_keys(torch.tensor([seq_len], dtype=torch.int32), valid, 3).tolist() == [expected]
