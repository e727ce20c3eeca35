"""The expert kernels without a GPU: plans, what the compiled code uses; their results: `test_interpreted.py`."""

import re
from collections import Counter
from itertools import product

import pytest
import torch

from mla_compile.ops.device import H200, Device, triton_version
from mla_compile.ops.experts.tiles import MAX_UNSORTED_PAIRS, moe_tiles
from mla_compile.ops.linear.tiles import ProductTiles
from tests.kernel_cases import moe_case, padding

A100 = Device(108, (8, 0))
FEW, MANY = 4, MAX_UNSORTED_PAIRS + 1
PAIRS = (*range(1, 8 * MAX_UNSORTED_PAIRS, 7), 2**15, 2**20)


def plans(device: Device) -> list[tuple[int, torch.dtype, ProductTiles, ProductTiles]]:
    """Every combination of pairs few or many, dtype and tiles of both products that a call can get."""
    found = set()
    for pairs, experts, dtype in product(PAIRS, (1, 8, 64, 256), (torch.bfloat16, torch.float32)):
        tiles = (moe_tiles(pairs, experts, products, dtype, device) for products in (2, 1))
        found.add((FEW if pairs <= MAX_UNSORTED_PAIRS else MANY, dtype, *tiles))
    return sorted(found, key=str)


@pytest.mark.parametrize(
    ("device", "plan"),
    [
        *((H200, plan) for plan in plans(H200)),
        *(pytest.param(A100, plan, marks=pytest.mark.slow) for plan in plans(A100)),
    ],
    ids=str,
)
def test_compiled_code_fits_every_gpu_and_spills_nothing_on_an_h200(
    device: Device, plan: tuple[int, torch.dtype, ProductTiles, ProductTiles]
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.moe import moe_triton
    from tests.triton_compile import compiled_for

    pairs, dtype, gate_up, down = plan
    case = moe_case(pairs, 1, experts=64, hidden=256, intermediate=128, shared=1, dtype=dtype)
    with compiled_for(10 * device.capability[0] + device.capability[1]) as kernels:
        moe_triton(case.operands(), gate_up=gate_up, down=down)
    products = ["gate_up_kernel", "down_kernel", "weighted_sum_kernel"]
    assert [kernel.name for kernel in kernels] == ["sort_kernel"] * (pairs == MANY) + products
    kilobytes, few = (227, 0 if dtype == torch.bfloat16 else 16) if device is H200 else (99, 32)
    for kernel in kernels:
        assert kernel.shared_memory <= kilobytes * 1024, kernel.name
        assert kernel.spilled_bytes <= few, f"{kernel.name}: {kernel.spilled_bytes} bytes per thread"
        check_operations(kernel.name, kernel.text, dtype, shared=1)


@pytest.mark.parametrize("intermediate", [16, 48, 64])
def test_products_along_one_step_fit_with_the_largest_tiles(intermediate: int) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.moe import moe_triton
    from tests.triton_compile import compiled_for

    largest = [moe_tiles(2**15, 8, products, torch.bfloat16, H200) for products in (2, 1)]
    assert [tiles.stages for tiles in largest] == [4, 3]
    case = moe_case(MANY, 1, experts=8, hidden=256, intermediate=intermediate, dtype=torch.bfloat16)
    with compiled_for(90) as kernels:
        moe_triton(case.operands(), gate_up=largest[0], down=largest[1])
    assert max(kernel.shared_memory for kernel in kernels) <= 227 * 1024


# Operations for one element, in float32, without matrix instructions. Since Triton 3.8, `sigmoid(x)`
# multiplies x by a negative constant, where it subtracted x from 0 before: the bits are the same.
OPERATIONS = {
    "sort_kernel": {},
    "gate_up_kernel": {"mul": 2, "ex2": 1, "add": 1, "div": 1}
    | ({} if triton_version() >= (3, 8) else {"sub": 1}),
    "down_kernel": {},
    "weighted_sum_kernel": {"fma": 1},
}


def check_operations(kernel: str, text: str, dtype: torch.dtype, shared: int = 0) -> None:
    """A compiler may fuse a multiply and an add, which rounds once: in all variants of a kernel, or bits differ."""
    found = Counter(re.findall(r"\b(fma|mul|add|sub|div|ex2|rcp|neg)\.[\w.]*f32", text))
    if dtype == torch.float32 and kernel in ("gate_up_kernel", "down_kernel"):
        assert found.pop("fma")  # the product itself
    elements = max(1, min(found.values(), default=0))
    expected = OPERATIONS[kernel] | ({"add": 1} if shared and kernel == "weighted_sum_kernel" else {})
    assert found == {name: times * elements for name, times in expected.items()}, kernel


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pairs", [FEW, MANY + 3])
def test_padding_and_sorting_change_no_operation(pairs: int, padded: bool) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.moe import moe_triton
    from tests.triton_compile import compiled_for

    case = moe_case(pairs // 4, 4, hidden=256, intermediate=128, dtype=torch.bfloat16)
    with compiled_for(90) as kernels:
        moe_triton(case.operands(*padding(case, 1, [1])[:2] if padded else ()))
    assert len(kernels) == (4 if pairs > MAX_UNSORTED_PAIRS else 3)
    for kernel in kernels:
        check_operations(kernel.name, kernel.text, torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("sizes", [(4, 2048, 1536), (8, 7168, 2048)], ids=["GLM-4.7-Flash", "V3"])
def test_one_token_spills_nothing(sizes: tuple[int, int, int], fp8: bool) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.moe_gemv import moe_gemv
    from tests.triton_compile import compiled_for

    topk, hidden, intermediate = sizes
    size = {"experts": 1, "hidden": hidden, "intermediate": intermediate, "shared": 1}
    case = moe_case(1, topk, **size, dtype=torch.bfloat16, fp8=fp8)
    row_lens = torch.ones(1, dtype=torch.int32)
    with compiled_for(90) as kernels:
        moe_gemv(case.operands())
        moe_gemv(case.operands(row_lens))
    assert [kernel.name for kernel in kernels] == ["gate_up_kernel", "down_kernel"] * 2
    for kernel in kernels:
        assert kernel.spilled_bytes == 0, kernel.name
        assert ("cvt.rn.f16x2.e4m3x2" in kernel.text) == fp8, kernel.name


def test_float32_products_have_one_depth() -> None:
    """On the plain cores; tensor cores add 16 products at a time, whatever the depth."""
    assert {tiles.depth for _, dtype, *both in plans(H200) for tiles in both if dtype == torch.float32} == {
        32
    }


@pytest.mark.parametrize("pairs", [4, 32, 128, 512, 1024, 5376, 16384])
def test_programs_are_enough_to_fill_the_gpu(pairs: int) -> None:
    """GLM-4.7-Flash: 64 experts of 2048 x 1536, 4 of them for a token."""
    for products, columns in ((2, 1536), (1, 2048)):
        tiles = moe_tiles(pairs, 64, products, torch.bfloat16, H200)
        assert min(pairs, 64) * columns / tiles.columns >= H200.multiprocessors


@pytest.mark.parametrize("pairs_per_expert", [34, 68, 256])
def test_many_pairs_get_the_tiles_that_won_on_an_h200(pairs_per_expert: int) -> None:
    """64 experts of 2048 x 1408; other numbers of experts get the same tiles for as many pairs an expert."""
    half = ProductTiles(64, 64, 64, warps=4, stages=3), ProductTiles(64, 128, 64, warps=4, stages=3)
    narrow = ProductTiles(128, 128, 64, warps=8, stages=4), ProductTiles(64, 128, 64, warps=4, stages=3)
    wide = ProductTiles(128, 128, 64, warps=8, stages=4), ProductTiles(128, 256, 64, warps=8, stages=3)
    for dtype in (torch.bfloat16, torch.float16):
        for experts in (64, 256):
            pairs = pairs_per_expert * experts
            found = tuple(moe_tiles(pairs, experts, products, dtype, H200) for products in (2, 1))
            assert found == {34: half, 68: narrow, 256: wide}[pairs_per_expert]
