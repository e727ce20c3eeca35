"""What the compiled metadata kernel uses, on absent GPUs; its results: `test_interpreted.py`."""

import pytest

from tests.kernel_cases import metadata_args


@pytest.mark.parametrize("ragged", [False, True], ids=["all", "ragged"])
@pytest.mark.parametrize("q_len", [1, 4, 33])
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_spills_nothing(capability: int, q_len: int, ragged: bool) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.decode_metadata import decode_metadata_triton
    from tests.triton_compile import compiled_for

    with compiled_for(capability) as kernels:
        decode_metadata_triton(*metadata_args(q_len, 64, ragged=ragged))
    (kernel,) = kernels
    assert kernel.spilled_bytes == 0 and kernel.shared_memory == 0
