"""`moe_experts` of one or two tokens in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

from dataclasses import replace

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.experts.kernels.moe import moe_triton  # noqa: E402
from mla_compile.ops.experts.kernels.moe_gemv import moe_gemv  # noqa: E402
from tests.kernel_cases import (  # noqa: E402
    TOLERANCE,
    MoeCase,
    check_moe,
    check_padded_moe,
    moe_case,
    moe_reference,
    padding,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDE = {"gate_up": (64, 256, 2), "down": (64, 128, 2)}
"""Few programs, as the interpreter takes long for each."""
SIZES = [
    # top k, shared, hidden, intermediate
    (4, 1, 256, 128),
    (2, 0, 17, 33),
    (1, 1, 300, 150),
    pytest.param((3, 2, 200, 256), marks=pytest.mark.slow),
    pytest.param((8, 1, 2050, 40), marks=pytest.mark.slow),
]


def only_chosen(case: MoeCase) -> MoeCase:
    """Weights of experts that no token chose are NaN."""
    others = torch.ones(len(case.w_down), dtype=torch.bool)
    others[case.topk_ids.flatten()] = False
    for w in (case.w_gate_up, case.w_down):
        w[others] = torch.full_like(w[others].float(), torch.nan).to(w.dtype)
    return case


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, torch.bfloat16), *((2, dtype) for dtype in DTYPES)], ids=str
)
def test_the_kernels_equal_the_definition(
    tokens: int, sizes: tuple[int, ...], dtype: torch.dtype, fp8: bool
) -> None:
    topk, shared, hidden, intermediate = sizes
    size = {"hidden": hidden, "intermediate": intermediate, "shared": shared}
    case = only_chosen(moe_case(tokens, topk, **size, dtype=dtype, fp8=fp8))
    got = moe_gemv(case.operands(), **WIDE)
    check_moe(case, got)
    tiles = moe_triton(case.operands())
    assert (got.double() - tiles.double()).abs().max() < TOLERANCE[dtype] * tiles.double().abs().max()


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_the_same_expert_four_times_with_the_tiles_that_it_gets(fp8: bool) -> None:
    case = moe_case(2, 2, among=1, hidden=20, intermediate=12, shared=1, dtype=torch.bfloat16, fp8=fp8)
    check_moe(case, moe_gemv(case.operands()))


def test_rows_that_are_apart_and_weights_in_half_precision() -> None:
    case = moe_case(2, 2, dtype=torch.bfloat16)
    x = torch.stack([case.x, case.x], 2)[:, :, 0]
    assert x.stride(1) == 2
    case = replace(case, x=x, topk_weights=case.topk_weights.bfloat16())
    check_moe(case, moe_gemv(case.operands(), **WIDE))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize(
    ("tokens", "q_len", "lens"),
    [(1, 1, [0]), (1, 1, [1]), (1, 1, []), (2, 2, [1]), (2, 1, [0])],
    ids=["padding", "runs", "a prompt", "a draft", "padding before a prompt"],
)
def test_padding_gets_0_whatever_it_holds(tokens: int, q_len: int, lens: list[int], fp8: bool) -> None:
    case = moe_case(tokens, 2, shared=1, dtype=torch.bfloat16, fp8=fp8)
    row_lens, q_len, runs = padding(case, q_len, lens)
    got = moe_gemv(case.operands(row_lens, q_len), **WIDE)
    if runs.any():
        check_padded_moe(case, got, runs)
    assert got.isfinite().all() and torch.equal(got.any(1), runs)


def test_values_of_fp8_times_scale_are_not_rounded() -> None:
    """The weights are too small for float16; their products are not."""
    case = moe_case(1, 2, hidden=256, intermediate=256, dtype=torch.float16, fp8=True)
    gate_up, down, *others = case.scales
    case = replace(case, scales=(gate_up, down * 2.0**-20, *others), topk_weights=case.topk_weights * 2.0**20)
    expected = moe_reference(replace(case, x=case.x.double()))
    error = (moe_gemv(case.operands(), **WIDE).double() - expected).abs().max() / expected.abs().max()
    assert error < 2e-3, error


def test_a_nan_stays_in_its_block() -> None:
    case = moe_case(1, 2, hidden=256, intermediate=256, dtype=torch.bfloat16, fp8=True)
    case.scales[1][case.topk_ids[0, 1], 0, 1] = torch.nan
    out = moe_gemv(case.operands(), **WIDE)
    assert out[:, :128].isnan().all() and out[:, 128:].isfinite().all()
