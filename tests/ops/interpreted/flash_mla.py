"""Our side of FlashMLA in Triton's interpreter: the conformance suite with plain torch in place of its kernels.

`tests/ops/test_interpreted.py` runs this file.
"""

import sys
from dataclasses import replace

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from tests.ops import flash_mla_stand_in  # noqa: E402

sys.modules["flash_mla"] = flash_mla_stand_in.module()

from mla_compile import MLAError  # noqa: E402
from mla_compile.ops.attention.kernels.flash_mla import PLANNER, decode_flash_mla  # noqa: E402
from tests.kernel_cases import BACKENDS, check_decode, decode_case  # noqa: E402
from tests.ops.conformance import DecodeConformance, Subject  # noqa: E402

FLASH_MLA = replace(BACKENDS["flash_mla"], packages=(), function=f"{__name__}:decode_flash_mla")
SIZES = {"rank": 512, "rope": 64, "page_size": 64, "dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(FLASH_MLA, **SIZES)


class TestFlashMLA(DecodeConformance):
    pass


def test_layers_share_a_plan_and_no_plan_serves_other_rows() -> None:
    case, other = (decode_case(lengths, q_len=2, heads=20, **SIZES) for lengths in ([70, 3], [64, 3]))
    plan = PLANNER.plan(case.operands(), 0)
    for q_lens in (None, torch.tensor([2, 1], dtype=torch.int32)):
        layer = replace(case, q_lens=q_lens)
        check_decode(layer, decode_flash_mla(layer.operands(), plan))
    with pytest.raises(AssertionError, match="the plan of other rows"):
        decode_flash_mla(other.operands(), plan)


@pytest.mark.parametrize(("heads", "q_len"), [(20, 1), (20, 4), (64, 1), (128, 4), (128, 70)])
def test_sizes_of_a_plan_follow_from_sizes_of_the_call(heads: int, q_len: int) -> None:
    operands = decode_case([5, 3, 0], q_len=q_len, heads=heads, **SIZES).operands()
    for plan, like in zip(PLANNER.plan(operands, 0), PLANNER.like(operands), strict=True):
        assert (plan.shape, plan.dtype) == (like.shape, like.dtype)


def test_a_cache_at_an_odd_address_is_refused_by_name() -> None:
    case = decode_case([5], **SIZES)
    cache = torch.empty(case.kv_cache.numel() + 1, dtype=torch.bfloat16)[1:].view_as(case.kv_cache)
    with pytest.raises(MLAError, match=r"^kv_cache: .*address.*\b16\b"):
        decode_flash_mla(replace(case, kv_cache=cache).operands())
