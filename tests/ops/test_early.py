"""Kernels that start early wait before they read or write; on a CPU only the compiled code shows it."""

import re
from collections.abc import Callable

import pytest
import torch

from tests.fp8_cases import fp8_weight
from tests.kernel_cases import moe_case, norm_rope_append_case
from tests.ops.rotate_queries import rotation_case
from tests.ops.routing import router_args

pytest.importorskip("triton")

from mla_compile.ops import dependent_launch
from mla_compile.ops.attention.kernels import norm_rope_append, rotate_queries
from mla_compile.ops.device import triton_version
from mla_compile.ops.experts.kernels import moe, moe_gemv, routing
from mla_compile.ops.linear.kernels import by_head, fp8_linear, gemv, linear
from mla_compile.ops.linear.operands import FP8LinearOperands
from mla_compile.ops.norm.kernels import rms_norm

BF16 = torch.bfloat16
CALLS: dict[str, Callable[[], object]] = {
    "gemv": lambda: linear.linear_gemv(torch.zeros(1, 5120, dtype=BF16), torch.zeros(64, 5120, dtype=BF16)),
    "by head": lambda: by_head.multiply_by_head_triton(
        torch.zeros(1, 3, 512, dtype=BF16), torch.zeros(3, 64, 512, dtype=BF16).mT
    ),
    "by head, across": lambda: by_head.multiply_by_head_triton(
        torch.zeros(1, 3, 192, dtype=BF16), torch.zeros(3, 192, 512, dtype=BF16)
    ),
    "by head, tiles": lambda: by_head.multiply_by_head_tiles(
        torch.zeros(8, 3, 512, dtype=BF16), torch.zeros(3, 64, 512, dtype=BF16).mT
    ),
    "by head, tiles, across": lambda: by_head.multiply_by_head_tiles(
        torch.zeros(8, 3, 192, dtype=BF16), torch.zeros(3, 192, 512, dtype=BF16)
    ),
    "rms_norm": lambda: rms_norm.rms_norm_triton(torch.zeros(1, 64), torch.zeros(64), 1e-6),
    "router": lambda: routing.router_triton(*router_args("glm", 2, 64, BF16)),
    "norm and router": lambda: routing.norm_router_triton(
        x := torch.zeros(2, 64, dtype=BF16), x, None, 1e-6, *router_args("glm", 2, 64, BF16)[1:]
    ),
    "norm and gemv": lambda: gemv.multiply(
        x := torch.zeros(1, 512, dtype=BF16),
        torch.zeros(64, 512, dtype=BF16),
        None,
        (2, 512, 2),
        gemv.Norm(x, None, 1e-6),
    ),
    "fp8 gemv": lambda: fp8_linear.linear_gemv(
        FP8LinearOperands(torch.zeros(1, 5120, dtype=BF16), *fp8_weight(64, 5120))
    ),
    "blocks": lambda: linear.linear_blocks(
        torch.zeros(8, 5120, dtype=BF16), torch.zeros(64, 5120, dtype=BF16)
    ),
    "fp8 blocks": lambda: fp8_linear.linear_blocks(
        FP8LinearOperands(torch.zeros(8, 5120, dtype=BF16), *fp8_weight(64, 5120))
    ),
    "moe of one token": lambda: moe_gemv.moe_gemv(
        moe_case(1, 4, hidden=64, intermediate=32, dtype=BF16).operands()
    ),
    "moe": lambda: moe.moe_triton(moe_case(4, 4, hidden=64, intermediate=32, dtype=BF16).operands()),
    "append": lambda: norm_rope_append.norm_rope_append_triton(norm_rope_append_case(2, 64, 16, dtype=BF16)),
    "queries": lambda: rotate_queries.rotate_queries_triton(*rotation_case(2, 20, 64, 192, dtype=BF16)),
}
WITH_WEIGHTS = {
    "gemv",
    "norm and gemv",
    "fp8 gemv",
    "blocks",
    "fp8 blocks",
    "by head",
    "by head, across",
    "by head, tiles",
    "by head, tiles, across",
}
"""Kernels that have weights brought to the cache before they wait."""


@pytest.mark.parametrize("name", CALLS)
def test_an_early_kernel_waits_before_it_reads_or_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.triton_compile import compiled_for

    call = CALLS[name]
    monkeypatch.setattr(dependent_launch, "starts_early", lambda tensor: True)
    with compiled_for(90) as kernels:
        call()
    assert kernels
    for kernel in kernels:
        found = re.findall(r"griddepcontrol\.\w+|\b(?:ld|st)\.global|cp\.async\.c|\bprefetch", kernel.text)
        wait = found.index("griddepcontrol.wait")
        assert set(found[:wait]) <= {"prefetch"}, kernel.name
        assert found[wait + 1] == "griddepcontrol.launch_dependents", kernel.name
        spills = 16 if triton_version() >= (3, 9) and kernel.name == "gate_up_kernel" else 0
        assert kernel.spilled_bytes <= spills, kernel.name
    assert ("prefetch" in kernels[0].text) == (name in WITH_WEIGHTS)
