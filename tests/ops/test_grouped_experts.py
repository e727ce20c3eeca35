"""The grouped expert kernel without a GPU: its choice, its compiled code. Results: `tests/test_gpu_kernels.py`."""

from typing import Any

import pytest
import torch

from mla_compile.ops.library import choose
from tests.kernel_cases import moe_case
from tests.ops.test_choice import fake, on


@pytest.mark.parametrize(
    ("machine", "dtype", "tokens", "sizes", "plain", "fp8"),
    [
        ((9, 0), torch.bfloat16, 300, (256, 128), "grouped", "grouped_fp8"),
        ((9, 0), torch.bfloat16, 200, (256, 128), "triton", "fp8_products"),
        ((9, 0), torch.bfloat16, 300, (384, 128), "rounded", "fp8_products"),
        ((9, 0), torch.bfloat16, 300, (256, 64), "rounded", "triton_fp8"),
        ((9, 0), torch.float16, 300, (256, 128), "triton", "triton_fp8"),
        ((10, 0), torch.bfloat16, 300, (256, 128), "rounded", "triton_fp8"),
    ],
    ids=str,
)
def test_it_serves_many_tokens_of_whole_tiles_on_hopper(
    machine: Any,
    dtype: torch.dtype,
    tokens: int,
    sizes: tuple[int, int],
    plain: str,
    fp8: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(machine, monkeypatch)
    hidden, intermediate = sizes
    for is_fp8, expected in ((False, plain), (True, fp8)):
        case = moe_case(tokens, 2, hidden=hidden, intermediate=intermediate, dtype=dtype, fp8=is_fp8)
        assert choose("moe_experts", fake((*case.all_args(), False), machine)).chosen.name == expected
        if is_fp8:
            args = (*case.all_args()[:-1], True, False)
            chosen = choose("moe_experts", fake(args, machine)).chosen.name
            assert chosen.startswith("grouped") == expected.startswith("grouped")
        exact = choose("moe_experts", fake((*case.all_args(), True), machine)).chosen.name
        assert not exact.startswith("grouped")


@pytest.mark.long
@pytest.mark.parametrize(("experts", "shared"), [(8, 0), (8, 2), (64, 1), (384, 1)])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_it_fits_hopper(parts: int, experts: int, shared: int) -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.experts.kernels.grouped import moe_grouped
    from tests.triton_compile import compiled_for

    size = {"experts": experts, "hidden": 512, "intermediate": 256, "shared": shared}
    case = moe_case(300, 1, **size, dtype=torch.bfloat16, fp8=parts > 0)
    with compiled_for(90) as kernels:
        moe_grouped(case.operands(), parts=parts)
    before = "prepare_kernel" if parts else "sort_kernel"
    assert [kernel.name for kernel in kernels] == [before, *["grouped_kernel"] * 2, "weighted_sum_kernel"]
    for kernel in kernels[1:3]:
        assert kernel.shared_memory <= 227 * 1024
        assert kernel.spilled_bytes <= (128 if parts else 0)  # read once a tile
        assert ("m64n128k32" if parts else "m64n256k16") in kernel.text


def test_bulk_copies_need_weights_at_multiples_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    on((9, 0), monkeypatch)
    for fp8, expected in ((False, "rounded"), (True, "fp8_products")):
        case = moe_case(300, 2, hidden=256, intermediate=128, shared=1, dtype=torch.bfloat16, fp8=fp8)
        operands = case.operands()
        for name in ("w_gate_up", "w_down", "shared_up"):
            weight = getattr(operands, name)
            odd = weight.new_empty(weight.numel() + 1)[1:].view_as(weight)
            args = (*operands._replace(**{name: odd}), False)
            assert choose("moe_experts", fake(args, (9, 0))).chosen.name == expected
