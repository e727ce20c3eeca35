"""`sample_tokens` by its Triton kernels; `tests/ops/test_interpreted.py` runs this file."""

import pytest
import torch
import triton
import triton.language as tl

from tests.triton_interpreter import mend_interpreter

mend_interpreter()

from mla_compile.ops.device import Device  # noqa: E402
from mla_compile.ops.reductions.kernels import keys  # noqa: E402
from mla_compile.ops.sampling.kernels import sample  # noqa: E402
from mla_compile.ops.sampling.sample import sample_torch  # noqa: E402
from tests.ops.sample_tokens import (  # noqa: E402
    args_of_all,
    check,
    check_not_finite,
    check_shapes,
    kept_ids,
    sample_args,
    scores_of,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # NumPy warns of log(0) and of an overflow to -inf


NEVER_SAMPLED = tl.constexpr(-31.9921875)
"""Scores from here down are in the last bin, whose ids may be kept or not."""


@triton.jit
def the_least_likely(score, ids, seed, position):
    """In place of noise: shows the last score that is kept."""
    return tl.where(score > NEVER_SAMPLED, -sample.in_order(score), sample.LEAST_ORDER)


@triton.jit
def the_highest_id(score, ids, seed, position):
    """In place of noise: shows the ids that are kept among equal scores."""
    return tl.where(score > NEVER_SAMPLED, ids, sample.LEAST_ORDER)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, blocks and reads of the vocabulary, with few ids."""
    # Private: with the real sizes, the interpreter would take minutes.
    for module in (keys, sample):
        monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(sample, "_LISTED", 32)
    monkeypatch.setattr(keys, "device_of", lambda x: Device(len(x), (9, 0)))
    monkeypatch.setattr(keys, "_PROGRAMS", 3)


SIZES = pytest.mark.parametrize(
    ("vocab", "step"),
    [
        (2, 3),
        (40, 7),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(150, 1, marks=pytest.mark.slow),
    ],
)


@SIZES
@pytest.mark.usefixtures("small")
def test_the_kernels(vocab: int, step: int) -> None:
    check(sample.sample_triton, tuple(x[::step] for x in args_of_all(vocab)))


@SIZES
@pytest.mark.usefixtures("small")
def test_the_kept_ids_exactly(vocab: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = tuple(x[::step] for x in args_of_all(vocab))
    logits, _, _, temperature, top_k, top_p, min_p = args
    # Private: with noise, sampled tokens would hide all but large errors of the kept sets.
    monkeypatch.setattr(sample, "_noised", the_least_likely)
    least_likely = sample.sample_triton(*args)
    monkeypatch.setattr(sample, "_noised", the_highest_id)
    highest = sample.sample_triton(*args)
    for row in range(len(logits)):
        if temperature[row] == 0:
            continue
        scores = scores_of(logits[row, 0], float(temperature[row]))
        kept = kept_ids(scores, int(top_k[row]), float(top_p[row]), float(min_p[row]))
        kept = [i for i in kept if scores[i] > NEVER_SAMPLED.value]
        last = min(i for i in kept if scores[i] == scores[kept[-1]])
        assert least_likely[row] == last and highest[row] == max(kept), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ordinary_sizes(dtype: torch.dtype) -> None:
    args = sample_args(16, 1, 3001, dtype)
    check(sample.sample_triton, args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_filters_in_other_dtypes(dtype: torch.dtype) -> None:
    logits, position, seed, temperature, top_k, top_p, min_p = sample_args(8, 1, 300, torch.float32)
    temperature[0] = 1e-50 if dtype == torch.float64 else 0.5
    others = [x.to(dtype) for x in (temperature.to(dtype), top_p, min_p)]
    temperature, top_p, min_p = (x.float() for x in others)
    expected = sample.sample_triton(logits, position, seed, temperature, top_k, top_p, min_p)
    temperature, top_p, min_p = others
    for function in (sample.sample_triton, sample_torch):
        assert torch.equal(function(logits, position, seed, temperature, top_k, top_p, min_p), expected)


@pytest.mark.usefixtures("small")
def test_a_positions_token_does_not_depend_on_its_neighbours() -> None:
    check_shapes(sample.sample_triton, sample_args(10, 2, 50))


@pytest.mark.usefixtures("small")
def test_without_a_finite_largest_logit_it_is_argmax() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_not_finite(sample.sample_triton, dtype)


def test_the_noise_is_that_of_the_torch_code() -> None:
    """Without filters every id may win, with seeds of all sizes."""
    logits, position, seed, *_ = sample_args(16, 2, 1500)
    seed[:8] = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1, 2**32, 2**32 - 1])
    position[:2] = torch.tensor([[0, 1], [2**31, 2**32 - 1]])
    zeros, ones = torch.zeros(16), torch.ones(16)
    check(sample.sample_triton, (logits / 30, position, seed, ones, zeros.int(), ones, zeros))
