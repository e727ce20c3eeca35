"""EAGLE-3 heads beside models of transformers: what they draft, and that `generate` gives the tokens of stock."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_compile import Engine
from mla_compile.integrations.transformers import accelerate
from mla_compile.integrations.transformers.target import TransformersTarget
from tests.engine.engines import SIZES
from tests.engine.watching import Watch
from tests.integrations import stock
from tests.integrations.families import VOCAB_SIZE, prompts, stock_model
from tests.speculate.eagle3_heads import (
    DefinedHead,
    SpeculatorsHead,
    config_of,
    llama_config,
    weights_of,
    write_head,
)

LAYERS = {"deepseek_v3": [0, 1], "longcat_flash": [0], "minicpm3": [1, 0]}
WITH_LLAMA = "minicpm3"
"""The family whose head has Llama's layer."""


def random_head(family: str, directory: Path) -> Path:
    settings = {"fc_norm": True, "norm_output": True, "draft_vocab_size": 100, "vocab_size": VOCAB_SIZE}
    config = (llama_config if family == WITH_LLAMA else config_of)(64, LAYERS[family], **settings)
    return write_head(directory, config, weights_of(config))


@pytest.mark.parametrize("family", LAYERS)
@torch.no_grad()
def test_drafts_are_those_of_the_definition(family: str, tmp_path: Path) -> None:
    head, model = random_head(family, tmp_path), stock_model(family)

    def outputs(text: list[int]) -> Sequence[Tensor]:
        ids = torch.tensor([text])
        out = model.get_decoder()(ids, use_cache=False, output_hidden_states=True).hidden_states
        return [each[0].double() for each in out[1:]]

    kind = SpeculatorsHead if family == WITH_LLAMA else DefinedHead
    defined = kind(head, outputs, model.get_input_embeddings().weight.double())
    target, watch, num_checked = TransformersTarget(model, None), Watch(), 0
    with target.installed(64):
        of = Engine(
            target, drafter=watch.kind("eagle3"), drafter_model=head, num_speculative_tokens=2, **SIZES
        )
        requests = [of.add(prompt[:9], max_new_tokens=8) for prompt in prompts()[:3]]
        seen = []
        while of.has_work():
            of.step()
            for request, row in watch.rows(requests):
                if request.completion.token_ids and watch.state.active[row]:
                    text = [*request.prompt, *request.completion.token_ids]
                    seen.append((text, watch.state.drafts[row, : request.max_len - len(text)].tolist()))
    for text, drafts in seen:
        assert drafts == defined.drafts(text, len(drafts)), len(text)
        num_checked += len(drafts)
    assert num_checked > 20


@pytest.mark.long
@pytest.mark.usefixtures("unlowered")
@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", *(pytest.param(f, marks=pytest.mark.slow) for f in LAYERS if f != "deepseek_v3")],
)
def test_an_accelerated_model_gives_the_tokens_of_stock(family: str, tmp_path: Path) -> None:
    model = stock_model(family)
    expected = stock.greedy(model, prompts(), 16)
    accelerate(
        model,
        drafter_model=random_head(family, tmp_path),
        num_speculative_tokens=2,
        compile=True,
    )
    assert stock.greedy(model, prompts(), 16) == expected
