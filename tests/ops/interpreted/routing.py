"""`moe_router` by its Triton kernels."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.experts.kernels.routing import norm_router_triton, router_product, router_triton  # noqa: E402
from tests.ops.routing import ROUTINGS, check, check_after_norm, check_bits, router_args  # noqa: E402

SLOW = ("v3", "v2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in ROUTINGS])
def test_the_kernels(name: str) -> None:
    for tokens, hidden, dtype in ((1, 48, torch.float32), (10, 100, torch.bfloat16)):
        args = router_args(name, tokens, hidden, dtype)
        check(router_triton, args)
        check_bits(router_triton, args)
        check(router_product, args)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in ROUTINGS])
def test_after_a_norm(name: str) -> None:
    for tokens, hidden, dtype in ((1, 48, torch.float32), (10, 100, torch.bfloat16)):
        check_after_norm(norm_router_triton, router_args(name, tokens, hidden, dtype))


def test_equal_scores_choose_the_lowest_ids_and_nan_chooses_experts_that_exist() -> None:
    x, weight, _, *rest = router_args("glm", 2, 32, torch.float32)
    x[0], x[1] = 0.0, torch.nan
    weights, ids = router_triton(x, weight, None, *rest)
    assert ids[0].tolist() == [0, 1, 2, 3] and weights[0].tolist() == pytest.approx([0.45] * 4)
    assert int(ids[1].min()) >= 0 and int(ids[1].max()) < len(weight)


def test_experts_of_groups_that_are_left_out_are_not_chosen_though_all_others_are() -> None:
    x, weight, bias, *_ = router_args("odd", 3, 32, torch.float32)
    check(router_triton, [x, weight, bias, 12, 5, 2, False, True, 1.0])
