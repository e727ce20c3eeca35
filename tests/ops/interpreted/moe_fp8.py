"""FP8 activations in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.experts.kernels.moe_fp8 import moe_fp8, moe_fp8_activations  # noqa: E402
from mla_compile.ops.linear.kernels.fp8 import quantize_triton  # noqa: E402
from mla_compile.ops.linear.tiles import ProductTiles  # noqa: E402
from tests.fp8_cases import quantised  # noqa: E402
from tests.kernel_cases import check_moe, check_padded_moe, check_quantised_moe, moe_case, padding  # noqa: E402


@pytest.mark.parametrize("columns", [128, 384, 2176])
def test_tokens_in_fp8(columns: int) -> None:
    x = torch.randn(5, columns + 8).bfloat16()[:, 8:]
    x[1, :128], x[2, 3], x[3, 0] = 0, torch.nan, 1e30
    ((values,), scales), (expected, of_blocks) = quantize_triton(x, 1), quantised(x)
    assert scales.shape[1] == len(values) == 8
    values, scales, expected = values[:5].float(), scales[:, :5], expected.float()
    others = [0, 1, 3, 4]
    assert torch.equal(scales.t()[others], of_blocks[others])
    assert torch.equal(values[others], expected[others])
    assert values[2, 3].isnan() and values[2, 128:].isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "topk", "shared", "hidden", "intermediate"),
    [(70, 2, 0, 256, 128), (40, 1, 2, 128, 256), (3, 4, 1, 384, 128)],
    ids=str,
)
def test_experts_of_tokens_in_fp8(
    tokens: int, topk: int, shared: int, hidden: int, intermediate: int
) -> None:
    sizes = {"hidden": hidden, "intermediate": intermediate, "shared": shared, "experts": 5, "among": 4}
    case = moe_case(tokens, topk, **sizes, dtype=torch.bfloat16, fp8=True)
    check_quantised_moe(case, moe_fp8_activations(case.operands()))
    if tokens > 3:
        row_lens, q_len, runs = padding(case, 2, [1, 0, 2])
        check_quantised_moe(case, moe_fp8_activations(case.operands(row_lens, q_len)), runs)


@pytest.mark.parametrize("columns", [128, 384])
def test_two_vectors_in_fp8_hold_a_token_in_bfloat16(columns: int) -> None:
    exponents = torch.randint(-7, 1, (6, columns)).float()
    x = (torch.randn(6, columns).clamp(-2, 2) + 4 * torch.randn(6, columns).sign()) * exponents.exp2()
    x[1, :128], x[2, 3], x[3] = 0, torch.nan, x[3] * 1e30
    x[4], x[5, 5] = x[4] * 1e-37, 1e-9
    x = x.bfloat16()
    values, scales = quantize_triton(x, 2)
    of_numbers = scales[:, :6].t().repeat_interleave(128, 1)
    got = (values[0].float() + values[1].float())[:6] * of_numbers
    assert torch.equal(scales[:, :6].log2(), scales[:, :6].log2().round())
    assert got[2, 3].isnan()
    exact = torch.ones_like(x, dtype=torch.bool)
    exact[2, :128] = exact[5, 5] = False
    assert torch.equal(got[exact], x.float()[exact])
    assert (got[5, 5] - x[5, 5]).abs() <= 2.0**-17 * x[5, :128].abs().max()


@pytest.mark.parametrize("tile_tokens", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "topk", "shared", "hidden", "intermediate", "down_columns"),
    [(70, 2, 0, 256, 128, 64), (40, 1, 2, 384, 256, 128), (3, 4, 1, 128, 128, 64)],
    ids=str,
)
def test_experts_of_tokens_in_two_vectors(
    tile_tokens: int,
    tokens: int,
    topk: int,
    shared: int,
    hidden: int,
    intermediate: int,
    down_columns: int,
) -> None:
    sizes = {"hidden": hidden, "intermediate": intermediate, "shared": shared, "experts": 5, "among": 4}
    case = moe_case(tokens, topk, **sizes, dtype=torch.bfloat16, fp8=True)
    tiles = tuple(ProductTiles(tile_tokens, n, depth=128, warps=4, stages=2) for n in (128, down_columns))
    check_moe(case, moe_fp8(case.operands(), tiles=tiles))
    if tokens > 3:
        row_lens, q_len, runs = padding(case, 2, [1, 0, 2])
        check_padded_moe(case, moe_fp8(case.operands(row_lens, q_len), tiles=tiles), runs)
