"""What the compiled sparse attention kernel uses, on absent GPUs; its results: `test_interpreted.py`."""

import itertools

import pytest
import torch

from mla_compile.ops import device as devices
from tests.cases import make_case
from tests.kernel_cases import sparse_case
from tests.ops.test_triton_decode import GPUS

HEADS = {"V3.2": 128, "GLM-5": 64, "V3.2 on 8 GPUs": 16}


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "model", "dtype", "fp8"),
    [
        *itertools.product([90], HEADS, [torch.bfloat16], [False, True]),
        *itertools.product([80, 86, 100, 120], ["GLM-5"], [torch.bfloat16], [False]),
        *itertools.product([80, 90], ["GLM-5"], [torch.float32], [False]),
    ],
    ids=str,
)
def test_compiled_code_fits_the_gpu_and_spills_next_to_nothing(
    capability: int, model: str, dtype: torch.dtype, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.sparse import sparse_triton
    from tests.triton_compile import compiled_for

    device, shared_memory = GPUS[capability]
    monkeypatch.setattr(devices, "H200", device)
    case = sparse_case([2048, 64], topk=2048, heads=HEADS[model], rank=512, rope=64, dtype=dtype, fp8=fp8)
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "heads", "dtype"),
    [
        *itertools.product([80, 86, 90, 100, 120], [64], [torch.bfloat16]),
        (90, 32, torch.bfloat16),
        *itertools.product([80, 90], [64], [torch.float32]),
    ],
    ids=str,
)
def test_compiled_selection_fits_the_gpu_and_spills_next_to_nothing(
    capability: int, heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.attention.kernels.select_keys import decode_select_triton, prefill_select_triton
    from tests.triton_compile import compiled_for

    monkeypatch.setattr(devices, "H200", GPUS[capability][0])
    case = make_case([300, 20], [(64, 200)], q_len=2, page_size=64, dtype=dtype)
    d, p = case.batch.decode, case.batch.prefill
    assert d is not None and p is not None
    q, weights = torch.zeros(68, heads, 128, dtype=dtype), torch.zeros(68, heads)
    cache = torch.zeros(*case.kv_cache.shape[:2], 128, dtype=dtype)
    table = torch.zeros(2, 200, dtype=torch.int32)  # of more keys than a program holds
    with compiled_for(capability) as kernels:
        decode_select_triton(q[:4], weights[:4], cache, table, d.seq_lens, d.q_lens, 2, 16)
        prefill_select_triton(q[4:], weights[4:], cache, p.cu_seqlens_q, p.cu_seqlens_k, p.key_slots, 16)
    scores, choice = "scores_kernel", "choose_kernel"
    assert [kernel.name for kernel in kernels] == [scores, "list_kernel", choice, scores, choice]
    for kernel in kernels:
        assert kernel.shared_memory <= GPUS[capability][1], kernel.name
        assert kernel.spilled_bytes <= 128, f"{kernel.name}: {kernel.spilled_bytes} bytes per thread"
    if dtype == torch.bfloat16 and capability != 100:
        products = "wgmma.mma_async" if capability == 90 else "mma.sync"
        assert all(products in kernel.text for kernel in kernels[::3]), (
            "the products must run on tensor cores"
        )
        assert all("cp.async" in kernel.text for kernel in kernels[::3]), (
            "keys must be on their way meanwhile"
        )
