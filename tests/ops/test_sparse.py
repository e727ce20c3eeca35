"""Selection of keys by an indexer, and attention over selected keys, against their definitions in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from mla_compile import MLAError, mla_attention, mla_select_keys
from mla_compile.batch import MLABatch
from mla_compile.ops.attention import select_keys, sparse
from mla_compile.ops.attention.select_keys import mla_decode_select
from mla_compile.ops.attention.sparse import mla_sparse_attention
from tests.cases import Case, make_case, relative_error
from tests.kernel_cases import check_sparse, sparse_case
from tests.ops.test_contracts import attention_args
from tests.reference import attend_one, mla_attention_reference, tokens_of

ops = torch.ops.mla_compile
HEADS, WIDTH = 8, 12
SHAPES: dict[str, dict[str, Any]] = {
    "decode": {"decode": [5, 0, 17]},
    "padded drafts": {"decode": [5, 3, 18], "q_len": 4, "q_lens": [4, 0, 2]},
    "prefill": {"prefill": [(5, 0), (1, 0), (19, 0)]},
    "chunked": {"prefill": [(5, 3), (2, 0), (1, 12)]},
    "mixed": {"decode": [4, 9], "q_len": 2, "prefill": [(5, 13), (3, 0)]},
}


def visible_slots(batch: MLABatch) -> list[Tensor]:
    """The slots that each token sees, in the order of positions."""
    index = torch.arange
    size = batch.page_size
    return [table[index(keys) // size].long() * size + index(keys) % size for table, keys in tokens_of(batch)]


def index_case(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, weights and cache of an indexer with the batch of `case`: NaN where no row has written."""
    g = torch.Generator().manual_seed(seed)
    tokens, dtype = case.q_nope.shape[0], case.q_nope.dtype
    q, k = torch.randn(tokens, HEADS, WIDTH, generator=g), torch.randn(tokens, WIDTH, generator=g)
    weights = torch.randn(tokens, HEADS, generator=g)
    written = ~case.kv_cache[..., :1].isnan()
    cache = torch.randn(*case.kv_cache.shape[:2], WIDTH, generator=g).masked_fill(~written, torch.nan)
    return q.to(dtype), k.to(dtype), weights, cache.to(dtype)


def selection_of_definition(q: Tensor, weights: Tensor, cache: Tensor, batch: MLABatch, topk: int) -> list:
    """The sets of slots; of equal scores the lower position. `cache` has the new keys already."""
    flat, found = cache.flatten(0, 1).double(), []
    for token, slots in enumerate(visible_slots(batch)):
        products = (q[token].double() @ flat[slots].T).relu()
        scores = (weights[token].double() @ products).tolist()
        best = sorted(range(len(slots)), key=lambda i: (-scores[i], i))[:topk]
        found.append({int(slots[i]) for i in best})
    return found


def sets(selected: Tensor) -> list[set[int]]:
    return [{slot for slot in row if slot >= 0} for row in selected.tolist()]


@pytest.mark.parametrize("workspace", [1, 2**27])
@pytest.mark.parametrize("topk", [1, 6, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_selected_keys_are_those_of_the_definition(
    shape: str, topk: int, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select_keys, "_WORKSPACE", workspace)
    case = make_case(**SHAPES[shape])
    q, k, weights, cache = index_case(case)
    selected = mla_select_keys(q, k, weights, cache, case.batch, topk=topk)
    assert selected.dtype == torch.int32
    assert selected.shape == (q.shape[0], topk)
    segments = [s for s in (case.batch.decode, case.batch.prefill) if s is not None]
    for slot, key in zip(torch.cat([s.slot_mapping for s in segments]), k, strict=True):
        assert slot < 0 or torch.equal(cache.flatten(0, 1)[slot], key), "the new keys are in the cache"
    expected = selection_of_definition(q, weights, cache, case.batch, topk)
    assert sets(selected) == expected
    assert [(row >= 0).sum() for row in selected] == [len(row) for row in expected], "no slot comes twice"


def test_of_equal_scores_the_lower_position_is_selected_also_of_minus_zero() -> None:
    case = make_case(prefill=[(20, 0)], decode=[21])
    q, k, weights, cache = index_case(case)
    for sign in (0.0, -0.0):
        selected = mla_select_keys(q, k, torch.full_like(weights, sign), cache, case.batch, topk=5)
        assert sets(selected) == [set(slots[:5].tolist()) for slots in visible_slots(case.batch)]


def test_the_selection_of_very_long_contexts_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_compile.ops.attention import segments

    whole = make_case(prefill=[(5, 30), (3, 2), (4, 17)])
    expected = mla_select_keys(*index_case(whole), whole.batch, topk=6)
    monkeypatch.setattr(segments, "MAX_KEYS", 8)
    cut = make_case(prefill=[(5, 30), (3, 2), (4, 17)])
    assert cut.batch.prefill is not None
    assert cut.batch.prefill.key_slots.shape[0] == 6
    assert torch.equal(mla_select_keys(*index_case(cut), cut.batch, topk=6), expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_all_keys_is_dense_attention(shape: str, dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(**SHAPES[shape], dtype=dtype)
    selected = mla_select_keys(*index_case(case), case.batch, topk=24)
    expected = mla_attention_reference(*case.clone().args())
    assert relative_error(mla_attention(*case.args(), selected), expected) < tolerance


@pytest.mark.parametrize("workspace", [1, 2**25])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_selected_keys_is_that_of_the_definition(
    shape: str, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "_WORKSPACE", workspace)
    case = make_case(**SHAPES[shape])
    selected = mla_select_keys(*index_case(case), case.batch, topk=5)
    selected = selected[:, torch.tensor([3, 0, 4, 2, 1])]  # -1 may stand anywhere
    out = mla_attention(*case.args(), selected)
    for token, slots in enumerate(sets(selected)):
        latents = case.kv_cache.flatten(0, 1)[sorted(slots)]
        query = case.q_nope[token], case.q_pe[token]
        expected, _ = attend_one(*query, latents, case.w_uk, case.w_uv, case.softmax_scale)
        torch.testing.assert_close(out[token].double(), expected, rtol=1e-4, atol=1e-5)
        assert slots or not out[token].any()


def test_selected_fp8_latents_have_the_result_of_their_values() -> None:
    *tensors, scale = case = sparse_case([0, 1, 9, 30], topk=30, rank=128, fp8=True)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(1))
    check_sparse(case, mla_sparse_attention(*tensors[:3], tensors[3][:, order], softmax_scale=scale))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 20), max_size=4),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=3),
    st.integers(1, 4),
    st.sampled_from([1, 2, 16]),
    st.integers(1, 30),
    st.data(),
)
def test_drawn_batches_select_the_keys_of_the_definition(
    decode: list[int],
    prefill: list[tuple[int, int]],
    q_len: int,
    page_size: int,
    topk: int,
    data: st.DataObject,
) -> None:
    if not decode and not prefill:
        return
    q_lens = data.draw(
        st.none() | st.lists(st.integers(0, q_len), min_size=len(decode), max_size=len(decode))
    )
    case = make_case(decode, prefill, q_len=q_len, q_lens=q_lens, page_size=page_size)
    q, k, weights, cache = index_case(case)
    selected = mla_select_keys(q, k, weights, cache, case.batch, topk=topk)
    assert sets(selected) == selection_of_definition(q, weights, cache, case.batch, topk)


@pytest.mark.parametrize("shape", ["padded drafts", "chunked", "mixed"])
def test_the_ops_keep_their_contracts(shape: str) -> None:
    case = make_case(**SHAPES[shape], poison=False)
    q, k, weights, cache = index_case(case)
    fields = attention_args(case)[7:-1]
    opcheck(ops.mla_select_keys.default, (q, k, weights, cache, *fields, 5))
    selected = mla_select_keys(q, k, weights, cache, case.batch, topk=5)
    opcheck(ops.mla_attention.default, (*attention_args(case), None, selected))
    q_latent = torch.randn(*case.q_nope.shape[:2], case.w_uk.shape[2])
    opcheck(ops.mla_sparse_attention.default, (q_latent, case.q_pe, case.kv_cache, selected, 0.2))
    d, p = case.batch.decode, case.batch.prefill
    if d is not None:
        n = len(d.slot_mapping)
        rows = d.block_table, d.seq_lens, d.q_lens, d.q_len
        opcheck(ops.mla_decode_select.default, (q[:n], weights[:n], cache, *rows, 5))
    if p is not None:
        n = len(q) - len(p.slot_mapping)
        keys = p.cu_seqlens_q, p.cu_seqlens_k, p.key_slots
        opcheck(ops.mla_prefill_select.default, (q[n:], weights[n:], cache, *keys, 5))


@pytest.mark.long
def test_the_op_keeps_its_contract_with_fp8_latents() -> None:
    opcheck(ops.mla_sparse_attention.default, sparse_case([0, 9], topk=9, rank=128, fp8=True))


def test_what_is_wrong_is_named() -> None:
    case = make_case(decode=[5, 3])
    q, k, weights, cache = index_case(case)
    with pytest.raises(MLAError, match="q: expected 2 tokens"):
        mla_select_keys(q[:1], k[:1], weights[:1], cache, case.batch, topk=4)
    with pytest.raises(MLAError, match="topk: expected an integer >= 1"):
        mla_select_keys(q, k, weights, cache, case.batch, topk=0)
    rows = {name: getattr(case.batch.decode, name) for name in ("block_table", "seq_lens", "q_lens", "q_len")}
    for topk in (-1, 0, 2.5):
        with pytest.raises(MLAError, match=r"^topk: expected an integer >= 1"):
            mla_decode_select(q, weights, cache, **rows, topk=topk)
    with pytest.raises(MLAError, match="k: expected size 12"):
        mla_select_keys(q, k[:, :5], weights, cache, case.batch, topk=4)
    with pytest.raises(MLAError, match=r"page_size: expected that of kv_cache, 2"):
        mla_select_keys(q, k, weights, cache[:, :2].contiguous(), case.batch, topk=4)
    selected = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(MLAError, match=r"selected: expected slots in \[-1, 15\]"):
        mla_attention(*case.args(), selected + 20)
    with pytest.raises(MLAError, match=r"selected: expected int32"):
        mla_attention(*case.args(), selected.long())
    with pytest.raises(MLAError, match=r"selected: expected size 2 \(tokens"):
        mla_sparse_attention(torch.zeros(2, 3, 16), case.q_pe, case.kv_cache, selected[:1], softmax_scale=0.2)


def test_without_a_slot_or_a_page_the_result_is_zero_and_contiguous() -> None:
    queries = torch.ones(3, 2, 4).transpose(0, 1), torch.ones(2, 3, 2)
    none = torch.full((2, 1), -1, dtype=torch.int32)
    for cache, selected in (
        (torch.ones(0, 2, 6), none),
        (torch.ones(1, 2, 6), none),
        (torch.ones(1, 2, 6), none[:, :0]),
    ):
        out = mla_sparse_attention(*queries, cache, selected, softmax_scale=0.5)
        assert out.is_contiguous() and torch.equal(out, torch.zeros(2, 3, 4))
