"""The append kernel without a GPU: results in Triton's interpreter, what the compiled code uses."""

import pytest
import torch

from tests.triton_interpreter import run_interpreted


def test_the_kernel_equals_the_torch_code_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted("append")


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_spills_nothing(capability: int) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.kernels.append import append_triton
    from tests.triton_compile import compiled_for

    cache = torch.zeros(8, 16, 576, dtype=torch.bfloat16)
    latents = torch.zeros(3, 576, dtype=torch.bfloat16)
    with compiled_for(capability) as kernels:
        append_triton(latents[:, :512], latents[:, 512:], cache, torch.arange(3))
    (kernel,) = kernels
    assert kernel.spilled_bytes == 0
