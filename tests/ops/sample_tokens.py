"""What every implementation of `sample_tokens` must do, and the kept ids by their definition."""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from mla_compile.ops.sampling.sample import gumbel_noise

Sample = Callable[..., Tensor]
PARAMETERS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.1),
    (1.0, 1, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.0, 2**31 - 1, 0.93, 0.0),
    (1.3, 0, 0.91, 0.0),
    (0.6, 0, 0.9999, 0.0),
    (1.0, 0, 1e-9, 0.0),
    (0.8, 50, 0.83, 0.0),
    (2.0, 7, 0.31, 0.004),
    (1.0, 0, 1.0, 0.11),
    (1.0, 0, 0.7, 1.0),
    (100.0, 0, 0.57, 0.0),
    (100.0, 5, 0.57, 0.0),
    (1e-39, 5, 0.9, 0.0),
    (1e30, 4, 0.4, 0.0),
]


def sample_args(rows: int, n: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Drawn logits, and the parameters of `PARAMETERS` in turn."""
    g = torch.Generator().manual_seed(vocab + 1)
    logits = (torch.randn(rows, n, vocab, generator=g) * 3).to(dtype)
    parameters = [PARAMETERS[i % len(PARAMETERS)] for i in range(rows)]
    temperature, top_k, top_p, min_p = (torch.tensor([p[i] for p in parameters]) for i in range(4))
    position = torch.randint(2**31, (rows, n), generator=g)
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=g)
    return (
        logits,
        position,
        seed,
        temperature.float(),
        top_k.to(torch.int32),
        top_p.float(),
        min_p.float(),
    )


def kinds_of_logits(vocab: int) -> Iterator[tuple[str, Tensor]]:
    """Vectors of logits, by name: finite numbers and -inf."""
    g = torch.Generator().manual_seed(vocab)
    drawn = torch.randn(vocab, generator=g)
    yield "drawn", drawn * 3
    yield "ties", (drawn * 2).round()
    yield "bfloat16", (drawn * 3).bfloat16().float()
    yield "equal", torch.full((vocab,), -7.5)
    yield "almost equal", 20 + drawn * 1e-4
    yield "likely", torch.where(torch.arange(vocab) == vocab // 2, 30.0, drawn)
    yield "far", drawn * 1e4
    yield "huge", drawn * 1e38
    yield "masked", torch.where(drawn > 0.5, drawn, -torch.inf).index_fill(0, torch.tensor([0]), 0.25)
    yield "single", torch.full((vocab,), -torch.inf).index_fill(0, torch.tensor([vocab - 1]), 3.0)


def args_of_all(vocab: int) -> tuple[Tensor, ...]:
    """All kinds of logits with all parameters, a position each."""
    kinds = [logits for _, logits in kinds_of_logits(vocab)]
    _, position, seed, *parameters = sample_args(len(PARAMETERS), 1, 1)
    repeated = (x.repeat_interleave(len(kinds), dim=0) for x in (position, seed, *parameters))
    return torch.stack(kinds * len(PARAMETERS))[:, None], *repeated


def scores_of(logits: Tensor, temperature: float) -> np.ndarray:
    """Float32 scores of one position."""
    values = logits.float().numpy()
    with np.errstate(over="ignore"):
        return (values - values.max()) / np.float32(temperature)


def kept_ids(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that the filters keep, the likeliest first and at least one; sums of Python integers."""
    least = math.log(np.float32(min_p)) if min_p else -math.inf
    ids = [i for i in range(len(scores)) if scores[i] >= np.float32(least) and scores[i] > -math.inf]
    ids = sorted(ids, key=lambda i: (-scores[i], i))[: top_k or None]
    masses = [int(np.exp(scores[i]) * np.float32(2**40)) for i in ids]
    if top_p >= 1:
        return ids
    before = [0, *itertools.accumulate(masses)]
    target = float(np.float32(top_p)) * before[-1]
    return [i for i, mass in zip(ids, before) if mass < target] or ids[:1]


def check(sample: Sample, args: tuple[Tensor, ...]) -> None:
    """The best kept id, noise added; each position the same when it is sampled alone."""
    logits, position, seed, temperature, top_k, top_p, min_p = args
    tokens = sample(*args)
    assert tokens.dtype == torch.int64 and tokens.shape == position.shape
    noise = gumbel_noise(seed[:, None], position, logits.shape[2]).cpu().numpy()
    for row, j in itertools.product(*map(range, position.shape)):
        here = logits[row, j].cpu()
        if temperature[row] == 0 or not here.max().isfinite():
            expected = int(here.argmax())
        else:
            scores = scores_of(here, float(temperature[row]))
            kept = kept_ids(scores, int(top_k[row]), float(top_p[row]), float(min_p[row]))
            expected = max(kept, key=lambda i: (scores[i] + noise[row, j, i], -i))
        assert tokens[row, j] == expected, (row, j)


def check_shapes(sample: Sample, args: tuple[Tensor, ...]) -> None:
    """A position's token is the same alone, beside others, and from strided or misaligned logits."""
    logits, position, *rest = args
    tokens = sample(*args)
    for row in range(len(logits)):
        of_row = [x[row : row + 1] for x in rest]
        assert torch.equal(sample(logits[row : row + 1], position[row : row + 1], *of_row)[0], tokens[row])
        last = logits[row : row + 1, -1:], position[row : row + 1, -1:]
        assert sample(*last, *of_row) == tokens[row, -1]
    apart = logits.new_full((*logits.shape[:2], logits.shape[2] + 3), torch.nan)
    apart[..., 1:-2] = logits
    assert torch.equal(sample(apart[..., 1:-2], position, *rest), tokens)
    assert torch.equal(sample(logits[::2], position[::2], *(x[::2] for x in rest)), tokens[::2])


def check_not_finite(sample: Sample, dtype: torch.dtype) -> None:
    """Positions without a finite largest logit take torch's `argmax`, whatever the filters."""
    args = sample_args(len(PARAMETERS), 4, 50, dtype)
    args[0][:, 0, [7, 20]] = torch.tensor([torch.inf, torch.nan], dtype=dtype)
    args[0][:, 1, [31, 12]] = torch.inf
    args[0][:, 2] = -torch.inf
    args[0][:, 3, 1] = -torch.nan
    assert sample(*args).tolist() == [[20, 12, 0, 1]] * len(PARAMETERS)
