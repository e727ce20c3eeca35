"""`row_argmax`: values, contract, errors, and its compiled kernels."""

import pytest
import torch
from torch.library import opcheck

from mla_compile import MLAError
from mla_compile.ops.device import H200
from mla_compile.ops.reductions.last_dim import row_argmax, row_argmax_op
from mla_compile.speculate.sampling import argmax
from tests.ops.row_argmax import VOCABULARIES, check, rows_of


@pytest.mark.parametrize("columns", [1, 7, 1000, *VOCABULARIES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_torchs_argmax(dtype: torch.dtype, columns: int) -> None:
    check(row_argmax, rows_of(12 if columns < 2000 else 6, columns, dtype))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_contract(rows: int) -> None:
    opcheck(row_argmax_op, (torch.randn(rows, 12).bfloat16(),))


def test_a_mistake_is_named() -> None:
    for x, message in (
        (torch.randn(12), "rows, columns"),
        (torch.ones(3, 4, dtype=torch.int64), "float16.*int64"),
        (torch.randn(3, 0), r"column.*\[3, 0\]"),
    ):
        with pytest.raises(MLAError, match=f"^x: .*{message}"):
            row_argmax(x)


def test_ids_of_rows_with_several_positions() -> None:
    x = rows_of(12, 40, torch.float32)
    for scores in (x.view(4, 3, 40), x.view(4, 3, 40).transpose(0, 1), x[:, None], x[:0, None]):
        assert torch.equal(argmax(scores), scores.argmax(dim=-1))


def test_the_kernels_spill_nothing() -> None:
    pytest.importorskip("triton")
    from mla_compile.ops.reductions.kernels.row_argmax import argmax_triton
    from tests.triton_compile import compiled_for

    with compiled_for(10 * H200.capability[0] + H200.capability[1]) as kernels:
        argmax_triton(torch.empty(1, VOCABULARIES[1], dtype=torch.bfloat16))
    assert [kernel.name for kernel in kernels] == ["parts_kernel", "join_kernel"]
    assert all(kernel.spilled_bytes == 0 for kernel in kernels)
    assert "ld.global.v4.b32" in kernels[0].text, "a thread reads 16 bytes at a time"
