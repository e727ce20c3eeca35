"""Streams of random batches through shadow-checked steps, on any device."""

import random

from benchmarks.start import start
from mla_compile import Engine, SamplingParams
from mla_compile.models import MLAForCausalLM
from mla_compile.speculate import DecodeState
from mla_compile.testing import shadow_check
from tests.models_for_tests import VOCAB, poison_caches

MAX_LEN = 128


def run_checked_streams(
    model: MLAForCausalLM,
    k: int,
    *,
    steps: int,
    every: int,
    temperatures: tuple[float, ...] = (0.0, 1.0),
    **settings: object,
) -> None:
    """At least `steps` steps of batches with 1 to 8 rows, prompts and outputs of any length, at one of `temperatures`,
    with a stop id in half of them, 0 to k drafts accepted at random, and NaN in every page before each batch.

    The tokens of each batch must be those that the engine generates unchecked, with its own drafts.
    """
    engine = Engine(
        model,
        num_speculative_tokens=k,
        max_rows=8,
        max_model_len=MAX_LEN,
        page_size=4,
        **{"compile": True, **settings},
    )
    rng, done = random.Random(k), 0
    while done < steps:
        rows = rng.randint(1, 8)
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(rows)]
        temperature = rng.choice(temperatures)
        sampling = [SamplingParams(temperature=temperature, seed=rng.randrange(100)) for _ in range(rows)]
        stop_ids = rng.sample(range(VOCAB), rng.choice([0, 1]))
        max_new_tokens = rng.randint(1, 80)
        poison_caches(model)
        completions = engine.generate(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids
        )
        expected = [completion.token_ids for completion in completions]

        poison_caches(model)
        with shadow_check(engine, every=every):
            step, state = start(engine, prompts, max_new_tokens, sampling, stop_ids)
        texts: list[list[int]] = [[] for _ in prompts]
        _collect(texts, state)
        while state.active.any():
            _plant_drafts(rng, state, texts, expected, k)
            step(state)
            _collect(texts, state)
            done += 1
        assert texts == expected


def _collect(texts: list[list[int]], state: DecodeState) -> None:
    for text, (count, _, _, _, *tokens) in zip(texts, state.report.tolist()):
        text += tokens[:count]


def _plant_drafts(
    rng: random.Random, state: DecodeState, texts: list[list[int]], expected: list[list[int]], k: int
) -> None:
    """In most rows a random number of drafts is right; those of the tiny model are almost never right."""
    drafts = state.drafts.tolist()
    for row, (text, whole) in enumerate(zip(texts, expected)):
        if rng.random() < 0.75:
            right = whole[len(text) :][: rng.randint(0, k)]
            drafts[row] = right + [rng.randrange(VOCAB) for _ in range(k - len(right))]
    state.drafts.copy_(state.drafts.new_tensor(drafts).view_as(state.drafts))
