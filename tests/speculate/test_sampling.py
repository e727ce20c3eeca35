"""Noise keyed by (seed, position, id), and the sampler built on it."""

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from mla_compile import MLAError
from mla_compile.ops.sampling import sample as sampling_module
from mla_compile.ops.sampling.sample import gumbel_noise
from mla_compile.speculate import SamplingParams
from mla_compile.speculate.sampling import sample, top_logprobs
from tests.speculate.defined_sampling import arguments_of


def draw(logits: torch.Tensor, count: int, **params: float) -> torch.Tensor:
    """`count` tokens from the same logits, at `count` positions."""
    row = arguments_of(SamplingParams(**params))
    return sample(SimpleNamespace(**row), logits.expand(1, count, -1), torch.arange(count)[None])[0]


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.tensor([5]), torch.arange(500)[None], 1000).double().flatten()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    uniform = torch.exp(-torch.exp(-noise))
    counts = torch.histc(uniform, bins=20, min=0, max=1) / noise.numel()
    assert (counts - 0.05).abs().max() < 2e-3


def test_noise_differs_by_seed_position_and_id_and_is_uncorrelated() -> None:
    seeds = torch.tensor([[0], [1], [2**40], [2**62], [-1], [-(2**40)], [-(2**63)], [2**63 - 1], [2**32 - 1]])
    noise = gumbel_noise(seeds, torch.arange(300).expand(len(seeds), -1), 200)
    series = noise.reshape(len(seeds), -1).double()
    pairs = torch.corrcoef(series) - torch.eye(len(seeds))
    assert pairs.abs().max() < 0.02
    by_position, by_id = noise[0].double(), noise[0].T.double()
    assert (torch.corrcoef(by_position[:50]) - torch.eye(50)).abs().max() < 0.4
    assert (torch.corrcoef(by_id[:50]) - torch.eye(50)).abs().max() < 0.3


def test_noise_of_a_position_does_not_depend_on_the_shape_it_is_asked_in() -> None:
    whole = gumbel_noise(torch.tensor([[3], [9]]), torch.arange(8).expand(2, -1), 50)
    assert torch.equal(gumbel_noise(torch.tensor([9]), torch.tensor([6]), 50), whole[1, 6:7])


def test_samples_follow_the_softmax_of_scaled_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    tokens = draw(logits, 40_000, temperature=0.8, seed=1)
    frequency = torch.bincount(tokens, minlength=5) / 40_000
    assert (frequency - (logits / 0.8).softmax(-1)).abs().max() < 0.01


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.85}, {1, 3}),
        ({"top_k": 3, "top_p": 0.97}, {0, 1, 3}),
    ],
    ids=str,
)
def test_top_k_and_top_p_keep_the_most_likely_ids(params: dict, kept: set[int]) -> None:
    logits = torch.tensor([0.10, 0.25, 0.02, 0.62, 0.01]).log()
    assert set(draw(logits, 4000, temperature=1.0, **params).tolist()) == kept


def test_noise_is_finite_for_the_extreme_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 2**32 - 1):
        monkeypatch.setattr(sampling_module, "_mix", lambda x, bits=bits: torch.full_like(x, bits))
        assert gumbel_noise(torch.tensor([0]), torch.tensor([0]), 4).isfinite().all()


def test_an_id_that_top_k_drops_is_never_sampled_even_from_a_large_vocabulary() -> None:
    logits = torch.zeros(129280)
    logits[5] = 100.0
    assert (draw(logits, 20, temperature=1.0, top_k=1) == 5).all()


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([-1.0, 3.0, 5.0, 1e4, 2e4, 7.0])
    assert (draw(logits, 50, temperature=1e-39) == 4).all()


def test_temperature_zero_and_a_tiny_top_p_are_greedy() -> None:
    logits = torch.randn(1, 1, 50)
    assert (draw(logits, 100, temperature=0.0, seed=3) == logits.argmax()).all()
    assert (draw(logits, 100, temperature=1.0, top_p=1e-9, seed=3) == logits.argmax()).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 2**31},
        {"top_k": 1.5},
        {"seed": 1.7},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"top_p": Fraction(1, 10**400)},
        {"seed": -(2**63) - 1},
        {"seed": 2**63},
        {"stop_token_ids": [2**63]},
        {"stop_token_ids": [-(2**63) - 1]},
        {"n": 16_385},
        {"n": 2, "seed": 2**63 - 1},
    ],
    ids=str,
)
def test_bad_parameters_are_refused_by_name(bad: dict) -> None:
    with pytest.raises(MLAError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_equally_likely_tokens_the_lowest_ids_are_told_of(dtype: torch.dtype) -> None:
    """However many are asked for, beside whatever other rows: half types have many equal logits."""
    g = torch.Generator().manual_seed(3)
    for vocab in (30, 400, 3000):
        logits = (torch.randn(7, 2, vocab, generator=g) * 4).to(dtype)
        logits[0] = logits[0].round()
        logits[1] = 0
        logits[2, :, ::3] = -torch.inf
        expected = logits.float().sort(dim=-1, descending=True, stable=True).indices
        chosen = logits.argmax(dim=-1)
        for n in (1, 5, 20):
            for rows in (slice(0, 7), slice(1, 2), slice(2, 5)):
                values, ids = top_logprobs(logits[rows], chosen[rows], n)
                assert torch.equal(ids[..., 1:], expected[rows, :, :n])
                expected_values = logits[rows].float().log_softmax(dim=-1).gather(2, ids[..., 1:])
                torch.testing.assert_close(values[..., 1:], expected_values)


def test_top_p_keeps_the_same_ids_in_whatever_order_a_scan_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of blocks that are added later, as kernels do, are other floats, but the same integers."""
    g = torch.Generator().manual_seed(5)
    cumsum, dtypes = torch.Tensor.cumsum, []

    def in_blocks(x: torch.Tensor, dim: int) -> torch.Tensor:
        dtypes.append(x.dtype)
        blocks = [cumsum(block, dim=dim) for block in x.split(37, dim=dim)]
        before = torch.zeros_like(blocks[0][..., :1])
        out = []
        for block in blocks:
            out.append(block + before)
            before = before + block[..., -1:]
        return torch.cat(out, dim=dim)

    scores = torch.randn(50, 3000, generator=g) * 2
    scores -= scores.amax(dim=-1, keepdim=True)
    arguments = torch.zeros(50, dtype=torch.int32), torch.rand(50, generator=g)
    # Private: sampled tokens would hide all but large errors of the kept sets.
    expected = sampling_module._keep_top(scores, *arguments)
    monkeypatch.setattr(torch.Tensor, "cumsum", in_blocks)
    assert torch.equal(sampling_module._keep_top(scores, *arguments), expected)
    assert not any(dtype.is_floating_point for dtype in dtypes) and dtypes
