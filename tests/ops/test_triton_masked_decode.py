"""What the compiled masked decode kernel uses, on absent GPUs; its results: `test_interpreted.py`."""

import itertools

import pytest
import torch

from mla_compile.ops import device as devices
from tests.kernel_cases import masked_case
from tests.ops.test_triton_decode import GPUS, WIDTHS


@pytest.mark.parametrize(
    ("capability", "model", "masked", "dtype"),
    [
        *itertools.product([90], ["GLM", "MiniCPM3"], ["none", "bool", "float", "heads"], [torch.bfloat16]),
        *itertools.product([80, 86, 100, 120], ["GLM"], ["bool", "heads"], [torch.bfloat16]),
        *itertools.product([80, 90], ["GLM"], ["bool"], [torch.float32]),
    ],
    ids=str,
)
def test_compiled_code_fits_the_gpu_and_spills_next_to_nothing(
    capability: int, model: str, masked: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.masked_decode import masked_decode_triton
    from tests.triton_compile import compiled_for

    heads, rank, rope = WIDTHS[model]
    device, shared_memory = GPUS[capability]
    monkeypatch.setattr(devices, "H200", device)
    case = masked_case([64, 64], masked=masked, keys=1024, heads=heads, rank=rank, rope=rope, dtype=dtype)
    with compiled_for(capability) as kernels:
        masked_decode_triton(*case.args())
    assert [kernel.name for kernel in kernels] == ["masked_split_kernel", "combine_kernel"]
    for kernel in kernels:
        assert kernel.shared_memory <= shared_memory, kernel.name
        # The mask: 72 bytes with Triton 3.7, 96 if it differs by head. A few registers, not the latents.
        assert kernel.spilled_bytes <= 128, f"{kernel.name}: {kernel.spilled_bytes} bytes per thread"
    if dtype == torch.bfloat16:
        products = "wgmma.mma_async" if capability == 90 else "mma.sync" if capability != 100 else ""
        assert products in kernels[0].text, "the products must run on tensor cores"
        assert "cp.async" in kernels[0].text, "latents must be on their way while others are multiplied"
