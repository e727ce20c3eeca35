"""`rotate_queries_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import itertools

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.attention.kernels.rotate_queries import rotate_queries_triton  # noqa: E402
from tests.ops.rotate_queries import check, expected, rotation_case  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "rope"), [(20, 64), (3, 20), (70, 32)])
def test_queries_are_rotated_in_place(heads: int, rope: int, dtype: torch.dtype) -> None:
    for per_column, interleaved_in, interleaved_out in itertools.product([False, True], repeat=3):
        case = rotation_case(
            2,
            heads,
            rope,
            interleaved_in=interleaved_in,
            interleaved_out=interleaved_out,
            per_column=per_column,
            dtype=dtype,
            angles=dtype if per_column else torch.float32,
        )
        want = expected(case)
        rotate_queries_triton(*case)
        # The interpreter truncates to bfloat16; a GPU rounds.
        check(case, want, units=2.5 if dtype == torch.bfloat16 else 1.5)
