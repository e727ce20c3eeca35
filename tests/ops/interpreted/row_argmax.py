"""`row_argmax` by its Triton kernels; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch
import triton.language as tl

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.device import Device  # noqa: E402
from mla_compile.ops.reductions.kernels import keys, row_argmax  # noqa: E402
from tests.ops.row_argmax import VOCABULARIES, check, rows_of  # noqa: E402


@pytest.mark.parametrize("columns", [1, 7, 1000, 1024, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernels(dtype: torch.dtype, columns: int) -> None:
    check(row_argmax.argmax_triton, rows_of(6, columns, dtype))


@pytest.mark.parametrize("columns", VOCABULARIES)
def test_rows_of_logits(columns: int) -> None:
    x = rows_of(2, columns, torch.bfloat16)
    assert torch.equal(row_argmax.argmax_triton(x), x.argmax(dim=-1))


@pytest.mark.parametrize(("multiprocessors", "joined"), [(1, 16), (4, 2)])
def test_parts_of_any_number_of_blocks(
    multiprocessors: int, joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial last part, a partial last block, and more parts than are joined at a time."""
    # Private: with the real sizes, the interpreter would take minutes to fill several parts.
    monkeypatch.setattr(keys, "BLOCK", 16)
    monkeypatch.setattr(keys, "_JOINED", tl.constexpr(joined))
    monkeypatch.setattr(keys, "_PROGRAMS", 1)
    monkeypatch.setattr(keys, "device_of", lambda x: Device(multiprocessors, (9, 0)))
    for columns in (16, 17, 100, 160):
        check(row_argmax.argmax_triton, rows_of(6, columns, torch.float32))


def test_of_equal_numbers_in_different_parts_the_first() -> None:
    x = torch.full((3, 5000), -1.0)
    x[0, [4999, 1030, 4000]] = 2.0
    x[1, [1023, 1024]] = torch.tensor([-0.0, 0.0])
    x[2, [4500, 2000]] = torch.tensor([torch.inf, torch.nan])
    assert row_argmax.argmax_triton(x).tolist() == [1030, 1023, 2000]
