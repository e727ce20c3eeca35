"""Triton kernels that are quick in Triton's interpreter, in one process: it takes longer to start than they do."""

import pytest

from tests.triton_interpreter import run_interpreted


def test_the_kernels_equal_their_definitions_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted("append", "decode_metadata", "norm_rope_append", "prefill")
