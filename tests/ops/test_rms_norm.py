"""`fused_rms_norm` and `fused_add_rms_norm`: values, bits, contracts, errors."""

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.norm.rms_norm import (
    add_rms_norm_op,
    add_rms_norm_torch,
    fused_add_rms_norm,
    fused_rms_norm,
    rms_norm_op,
    rms_norm_torch,
)
from tests.ops.rms_norm import TOLERANCE, check


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 100, 2048, 3001])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_by_halves(dtype: torch.dtype, columns: int) -> None:
    check(rms_norm_torch, add_rms_norm_torch, dtype, columns)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_contracts(rows: int) -> None:
    x, apart = torch.randn(rows, 12), torch.randn(rows, 20)[:, :12]
    opcheck(rms_norm_op, (x, torch.randn(12), 1e-5))
    opcheck(rms_norm_op, (apart.bfloat16(), None, 1e-5))
    opcheck(add_rms_norm_op, (apart, x, torch.randn(12), 1e-5))
    opcheck(add_rms_norm_op, (x.bfloat16(), x.bfloat16(), None, 1e-5))
    columns_apart = torch.randn(12, rows).t()
    opcheck(rms_norm_op, (columns_apart, torch.randn(12), 1e-5))
    opcheck(add_rms_norm_op, (columns_apart, columns_apart, None, 1e-5))
    assert fused_rms_norm(columns_apart, None, 1e-5).is_contiguous()


def test_a_mistake_is_named() -> None:
    x, weight = torch.randn(3, 12), torch.ones(12)
    with pytest.raises(MLAError, match=r"^weight: .*\b12\b.*\[11\]"):
        fused_rms_norm(x, torch.ones(11), 1e-5)
    with pytest.raises(MLAError, match=r"^weight: .*float32.*float64"):
        fused_rms_norm(x, weight.double(), 1e-5)
    with pytest.raises(MLAError, match=r"^weight: .*cpu.*meta"):
        fused_rms_norm(x, weight.to("meta"), 1e-5)
    with pytest.raises(MLAError, match=r"^weight: .*requires_grad"):
        fused_rms_norm(x, torch.nn.Parameter(weight), 1e-5)
    with pytest.raises(MLAError, match=r"^residual: .*\b3\b.*\[2, 12\]"):
        fused_add_rms_norm(x, x[:2], weight, 1e-5)
    with pytest.raises(MLAError, match=r"^residual: .*float32.*float16"):
        fused_add_rms_norm(x, x.half(), weight, 1e-5)
    with pytest.raises(MLAError, match=r"^residual: .*requires_grad"):
        fused_add_rms_norm(x, x.clone().requires_grad_(), weight, 1e-5)


def test_the_kernel_spills_nothing() -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.norm.kernels.rms_norm import add_rms_norm_triton
    from tests.triton_compile import compiled_for

    with compiled_for(90) as kernels:
        for columns in (768, 2048, 7168, 2**14):
            x = torch.empty(2, columns, dtype=torch.bfloat16)
            add_rms_norm_triton(x, x, x[0], 1e-6)
    assert len(kernels) == 4 and all(kernel.spilled_bytes == 0 for kernel in kernels)
