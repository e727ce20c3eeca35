"""`sparse_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels.sparse import sparse_triton  # noqa: E402
from mla_compile.ops.attention.tiles import AttentionTiles  # noqa: E402
from tests.kernel_cases import check_sparse, sparse_case  # noqa: E402

SMALL = AttentionTiles(queries=16, keys=16, warps=4, stages=1)
COUNTS = [0, 1, 16, 17, 40]


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("heads", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_tokens_with_any_number_of_slots_equal_the_definition(heads: int, splits: int) -> None:
    case = sparse_case(COUNTS, topk=40, heads=heads)
    check_sparse(case, sparse_triton(*case, tiles=SMALL, splits=splits, min_keys=16))


@pytest.mark.parametrize("splits", [1, 3])
def test_absent_slots_may_stand_anywhere(splits: int) -> None:
    q_latent, q_pe, cache, selected, scale = sparse_case(COUNTS, topk=40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    case = q_latent, q_pe, cache, selected[:, order], scale
    check_sparse(case, sparse_triton(*case, tiles=SMALL, splits=splits, min_keys=16))


@pytest.mark.parametrize(("rank", "rope", "heads"), [(512, 64, 20), (256, 32, 40), (48, 16, 5)])
def test_widths_and_heads_of_real_models(rank: int, rope: int, heads: int) -> None:
    case = sparse_case([70, 3], topk=70, heads=heads, rank=rank, rope=rope, dtype=torch.bfloat16)
    check_sparse(case, sparse_triton(*case))


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 32)])
@pytest.mark.parametrize("splits", [1, 3])
def test_fp8_latents_have_the_result_of_their_values(rank: int, rope: int, splits: int) -> None:
    case = sparse_case(COUNTS, topk=40, rank=rank, rope=rope, dtype=torch.bfloat16, fp8=True)
    check_sparse(case, sparse_triton(*case, tiles=SMALL, splits=splits, min_keys=16))


def test_queries_may_have_any_strides() -> None:
    q_latent, q_pe, *others = sparse_case([9, 20], topk=20, heads=6)
    by_head = q_latent.transpose(0, 1).contiguous().transpose(0, 1)
    of_wider = torch.cat([q_pe, q_pe], -1)[..., :16]
    outermost = q_latent.movedim(2, 0).contiguous().movedim(0, 2)
    for case in ((by_head, of_wider, *others), (outermost, q_pe, *others)):
        check_sparse(case, sparse_triton(*case, tiles=SMALL, splits=2, min_keys=16))


@settings(max_examples=6)
@given(st.data())
def test_drawn_calls_and_plans(data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, 90))
    case = sparse_case(
        data.draw(st.lists(st.integers(0, topk), min_size=1, max_size=4)),
        topk=topk,
        heads=data.draw(st.integers(1, 9)),
        rank=16 * data.draw(st.integers(1, 4)),
        rope=16 * data.draw(st.integers(1, 2)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=data.draw(st.integers(0, 99)),
    )
    tiles = AttentionTiles(data.draw(st.sampled_from([16, 32])), data.draw(st.sampled_from([16, 64])), 4, 1)
    splits = data.draw(st.integers(1, 6))
    check_sparse(case, sparse_triton(*case, tiles=tiles, splits=splits, min_keys=16))
