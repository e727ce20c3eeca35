"""`matmul_triton` in Triton's interpreter; `tests/ops/test_interpreted.py` runs this file."""

import random

import pytest
import torch

from tests.triton_interpreter import add_in_order, mend_interpreter

mend_interpreter()

from mla_compile.ops.linear.kernels.matmul import matmul_triton  # noqa: E402
from mla_compile.ops.linear.tiles import ProductTiles  # noqa: E402
from tests.kernel_cases import check_matmul, drawn_matmul  # noqa: E402


def drawn_tiles(draw: random.Random) -> ProductTiles:
    return ProductTiles(
        draw.choice([16, 32]), draw.choice([16, 32]), draw.choice([16, 64]), warps=4, stages=1
    )


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 60), marks=pytest.mark.slow)], ids=len)
def test_drawn_shapes_strides_and_tiles(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        x, w = drawn_matmul(
            draw, most_tokens=60, most=draw.choice([70, 600]), dtypes=(torch.bfloat16, torch.float32)
        )
        check_matmul(x, w, matmul_triton(x, w, tiles=drawn_tiles(draw) if draw.random() < 0.7 else None))


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.slow)], ids=len)
def test_a_tokens_bits_depend_on_no_other_token_nor_on_the_tile(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_in_order(monkeypatch)
    for seed in seeds:
        draw = random.Random(seed)
        x, w = drawn_matmul(
            draw, most_tokens=40, most=draw.choice([70, 300]), dtypes=(torch.bfloat16, torch.float32)
        )
        whole = matmul_triton(x, w)
        for _ in range(3):
            first, last = sorted((draw.randint(0, len(x)), draw.randint(0, len(x))))
            if first < last:
                got = matmul_triton(x[first:last], w, tiles=drawn_tiles(draw), split=draw.random() < 0.5)
                assert torch.equal(got, whole[first:last]), seed
