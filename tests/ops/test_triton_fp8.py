"""The FP8 kernels without a GPU: what the compiled code uses; their results: `test_interpreted.py`."""

import re

import pytest
import torch

from mla_compile.ops.device import H200, Device
from mla_compile.ops.experts.tiles import fp8_moe_tiles
from mla_compile.ops.linear.operands import FP8LinearOperands
from mla_compile.ops.linear.tiles import has_one_order, many_block_tiles
from tests.fp8_cases import fp8_weight
from tests.kernel_cases import moe_case


@pytest.mark.long
def test_the_compiled_products_fit_an_h200_and_spill_nothing() -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.linear.kernels.fp8 import dequantize_triton
    from mla_compile.ops.linear.kernels.fp8_linear import linear_blocks, linear_gemv
    from tests.triton_compile import compiled_for

    weight, scale = fp8_weight(256, 512)
    with compiled_for(90) as kernels:
        linear_gemv(FP8LinearOperands(torch.randn(1, 512).bfloat16(), weight, scale))
        for tokens in (2, 16):
            linear_blocks(FP8LinearOperands(torch.randn(tokens, 512).bfloat16(), weight, scale))
        dequantize_triton(weight, scale, torch.bfloat16)
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel.shared_memory <= 227 * 1024 and kernel.spilled_bytes == 0, kernel.name


@pytest.mark.long
@pytest.mark.parametrize("plain", [False, True], ids=["FP8", "plain"])
def test_batch_invariant_products_fit_an_h200_and_many_tokens_have_the_instruction_with_one_order(
    plain: bool,
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.linear.kernels import blocks
    from tests.triton_compile import compiled_for

    weight, scale = fp8_weight(256, 2048)
    if plain:
        weight, scale = torch.randn(256, 2048).bfloat16(), None
    plans = [many_block_tiles(tokens, 2048, 4, H200)[0] for tokens in (64, 128, 2048)]
    assert len({*plans}) == 3 and all(has_one_order(tiles.tokens, tiles.columns, H200) for tiles in plans)
    with compiled_for(90) as kernels:
        for tokens in (1, 16, 32):
            blocks.multiply_in_order(torch.randn(tokens, 2048).bfloat16(), weight, scale)
        for tiles in plans:
            x = torch.randn(tiles.tokens, 2048).bfloat16()
            blocks.multiply_in_order(x, weight, scale, tiles=tiles, split=False)
    for kernel, many in zip(kernels, [False] * 3 + [True] * 3, strict=True):
        # The widest of FP8 spills some addresses, and is still faster than any that does not.
        assert kernel.shared_memory <= 227 * 1024 and kernel.spilled_bytes <= 256, kernel.name
        assert ("wgmma.mma_async" in kernel.text) == many


@pytest.mark.long
@pytest.mark.parametrize(("capability", "room"), [(80, 163), (86, 99), (89, 99), (120, 99)])
def test_products_of_few_tokens_fit_smaller_gpus(
    capability: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """room: KiB of shared memory of a program."""
    pytest.importorskip("triton")
    from mla_compile.ops.linear.kernels import blocks
    from tests.triton_compile import compiled_for

    device = Device(108, divmod(capability, 10))
    monkeypatch.setattr(blocks, "device_of", lambda x: device)
    with compiled_for(capability) as kernels:
        for tokens, k in ((16, 5120), (32, 1024), (32, 5120), (32, 7168)):
            weight, scale = fp8_weight(64, k)
            x = torch.randn(tokens, k).bfloat16()
            blocks.multiply(x, weight.bfloat16(), None)
            if capability >= 89:
                blocks.multiply_in_order(x, weight, scale)
        blocks.multiply_in_order(torch.randn(100, 5120).bfloat16(), torch.randn(64, 5120).bfloat16(), None)
    assert len(kernels) in (6, 10)
    for kernel in kernels:
        assert kernel.shared_memory <= room * 1024, kernel.name


@pytest.mark.long
@pytest.mark.parametrize("in_order", [False, True], ids=["any order", "in order"])
@pytest.mark.parametrize("pairs", [4, 40, 600, 4000, 70_000])
def test_experts_in_fp8_fit_an_h200(pairs: int, in_order: bool) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.moe import moe_triton
    from tests.triton_compile import compiled_for

    gate_up, down = (
        fp8_moe_tiles(pairs, 64, products, torch.bfloat16, H200, in_order=in_order) for products in (2, 1)
    )
    case = moe_case(
        min(pairs, 600),
        1,
        experts=64,
        hidden=256,
        intermediate=256,
        shared=1,
        dtype=torch.bfloat16,
        fp8=True,
    )
    with compiled_for(90) as kernels:
        moe_triton(case.operands(), gate_up=gate_up, down=down, in_order=in_order)
    for kernel in kernels:
        assert kernel.shared_memory <= 227 * 1024 and kernel.spilled_bytes <= 96, kernel.name
    if in_order:
        assert has_one_order(gate_up.tokens, 2 * gate_up.columns, H200)
        assert has_one_order(down.tokens, down.columns, H200)
        assert all("wgmma.mma_async" in kernel.text for kernel in kernels[-3:-1])


@pytest.mark.long
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(
    ("tokens", "parts", "fit"), [(300, 2, 2), (600, 2, 2), (3000, 2, 1), (1300, 1, 2)], ids=str
)
def test_experts_multiply_fp8_by_fp8_and_convert_no_weight(
    tokens: int, parts: int, fit: int, shared: int
) -> None:
    """The loop over blocks spills at most two registers. fit: how many programs fit a multiprocessor."""
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.moe_fp8 import moe_fp8
    from tests.triton_compile import compiled_for

    size = {"experts": 20, "hidden": 256, "intermediate": 256, "shared": shared}
    case = moe_case(tokens, 1, **size, dtype=torch.bfloat16, fp8=True)
    with compiled_for(90) as kernels:
        moe_fp8(case.operands(), parts=parts)
    products = [kernel for kernel in kernels if kernel.name.endswith(("up_fp8_kernel", "down_fp8_kernel"))]
    assert len(products) == 2
    for kernel in products:
        instructions = kernel.instructions()
        assert fit * kernel.shared_memory <= 227 * 1024 and kernel.spilled_bytes <= 96, kernel.name
        assert re.search(r"wgmma.mma_async.\S+.m64n(16|64|128)k32.f32.e4m3.e4m3", kernel.text)
        assert "UNPACK_B" not in instructions
        first, last = instructions.index("QGMMA"), instructions.rindex("QGMMA")
        assert len(re.findall(r"\b(STL|LDL)\b", instructions[first:last])) <= 2


@pytest.mark.long
@pytest.mark.parametrize("padded", [False, True])
def test_no_constant_is_converted_from_fp8(padded: bool) -> None:
    """ptxas converts arbitrary bits for the constant 0 of elements past the width, on a GPU also those of a NaN."""
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels import moe, moe_gemv
    from mla_compile.ops.linear.kernels.fp8_linear import linear_blocks, linear_gemv
    from tests.triton_compile import compiled_for

    padding = (torch.zeros(1, dtype=torch.int32), 2) if padded else (None, 1)
    with compiled_for(90) as kernels:
        for k in (128, 300, 1408):
            weight = fp8_weight(70, k)
            linear_gemv(FP8LinearOperands(torch.randn(1, k).bfloat16(), *weight))
            linear_blocks(FP8LinearOperands(torch.randn(5, k).bfloat16(), *weight))
        for hidden, intermediate in ((128, 64), (256, 48), (300, 150)):
            sizes = {"experts": 3, "hidden": hidden, "intermediate": intermediate}
            operands = moe_case(2, 2, **sizes, dtype=torch.bfloat16, fp8=True).operands(*padding)
            moe_gemv.moe_gemv(operands)
            moe.moe_triton(operands)
    found = [re.findall(r"UNPACK_B\S*\s+R\d+, (\S+)", kernel.instructions()) for kernel in kernels]
    assert sum(map(bool, found)) > 6, "kernels that convert"
    assert all(re.match(r"R(\d+|Z)", source) for sources in found for source in sources), found
