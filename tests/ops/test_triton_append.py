"""What the compiled append kernel uses, on absent GPUs; its results: `test_interpreted.py`."""

import pytest
import torch


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_spills_nothing(capability: int) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.append import append_triton
    from tests.triton_compile import compiled_for

    cache = torch.zeros(8, 16, 576, dtype=torch.bfloat16)
    latents = torch.zeros(3, 576, dtype=torch.bfloat16)
    with compiled_for(capability) as kernels:
        append_triton(latents[:, :512], latents[:, 512:], cache, torch.arange(3))
    (kernel,) = kernels
    assert kernel.spilled_bytes == 0
