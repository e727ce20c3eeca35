"""Our side of FlashMLA's sparse kernels in Triton's interpreter, with plain torch in place of these.

`tests/ops/test_interpreted.py` runs this file.
"""

import sys

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from tests.ops import flash_mla_stand_in  # noqa: E402

sys.modules["flash_mla"] = flash_mla_stand_in.module()

from mla_compile import MLAError  # noqa: E402
from mla_compile.ops.attention.kernels import flash_mla_sparse  # noqa: E402
from mla_compile.ops.attention.kernels.flash_mla_sparse import (  # noqa: E402
    num_parts,
    sparse_flash_mla,
    sparse_flash_mla_fp8,
)
from tests.kernel_cases import SparseCase, check_sparse, sparse_case  # noqa: E402

SIZES = {"heads": 64, "rank": 512, "rope": 64, "dtype": torch.bfloat16}


def shuffled(case: SparseCase) -> SparseCase:
    """-1 stands anywhere."""
    q_latent, q_pe, cache, selected, scale = case
    order = torch.randperm(selected.shape[1], generator=torch.Generator().manual_seed(1))
    return q_latent, q_pe, cache, selected[:, order].contiguous(), scale


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("counts", [[0, 1, 130, 512], [511, 256, 257]], ids=str)
def test_tokens_with_any_number_of_slots_equal_the_definition(counts: list[int], parts: int) -> None:
    case = sparse_case(counts, topk=512, **SIZES)
    check_sparse(case, sparse_flash_mla(*case, parts=parts))
    check_sparse(shuffled(case), sparse_flash_mla(*shuffled(case), parts=parts))


def test_blocks_behind_the_last_slot_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = []

    def run(*args, topk_length, **options):
        lens.append(topk_length.tolist())
        return flash_mla_stand_in.flash_mla_sparse_fwd(*args, topk_length=topk_length, **options)

    monkeypatch.setattr(flash_mla_sparse, "flash_mla_sparse_fwd", run)
    case = sparse_case([0, 3, 128, 200], topk=256, **SIZES)
    for parts in (1, 2):
        sparse_flash_mla(*case, parts=parts)
    assert lens == [[0, 3, 128, 200], [0, 0, 3, 0, 128, 0, 128, 72]]


@pytest.mark.parametrize(("tokens", "topk"), [(1, 192), (3, 256), (40, 128), (140, 64)])
def test_fp8_latents_equal_the_definition_by_any_plan(tokens: int, topk: int) -> None:
    counts = [(0, topk, 70, 1)[i % 4] % (topk + 1) for i in range(tokens)]
    case = shuffled(sparse_case(counts, topk=topk, fp8=True, **SIZES))
    check_sparse(case, sparse_flash_mla_fp8(*case))


def test_many_tokens_with_fp8_latents_are_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla_sparse, "_TOKENS", 2)
    case = sparse_case([3, 64, 0, 9, 1], topk=64, fp8=True, **SIZES)
    check_sparse(case, sparse_flash_mla_fp8(*case))


@pytest.mark.parametrize("fp8", [False, True])
def test_queries_may_have_any_strides(fp8: bool) -> None:
    q_latent, q_pe, *others = sparse_case([9, 128], topk=128, fp8=fp8, **SIZES)
    run = sparse_flash_mla_fp8 if fp8 else sparse_flash_mla
    by_head = q_latent.transpose(0, 1).contiguous().transpose(0, 1)
    of_wider = torch.cat([q_pe, q_pe], -1)[..., :64]
    outermost = q_latent.movedim(2, 0).contiguous().movedim(0, 2)
    for case in ((by_head, of_wider, *others), (outermost, q_pe, *others)):
        check_sparse(case, run(*case))


def test_parts_fill_the_multiprocessors_and_hold_pairs_of_blocks() -> None:
    assert [num_parts(tokens, 128, 2048, 132) for tokens in (1, 4, 8, 32, 34)] == [16, 16, 8, 2, 1]
    assert [num_parts(tokens, 64, 2048, 132) for tokens in (1, 16, 64, 67)] == [16, 8, 2, 1]
    assert [num_parts(1, 64, topk, 132) for topk in (128, 256, 384, 768)] == [1, 2, 1, 2]


def test_a_cache_at_an_odd_address_is_refused_by_name() -> None:
    q_latent, q_pe, cache, *others = sparse_case([5], topk=128, **SIZES)
    odd = torch.empty(cache.numel() + 1, dtype=torch.bfloat16)[1:].view_as(cache)
    with pytest.raises(MLAError, match=r"^kv_cache: .*address.*\b16\b"):
        sparse_flash_mla(q_latent, q_pe, odd, *others)
