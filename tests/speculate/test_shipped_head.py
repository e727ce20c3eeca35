"""The EAGLE-3 head that the package ships: it drafts for the shipped model, on text that neither was trained with."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.acceptance import PROMPTS
from mla_compile import SamplingParams, load_model, load_tokenizer
from mla_compile.defaults import SHIPPED_HEAD, SHIPPED_MODEL
from mla_compile.engine import Engine

SAMPLED = SamplingParams(temperature=0.7, seed=1)
EXPECTED = 1.4
"""Least tokens a step."""


@pytest.mark.long
def test_the_shipped_head_drafts_tokens_that_the_shipped_model_accepts() -> None:
    tokenizer = load_tokenizer(SHIPPED_MODEL)
    assert tokenizer is not None
    texts = json.loads(PROMPTS.read_text("utf-8"))["python"][:4]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    model = load_model(SHIPPED_MODEL, dtype=torch.float32, device="cpu", mtp=False)

    def engine(drafts: int, head: Path | None) -> Engine:
        return Engine(
            model, num_speculative_tokens=drafts, drafter_model=head, max_model_len=128, compile=False
        )

    def generate(of: Engine) -> list[list[int]]:
        found = of.generate(prompts, SAMPLED, max_new_tokens=24, stop_ids=())
        return [completion.token_ids for completion in found]

    drafted = engine(3, SHIPPED_HEAD)
    assert generate(drafted) == generate(engine(0, None))
    assert drafted.stats.acceptance_length > EXPECTED
