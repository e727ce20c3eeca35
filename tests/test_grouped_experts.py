"""The experiment of `benchmarks.grouped_experts` compiles for Hopper; only a GPU runs it."""

import pytest
import torch

from tests.kernel_cases import moe_case


@pytest.mark.long
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("fp8", [False, True])
def test_loading_and_computing_warps_fit_hopper(fp8: bool, shared: int) -> None:
    pytest.importorskip("triton")
    from benchmarks.grouped_experts import moe_grouped
    from tests.triton_compile import compiled_for

    size = {"experts": 8, "hidden": 512, "intermediate": 256, "shared": shared}
    case = moe_case(300, 1, **size, dtype=torch.bfloat16, fp8=fp8)
    with compiled_for(90) as kernels:
        moe_grouped(case.operands(), early=False)
    found = [kernel for kernel in kernels if kernel.name == "grouped_kernel"]
    assert len(found) == 2
    for kernel in found:
        assert kernel.shared_memory <= 227 * 1024 and kernel.spilled_bytes <= (64 if fp8 else 0)
        assert ("m64n128k32" if fp8 else "m64n256k16") in kernel.text
