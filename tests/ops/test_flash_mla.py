"""What the compiled kernels around FlashMLA use, on an absent GPU; their results: `test_interpreted.py`."""

import importlib.util
import sys

import pytest
import torch

from tests.kernel_cases import decode_case, sparse_case
from tests.ops import flash_mla_stand_in


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("heads", "q_len"), [(20, 1), (20, 4), (128, 2)])
def test_compiled_code_spills_nothing(
    heads: int, q_len: int, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if importlib.util.find_spec("flash_mla") is None:
        monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_stand_in.module())
    from mla_compile.ops.attention.kernels import flash_mla
    from tests.triton_compile import compiled_for

    def nothing(q: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        rows, q_len, heads, _ = q.shape
        return q[..., :512].contiguous(), torch.zeros(rows, heads, q_len)

    monkeypatch.setattr(flash_mla, "flash_mla_with_kvcache", nothing)
    case = decode_case(
        [5, 3],
        q_len=q_len,
        q_lens=[q_len, 0] if ragged else None,
        heads=heads,
        rank=512,
        rope=64,
        page_size=64,
        dtype=torch.bfloat16,
    )
    plan = flash_mla.PLANNER.like(case.operands())
    with compiled_for(90) as kernels:
        flash_mla.decode_flash_mla(case.operands(), plan)
    assert [kernel.name for kernel in kernels] == ["pack_kernel", "unpack_kernel"]
    assert not any(kernel.spilled_bytes for kernel in kernels)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 140])
def test_compiled_code_around_the_sparse_kernels_spills_nothing(
    tokens: int, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if importlib.util.find_spec("flash_mla") is None:
        monkeypatch.setitem(sys.modules, "flash_mla", flash_mla_stand_in.module())
    from mla_compile.ops.attention.kernels import flash_mla_sparse
    from tests.triton_compile import compiled_for

    def nothing(q: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, ...]:
        out = q[..., :512].contiguous()
        return out, torch.zeros(0), torch.zeros(out.shape[:2])

    monkeypatch.setattr(flash_mla_sparse, "flash_mla_sparse_fwd", nothing)
    monkeypatch.setattr(flash_mla_sparse, "flash_mla_with_kvcache", lambda *q, **_: nothing(*q)[:2])
    sizes = {"heads": 64, "rank": 512, "rope": 64, "dtype": torch.bfloat16}
    case = sparse_case([9] * tokens, topk=2048, fp8=fp8, **sizes)
    run = flash_mla_sparse.sparse_flash_mla_fp8 if fp8 else flash_mla_sparse.sparse_flash_mla
    with compiled_for(90) as kernels:
        run(*case)
    last = {(False, 1): "join_kernel", (True, 140): "fence_kernel"}.get((fp8, tokens))
    assert [kernel.name for kernel in kernels] == ["pack_kernel", *([last] if last else [])]
    assert not any(kernel.spilled_bytes for kernel in kernels)
