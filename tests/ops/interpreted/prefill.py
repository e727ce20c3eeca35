"""`prefill_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

from typing import Any

import pytest
import torch

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.kernels.plan import PrefillTiles  # noqa: E402
from mla_compile.ops.kernels.prefill import prefill_triton  # noqa: E402
from tests.cases import make_case  # noqa: E402
from tests.kernel_cases import check_prefill, prefill_args  # noqa: E402

TILES = PrefillTiles(queries=16, keys=16, warps=4, stages=1)


def check(chunks: list[tuple[int, int]], context_tokens: int = 64, **sizes: Any) -> None:
    """chunks: (length, tokens cached before) of each."""
    case = make_case(prefill=chunks, **sizes)
    check_prefill(case, prefill_triton(*prefill_args(case), tiles=TILES, context_tokens=context_tokens))


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
@pytest.mark.parametrize(
    "chunks",
    [
        [(1, 0)],
        [(16, 0), (17, 0), (15, 0), (33, 0)],
        [(5, 3), (2, 0), (1, 40)],
        [(20, 100), (3, 1)],
    ],
    ids=str,
)
def test_ragged_chunks_with_context(chunks: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(chunks, dtype=dtype)


@pytest.mark.parametrize(
    "sizes",
    [
        {"nope": 128, "rope": 64, "v": 128, "rank": 64},
        {"nope": 192, "rope": 64, "v": 256, "rank": 32},
        {"nope": 64, "rope": 32, "v": 64, "rank": 32},
        {"nope": 64, "rope": 64, "v": 128, "rank": 32},
    ],
    ids=["V3", "GLM", "MiniCPM3", "Mistral4"],
)
def test_the_widths_of_models(sizes: dict[str, int]) -> None:
    check([(18, 7), (4, 0)], heads=2, **sizes)


@pytest.mark.parametrize("context_tokens", [1, 8, 20, 1000])
@pytest.mark.parametrize("page_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))])
def test_context_in_parts_of_every_size(context_tokens: int, page_size: int) -> None:
    check([(4, 19), (2, 5), (1, 0)], context_tokens, page_size=page_size)


@pytest.mark.parametrize(
    "chunk", [5, 16, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (2, 19, 20))]
)
def test_chunks_of_a_prompt_equal_one_pass(chunk: int) -> None:
    for start in range(0, 20, chunk):
        check([(min(chunk, 20 - start), start)])
