"""`moe_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_interpreter import add_in_order, mend_interpreter

mend_interpreter()

from mla_compile.ops.experts.kernels import moe  # noqa: E402
from mla_compile.ops.experts.kernels.moe import moe_triton  # noqa: E402
from mla_compile.ops.experts.kernels.pairs import sort_pairs  # noqa: E402
from mla_compile.ops.experts.tiles import MAX_UNSORTED_PAIRS  # noqa: E402
from mla_compile.ops.linear.tiles import ProductTiles  # noqa: E402
from tests.kernel_cases import (  # noqa: E402
    MoeCase,
    check_moe,
    check_padded_moe,
    moe_case,
    moe_reference,
    padding,
)

SMALL = ProductTiles(tokens=16, columns=16, depth=16, warps=4, stages=1)


@pytest.mark.parametrize(
    ("tokens", "topk", "dtype"),
    [
        *((tokens, topk, torch.float32) for tokens in (1, 40) for topk in (1, 4)),
        (3, 4, torch.bfloat16),
        (40, 4, torch.bfloat16),
    ],
    ids=str,
)
def test_tokens_and_choices_equal_the_definition(tokens: int, topk: int, dtype: torch.dtype) -> None:
    case = moe_case(tokens, topk, among=6, dtype=dtype)
    check_moe(case, moe_triton(case.operands()))


@pytest.mark.parametrize("experts", [2, pytest.param(300, marks=pytest.mark.slow)])
def test_all_tokens_on_one_expert_more_than_fit_a_tile(experts: int) -> None:
    case = moe_case(75, 2, experts=experts, among=1, hidden=16, intermediate=16)
    check_moe(case, moe_triton(case.operands()))


@pytest.mark.parametrize(
    "size",
    [(17, 33), *(pytest.param(size, marks=pytest.mark.slow) for size in ((16, 16), (40, 8), (100, 70)))],
    ids=str,
)
def test_sizes_that_fill_no_tile(size: tuple[int, int]) -> None:
    case = moe_case(5, 2, hidden=size[0], intermediate=size[1])
    check_moe(case, moe_triton(case.operands(), gate_up=SMALL, down=SMALL))


def test_rows_may_be_apart_and_weights_in_half_precision() -> None:
    case = moe_case(6, 2, dtype=torch.bfloat16)
    apart = torch.cat([case.x, case.x], 1)[:, : case.x.shape[1]]
    case = replace(case, x=apart, topk_weights=case.topk_weights.bfloat16())
    check_moe(case, moe_triton(case.operands()))
    check_moe(case, moe_triton(replace(case, x=case.x.T.contiguous().T).operands()))


def test_a_tokens_bits_do_not_depend_on_the_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    add_in_order(monkeypatch)
    case, other = moe_case(12, 4), moe_case(12, 4, seed=1)
    other.w_gate_up, other.w_down = case.w_gate_up, case.w_down
    for name in ("x", "topk_weights", "topk_ids"):
        getattr(other, name)[5] = getattr(case, name)[5]
    assert torch.equal(moe_triton(case.operands())[5], moe_triton(other.operands())[5])


FP8 = [
    # tokens, top k, shared, hidden, intermediate; up to 16 pairs have tiles of their own
    pytest.param((3, 2, 0, 200, 150), torch.float32, marks=pytest.mark.slow),
    ((3, 2, 0, 140, 140), torch.bfloat16),
    ((9, 1, 2, 140, 128), torch.bfloat16),
    ((5, 4, 1, 130, 40), torch.float32),
    ((4, 2, 2, 40, 128), torch.bfloat16),
    *(
        pytest.param((140, 4, 2, 140, 256), dtype, marks=pytest.mark.slow)
        for dtype in (torch.float32, torch.bfloat16)
    ),
]


@pytest.mark.parametrize(("sizes", "dtype"), FP8, ids=str)
def test_weights_in_fp8(sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, topk, shared, hidden, intermediate = sizes
    case = moe_case(
        *(tokens, topk), shared=shared, hidden=hidden, intermediate=intermediate, dtype=dtype, fp8=True
    )
    check_moe(case, moe_triton(case.operands()))
    monkeypatch.setattr(moe, "MAX_UNSORTED_PAIRS", 0)
    row_lens, q_len, runs = padding(case, 2, [1])
    check_padded_moe(case, moe_triton(case.operands(row_lens, q_len), gate_up=SMALL, down=SMALL), runs)


def test_a_tokens_bits_with_weights_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many and few other tokens, sorted or not, in any tiles."""
    add_in_order(monkeypatch)
    case = moe_case(24, 2, hidden=150, intermediate=140, shared=1, dtype=torch.bfloat16, fp8=True)
    whole = moe_triton(case.operands(), in_order=True)
    check_moe(case, whole)
    part = replace(case, **{name: getattr(case, name)[3:7] for name in ("x", "topk_weights", "topk_ids")})
    wide = ProductTiles(tokens=32, columns=32, depth=128, warps=4, stages=1)
    for tiles in (None, wide):
        got = moe_triton(part.operands(), gate_up=tiles, down=tiles, in_order=True)
        assert torch.equal(got, whole[3:7])
    monkeypatch.setattr(moe, "MAX_UNSORTED_PAIRS", 0)
    assert torch.equal(moe_triton(case.operands(), in_order=True), whole)


@pytest.mark.parametrize("tokens", [4, 20])
def test_no_weight_in_fp8_is_rounded(tokens: int) -> None:
    """The weights are too small for float16; their products are not."""
    case = moe_case(tokens, 2, among=3, hidden=150, intermediate=140, shared=1, dtype=torch.float16, fp8=True)
    check_moe(case, moe_triton(case.operands()))
    gate_up, down, gate, up, of_shared = case.scales
    scales = gate_up, down * 2.0**-20, gate, up, of_shared * 0
    case = replace(case, scales=scales, topk_weights=case.topk_weights * 2.0**20)
    expected = moe_reference(replace(case, x=case.x.double()))
    error = (moe_triton(case.operands()).double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-3


@cache
def many_sorted_tokens() -> tuple[MoeCase, Tensor]:
    """Results of the kernels with products that add in order."""
    case = moe_case(140, 4, experts=6, hidden=40, intermediate=33, shared=1, dtype=torch.bfloat16)
    assert case.topk_ids.numel() > MAX_UNSORTED_PAIRS
    return case, moe_triton(case.operands())


@pytest.mark.parametrize("tokens", [1, pytest.param(9, marks=pytest.mark.slow), 130])
@pytest.mark.parametrize("padded", [False, True])
def test_a_tokens_bits_are_those_of_many_sorted_tokens(
    tokens: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other tiles, sorted or not, among other tokens, and beside padding."""
    add_in_order(monkeypatch)
    case, whole = many_sorted_tokens()
    part = replace(
        case, **{name: getattr(case, name)[-tokens:].clone() for name in ("x", "topk_weights", "topk_ids")}
    )
    row_lens, q_len, runs = (
        padding(part, 1, [i % 2 for i in range(tokens // 2)]) if padded else (None, 1, slice(None))
    )
    got = moe_triton(part.operands(row_lens, q_len), gate_up=SMALL)
    assert torch.equal(got[runs], whole[-tokens:][runs])


@pytest.mark.parametrize(
    ("experts", "q_len", "lens"),
    [(8, 4, [4, 1, 0, 2]), (300, 4, [4, 1, 0, 2]), (8, 1, [0, 1, 1, 0]), (8, 3, [0])],
    ids=["drafts", "by pair", "rows", "and prompts"],
)
def test_padding_gets_no_expert(experts: int, q_len: int, lens: list[int]) -> None:
    case = moe_case(16, 2, experts=experts, hidden=16, intermediate=16)
    row_lens, q_len, runs = padding(case, q_len, lens)
    case.w_gate_up[:1], case.w_down[:1] = torch.nan, torch.nan  # an expert that only padding chose
    case.topk_ids.clamp_(min=1)
    case.topk_ids[~runs] = 0
    check_padded_moe(case, moe_triton(case.operands(row_lens, q_len)), runs)


@settings(max_examples=6)
@given(st.data())
def test_pairs_are_sorted_as_a_stable_sort_does(data: st.DataObject) -> None:
    experts = data.draw(st.sampled_from([1, 2, 7, 16, 17, 100]))
    case = moe_case(
        data.draw(
            st.integers(1, 2600)
        ),  # pairs up to five times what a program sorts at a time, and four shares
        data.draw(st.integers(1, 8)),
        experts=experts,
        among=data.draw(st.integers(1, experts)),
        hidden=1,
        intermediate=1,
        seed=data.draw(st.integers(0, 99)),
    )
    row_lens, q_len, runs = drawn_padding(data, case)
    order = case.topk_ids.flatten().argsort(stable=True)
    order = order[runs.repeat_interleave(case.topk_ids.shape[1])[order]]
    counts = case.topk_ids[runs].flatten().bincount(minlength=experts)

    starts, got, places = sort_pairs(case.topk_ids, experts, row_lens, q_len)
    assert starts[0] == 0 and starts.diff().tolist() == counts.tolist()
    assert torch.equal(got[: starts[-1]], order.int())
    assert torch.equal(places[order], torch.arange(len(order)).int())


@pytest.mark.parametrize("pairs", [MAX_UNSORTED_PAIRS, MAX_UNSORTED_PAIRS + 1])
def test_pairs_are_sorted_from_some_number_on(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(moe, "sort_pairs", lambda *args: calls.append(args) or sort_pairs(*args))
    case = moe_case(pairs, 1, hidden=16, intermediate=16)
    check_moe(case, moe_triton(case.operands()))
    assert len(calls) == (pairs > MAX_UNSORTED_PAIRS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("among", [1, 5])
def test_many_pairs_with_the_tiles_that_they_get(among: int, dtype: torch.dtype) -> None:
    case = moe_case(75, 8, experts=6, among=among, hidden=70, intermediate=33, shared=2, dtype=dtype)
    row_lens, q_len, runs = padding(case, 4, [4, 1, 0, 2])
    check_padded_moe(case, moe_triton(case.operands(row_lens, q_len)), runs)


def drawn_padding(data: st.DataObject, case: MoeCase) -> tuple[Tensor | None, int, Tensor]:
    """`row_lens` and `q_len` of leading decode rows, or None, and the tokens that run."""
    tokens = len(case.x)
    if data.draw(st.booleans()):
        return None, 1, torch.ones(tokens, dtype=torch.bool)
    q_len = data.draw(st.integers(1, min(4, tokens)))
    return padding(case, q_len, data.draw(st.lists(st.integers(0, q_len), max_size=min(9, tokens // q_len))))


def check_drawn(data: st.DataObject, most_experts: int) -> None:
    experts = data.draw(st.integers(1, most_experts))
    case = moe_case(
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 8)),
        experts=experts,
        among=data.draw(st.integers(1, min(experts, 20))),
        hidden=data.draw(st.integers(1, 40)),
        intermediate=data.draw(st.integers(1, 40)),
        shared=data.draw(st.integers(0, 2)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=data.draw(st.integers(0, 99)),
    )
    if data.draw(st.booleans()):
        case.x = torch.cat([case.x, case.x], 1)[:, : case.x.shape[1]]
    row_lens, q_len, runs = drawn_padding(data, case)
    assume(runs.any())
    block = st.sampled_from([16, 32])
    tiles = [ProductTiles(data.draw(block), data.draw(block), data.draw(block), 4, 1) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "MAX_UNSORTED_PAIRS", data.draw(st.sampled_from([0, MAX_UNSORTED_PAIRS])))
        got = moe_triton(case.operands(row_lens, q_len), gate_up=tiles[0], down=tiles[1])
    check_padded_moe(case, got, runs)


@settings(max_examples=5)
@given(st.data())
def test_drawn_shapes_and_tiles(data: st.DataObject) -> None:
    check_drawn(data, 20)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_more_drawn_shapes_and_tiles(data: st.DataObject) -> None:
    check_drawn(data, 256)
