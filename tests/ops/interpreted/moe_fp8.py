"""FP8 activations in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch
from torch import Tensor

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.experts.kernels.moe_fp8 import moe_fp8, moe_fp8_activations, prepared  # noqa: E402
from mla_compile.ops.experts.operands import ExpertOperands  # noqa: E402
from mla_compile.ops.linear.kernels.fp8 import quantize_triton  # noqa: E402
from mla_compile.ops.linear.tiles import ProductTiles  # noqa: E402
from tests.fp8_cases import quantised  # noqa: E402
from tests.kernel_cases import check_moe, check_padded_moe, check_quantised_moe, moe_case, padding  # noqa: E402


@pytest.mark.parametrize("columns", [128, 384, 2176])
def test_tokens_in_fp8(columns: int) -> None:
    x = torch.randn(5, columns + 8).bfloat16()[:, 8:]
    x[1, :128], x[2, 3], x[3, 0] = 0, torch.nan, 1e30
    (values, scales), (expected, of_blocks) = quantize_triton(x), quantised(x)
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


def in_two_vectors(x: Tensor) -> Tensor:
    """The numbers that experts multiply, float64."""
    tokens, hidden = x.shape
    ids = torch.zeros(tokens, 1, dtype=torch.int64)
    weights = torch.empty(1, 256, hidden), torch.empty(1, hidden, 128)
    vectors, scales, *_ = prepared(ExpertOperands(x, torch.ones(tokens, 1), ids, *weights, None, 1), 2)
    assert torch.equal(scales[:, :tokens].log2(), scales[:, :tokens].log2().round())
    return vectors.double().sum(0)[:tokens] * scales[:, :tokens].t().double().repeat_interleave(128, 1)


@pytest.mark.parametrize("largest", [1.0, 1.9921875, 1.5 * 2.0**101, 1.5 * 2.0**-100])
def test_two_vectors_in_fp8_hold_a_token_in_bfloat16(largest: float) -> None:
    """All bfloat16 numbers from 2^-19 of the largest of their block on."""
    exponents = torch.arange(-19, 1)[:, None] + torch.tensor(largest).log2().floor()
    x = (exponents.exp2() * (1 + torch.arange(128) / 128)).bfloat16()
    x[:, ::2] *= -1
    x[:, 0] = largest  # of each block
    x = x[x.abs().amax(1) <= largest]
    assert len(x) >= 19
    got, share = in_two_vectors(x), x.double().abs() / largest
    exact = share >= 2.0**-9
    assert torch.equal(got[exact], x.double()[exact])
    error = ((got - x.double()) / largest).abs()
    assert 2.0**-18 < error[~exact].max() <= 2.0**-16


def test_two_vectors_of_unusual_tokens() -> None:
    x = torch.randn(4, 256).bfloat16()
    x[0, :128], x[1, 3], x[2] = 0, torch.nan, x[2] * 1e-37
    got = in_two_vectors(x)
    assert not got[0, :128].any() and got[1, 3].isnan()
    assert (
        got.isnan().sum() == 1
        and (got[2] - x[2].double()).abs().max() <= 2.0**-16 * x[2].double().abs().max()
    )


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
