"""`moe_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.kernels.moe import moe_triton  # noqa: E402
from mla_compile.ops.kernels.plan import MoeTiles  # noqa: E402
from tests.kernel_cases import check_moe, check_padded_moe, moe_case, padding  # noqa: E402

SMALL = MoeTiles(tokens=16, columns=16, depth=16, warps=4, stages=1)


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
    check_moe(case, moe_triton(*case.args()))


@pytest.mark.parametrize("experts", [2, pytest.param(300, marks=pytest.mark.slow)])
def test_all_tokens_on_one_expert_more_than_fit_a_tile(experts: int) -> None:
    case = moe_case(75, 2, experts=experts, among=1, hidden=16, intermediate=16)
    check_moe(case, moe_triton(*case.args()))


@pytest.mark.parametrize(
    "size",
    [(17, 33), *(pytest.param(size, marks=pytest.mark.slow) for size in ((16, 16), (40, 8), (100, 70)))],
    ids=str,
)
def test_sizes_that_fill_no_tile(size: tuple[int, int]) -> None:
    case = moe_case(5, 2, hidden=size[0], intermediate=size[1])
    check_moe(case, moe_triton(*case.args(), gate_up=SMALL, down=SMALL))


def test_rows_may_be_apart_and_weights_in_half_precision() -> None:
    case = moe_case(6, 2, dtype=torch.bfloat16)
    apart = torch.cat([case.x, case.x], 1)[:, : case.x.shape[1]]
    case = replace(case, x=apart, topk_weights=case.topk_weights.bfloat16())
    check_moe(case, moe_triton(*case.args()))
    check_moe(case, moe_triton(*replace(case, x=case.x.T.contiguous().T).args()))


def test_a_tokens_bits_do_not_depend_on_the_other_tokens() -> None:
    case, other = moe_case(12, 4), moe_case(12, 4, seed=1)
    other.w_gate_up, other.w_down = case.w_gate_up, case.w_down
    for name in ("x", "topk_weights", "topk_ids"):
        getattr(other, name)[5] = getattr(case, name)[5]
    assert torch.equal(moe_triton(*case.args())[5], moe_triton(*other.args())[5])


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
    check_padded_moe(case, moe_triton(*case.args(), row_lens, q_len), runs)


@settings(max_examples=8)
@given(st.data())
def test_drawn_shapes_and_tiles(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 20))
    case = moe_case(
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 4)),
        experts=experts,
        among=data.draw(st.integers(1, experts)),
        hidden=data.draw(st.integers(1, 40)),
        intermediate=data.draw(st.integers(1, 40)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=data.draw(st.integers(0, 99)),
    )
    block = st.sampled_from([16, 32])
    tiles = [MoeTiles(data.draw(block), data.draw(block), data.draw(block), 4, 1) for _ in range(2)]
    check_moe(case, moe_triton(*case.args(), gate_up=tiles[0], down=tiles[1]))
