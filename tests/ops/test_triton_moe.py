"""The expert kernels without a GPU: plans, what the compiled code uses; their results: `test_interpreted.py`."""

import pytest
import torch

from mla_compile.ops.kernels.plan import H200, moe_tiles
from tests.kernel_cases import moe_case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 32, 128])
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_fits_every_gpu_and_spills_nothing(
    capability: int, tokens: int, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.kernels.moe import moe_triton
    from tests.triton_compile import compiled_for

    case = moe_case(tokens, 4, experts=64, hidden=256, intermediate=128, dtype=dtype)
    with compiled_for(capability) as kernels:
        moe_triton(*case.args())
    assert [kernel.name for kernel in kernels] == ["gate_up_kernel", "down_kernel", "weighted_sum_kernel"]
    for kernel in kernels:
        assert kernel.shared_memory <= 99 * 1024, kernel.name
        assert kernel.spilled_bytes == 0, f"{kernel.name}: {kernel.spilled_bytes} bytes per thread"


@pytest.mark.parametrize("pairs", [4, 32, 128, 512])
def test_programs_are_enough_to_fill_the_gpu(pairs: int) -> None:
    """GLM-4.7-Flash: 64 experts of 2048 x 1536, 4 of them for a token."""
    for columns in (1536, 2048):
        tiles = moe_tiles(pairs, 64, columns, torch.bfloat16, H200)
        assert min(pairs, 64) * columns / tiles.columns >= 2 * H200.multiprocessors
