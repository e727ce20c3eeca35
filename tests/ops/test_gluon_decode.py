"""The Hopper decode kernels as far as a CPU goes: compiled for a GPU that is not there."""

import pytest
import torch

from tests.kernel_cases import decode_case


@pytest.mark.parametrize("ragged", [False, True], ids=["uniform", "q_lens"])
@pytest.mark.parametrize(
    ("heads", "q_len", "page_size", "name"),
    [
        (16, 1, 64, "narrow_kernel"),
        (20, 1, 1, "narrow_kernel"),
        (16, 4, 64, "wide_kernel"),
        (20, 4, 16, "wide_kernel"),
        (128, 1, 1, "wide_kernel"),
    ],
)
def test_compiled_code_fits_a_multiprocessor_and_spills_nothing(
    heads: int, q_len: int, page_size: int, name: str, ragged: bool
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.kernels.gluon.decode import decode_gluon
    from tests.triton_compile import compiled_for

    q_lens = [q_len, 0] if ragged else None
    case = decode_case(
        [64, 64],
        heads=heads,
        rank=512,
        rope=64,
        q_len=q_len,
        q_lens=q_lens,
        page_size=page_size,
        dtype=torch.bfloat16,
    )
    with compiled_for(90) as kernels:
        decode_gluon(*case.args())
    assert [kernel.name for kernel in kernels] == [name, "join_kernel"]
    decode, join = kernels
    assert decode.shared_memory <= 232_448
    assert decode.spilled_bytes == join.spilled_bytes == 0
    assert "wgmma.mma_async" in decode.text and "cp.async.cg" in decode.text
    assert ("cp.async.bulk.tensor" in decode.text) == (name == "wide_kernel" and page_size > 1)
    assert "griddepcontrol.wait" in join.text
