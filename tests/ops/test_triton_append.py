"""What the compiled append kernel uses, on absent GPUs; its results: `test_interpreted.py`."""

import pytest
import torch

from mla_compile.latents import FP8


@pytest.mark.parametrize(("capability", "fp8"), [(80, False), (90, False), (90, True)])
def test_compiled_code_spills_nothing(capability: int, fp8: bool) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.append import append_triton
    from tests.triton_compile import compiled_for

    cache = torch.zeros(8, 16, 656, dtype=FP8) if fp8 else torch.zeros(8, 16, 576, dtype=torch.bfloat16)
    latents = torch.zeros(3, 576, dtype=torch.bfloat16)
    with compiled_for(capability) as kernels:
        append_triton(latents[:, :512], latents[:, 512:], cache, torch.arange(3))
    (kernel,) = kernels
    assert kernel.spilled_bytes == 0
