"""All Triton kernels in Triton's interpreter, in one process: most take less time than its start."""

import pytest

from tests.triton_interpreter import run_interpreted


@pytest.mark.long
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_equal_their_definitions_in_the_interpreter(marks: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(marks)
