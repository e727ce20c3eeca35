"""`fp8_linear` by its Triton kernels; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch
from torch import Tensor

from tests.triton_interpreter import add_in_order, mend_interpreter

mend_interpreter()

from mla_compile.ops.linear.kernels import blocks  # noqa: E402
from mla_compile.ops.linear.kernels.fp8 import dequantize_triton  # noqa: E402
from mla_compile.ops.linear.kernels.fp8_linear import (  # noqa: E402
    linear_blocks,
    linear_dequantized,
    linear_gemv,
    linear_in_order,
)
from mla_compile.ops.linear.kernels.matmul import linear_fp8_in_order  # noqa: E402
from mla_compile.ops.linear.operands import FP8LinearOperands  # noqa: E402
from mla_compile.ops.linear.tiles import ProductTiles  # noqa: E402
from tests.fp8_cases import fp8_weight, linear_by_definition, values_of  # noqa: E402

FEW = ProductTiles(tokens=8, columns=32, depth=128, warps=2, stages=1)
SIZES = ((40, 13), (128, 128), (300, 150), (1160, 5))
"""Elements of k and columns: within a block, a block, and such as cut the last block on both sides."""


def check(out: Tensor, x: Tensor, *weights: tuple[Tensor, Tensor]) -> None:
    assert out.dtype == x.dtype and out.is_contiguous()
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[x.dtype]
    torch.testing.assert_close(out.double(), linear_by_definition(x, *weights), atol=bound, rtol=bound)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernels_equal_the_definition(dtype: torch.dtype, size: tuple[int, int]) -> None:
    k, columns = size
    weight, scale = fp8_weight(columns, k)
    for x in (torch.randn(1, k).to(dtype), torch.randn(k, 1).to(dtype).T):
        check(linear_gemv(FP8LinearOperands(x, weight, scale)), x, (weight, scale))
        check(linear_gemv(FP8LinearOperands(x, weight, scale), tiles=(8, 128, 2)), x, (weight, scale))
    for tokens in (1, 2, 19):
        x = torch.randn(tokens, k + 24).to(dtype)[:, 8:-16]
        check(linear_blocks(FP8LinearOperands(x, weight, scale)), x, (weight, scale))
        check(linear_blocks(FP8LinearOperands(x, weight, scale), tiles=FEW), x, (weight, scale))
    for tokens in (1, 20):
        x = torch.randn(tokens, k + 24).to(dtype)[:, 8:-16]
        for product in (linear_dequantized, linear_fp8_in_order, linear_in_order):
            check(product(FP8LinearOperands(x, weight, scale)), x, (weight, scale))
    assert torch.equal(dequantize_triton(weight, scale, dtype).double(), values_of(weight, scale, dtype))


@pytest.mark.parametrize("first", [128, 40], ids=["one matrix", "blocks that straddle"])
def test_two_adjacent_weights(first: int) -> None:
    both = [fp8_weight(rows, 200, seed=rows) for rows in (first, 70)]
    (a, b), (a_scale, b_scale) = ([part.contiguous() for part in parts] for parts in zip(*both, strict=True))
    rows = torch.cat([a, b]), torch.cat([a_scale, b_scale])
    a, b = rows[0].split([first, 70])
    a_scale, b_scale = rows[1].split([len(a_scale), len(b_scale)])
    for x in (torch.randn(1, 200), torch.randn(7, 200)):
        weights = a, a_scale, b, b_scale
        check((linear_gemv if len(x) == 1 else linear_blocks)(FP8LinearOperands(x, *weights)), x, *both)
        check(linear_dequantized(FP8LinearOperands(x, *weights)), x, *both)
        check(linear_fp8_in_order(FP8LinearOperands(x, *weights)), x, *both)
    x = torch.randn(40, 200).half()
    whole = linear_in_order(FP8LinearOperands(x, *weights))
    check(whole, x, *both)
    assert torch.equal(linear_in_order(FP8LinearOperands(x[:7], *weights)), whole[:7])


def linear_by_one(operands: FP8LinearOperands) -> Tensor:
    return torch.cat([linear_gemv(operands._replace(x=row[None])) for row in operands.x])


def test_a_nan_stays_in_its_block_and_its_token() -> None:
    weight, scale = fp8_weight(150, 300)
    scale[0, 1] = torch.nan
    x = torch.randn(5, 300)
    x[3] = torch.nan
    x[:3, 130:260] = 0  # times NaN, this is NaN too
    for product in (linear_by_one, linear_blocks, linear_fp8_in_order):
        out = product(FP8LinearOperands(x, weight, scale))
        assert out[:, :128].isnan().all() and out[3].isnan().all()
        assert out[[0, 1, 2, 4], 128:].isfinite().all()


@pytest.mark.parametrize("plain", [False, True], ids=["FP8", "plain"])
@pytest.mark.parametrize("k", [100, 300, 1100, 1200])
def test_a_tokens_bits_depend_on_no_other_token_and_no_tile(
    k: int, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one block, with an odd number of them for two parts, and with too few for four."""
    add_in_order(monkeypatch)
    weight, scale = fp8_weight(70, k)
    if plain:
        weight, scale = torch.randn(70, k).bfloat16(), None
    x = torch.randn(40, k).bfloat16()
    whole = blocks.multiply_in_order(x, weight, scale)
    for split in (False, True):
        wide = ProductTiles(64, 128, 128, warps=4, stages=1)
        assert torch.equal(blocks.multiply_in_order(x, weight, scale, tiles=wide, split=split), whole)
    for part in (slice(5, 6), slice(7, 30)):
        assert torch.equal(blocks.multiply_in_order(x[part], weight, scale), whole[part])


def test_a_tokens_bits_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    add_in_order(monkeypatch)
    weight, scale = fp8_weight(70, 200)
    x = torch.randn(40, 200)
    whole = linear_fp8_in_order(FP8LinearOperands(x, weight, scale))
    assert torch.equal(linear_fp8_in_order(FP8LinearOperands(x[5:9], weight, scale)), whole[5:9])
