"""What the compiled sparse attention kernel uses, on absent GPUs; its results: `test_interpreted.py`."""

import itertools

import pytest
import torch

from mla_compile.ops import device as devices
from tests.kernel_cases import sparse_case
from tests.ops.test_triton_decode import GPUS

HEADS = {"V3.2": 128, "GLM-5": 64, "V3.2 on 8 GPUs": 16}


@pytest.mark.parametrize(
    ("capability", "model", "dtype"),
    [
        *itertools.product([90], HEADS, [torch.bfloat16]),
        *itertools.product([80, 86, 100, 120], ["GLM-5"], [torch.bfloat16]),
        *itertools.product([80, 90], ["GLM-5"], [torch.float32]),
    ],
    ids=str,
)
def test_compiled_code_fits_the_gpu_and_spills_next_to_nothing(
    capability: int, model: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.sparse import sparse_triton
    from tests.triton_compile import compiled_for

    device, shared_memory = GPUS[capability]
    monkeypatch.setattr(devices, "H200", device)
    case = sparse_case([2048, 64], topk=2048, heads=HEADS[model], rank=512, rope=64, dtype=dtype)
    with compiled_for(capability) as kernels:
        sparse_triton(*case)
    assert [kernel.name for kernel in kernels] == ["sparse_kernel", "combine_kernel"]
    for kernel in kernels:
        assert kernel.shared_memory <= shared_memory, kernel.name
        assert kernel.spilled_bytes <= 128, f"{kernel.name}: {kernel.spilled_bytes} bytes per thread"
    if dtype == torch.bfloat16:
        products = "wgmma.mma_async" if capability == 90 else "mma.sync" if capability != 100 else ""
        assert products in kernels[0].text, "the products must run on tensor cores"
        assert "cp.async" in kernels[0].text, "latents must be on their way while others are multiplied"
