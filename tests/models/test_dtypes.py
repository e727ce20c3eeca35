"""A model that is converted is the one that is loaded in that dtype, whatever the way there."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from mla_compile.caches import allocate
from mla_compile.engine import Engine
from mla_compile.models import MLAForCausalLM, load_model
from mla_compile.models.moe import Router
from tests.models.small import reference_model, reference_mtp_layer, save, v3_config

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WAYS: dict[str, Any] = {
    "to": lambda module, dtype: module.to(dtype),
    "to with a device": lambda module, dtype: module.to("cpu", dtype),
    "to like": lambda module, dtype: module.to(torch.empty(0, dtype=dtype)),
    "type": lambda module, dtype: module.type(dtype),
    "its method": lambda module, dtype: getattr(
        module,
        {torch.float16: "half", torch.float32: "float", torch.float64: "double"}.get(dtype, "bfloat16"),
    )(),
    "each module": lambda module, dtype: module.apply(lambda part: part.to(dtype)),
    "by float64": lambda module, dtype: module.double().to(dtype),
    "a copy": lambda module, dtype: copy.deepcopy(module).to(dtype),
    "empty, then filled": lambda module, dtype: filled(module.to(dtype)),
}


def filled(model: nn.Module) -> nn.Module:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu").load_state_dict(state)
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint whose correction biases are as published ones: large, in a narrow band, all but a few alike."""
    model = reference_model(v3_config(n_routed_experts=16, vocab_size=256))
    mtp = reference_mtp_layer(model)
    for name, tensor in [*model.named_buffers(), *mtp.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(6.9 + 0.02 * tensor)
    return save(model, tmp_path_factory.mktemp("band"), mtp)


def chosen_experts(model: MLAForCausalLM, x: torch.Tensor) -> list[torch.Tensor]:
    dtype = model.embed_tokens.weight.dtype
    return [module(x.to(dtype))[1] for module in model.modules() if isinstance(module, Router)]


@pytest.mark.parametrize("seed", range(24))
def test_it_has_the_numbers_and_chooses_the_experts_of_one_loaded_so(path, seed):
    draw = random.Random(seed)
    dtype, way = draw.choice(DTYPES), draw.choice(list(WAYS))
    options: dict[str, Any] = {"mtp": draw.choice([None, False]), "quantize": draw.choice([None, "fp8"])}
    model = load_model(path, **options)
    if draw.random() < 0.5:
        allocate(model.cache_specs(), 3, 4)
    expected, found = load_model(path, dtype=dtype, **options), WAYS[way](model, dtype)
    state = expected.state_dict() | {"inv_freq": expected.rotary.inv_freq}
    for name, value in (found.state_dict() | {"inv_freq": found.rotary.inv_freq}).items():
        assert value.dtype == state[name].dtype, (name, way)
        assert torch.equal(value.to(torch.float64), state[name].to(torch.float64)), (name, way)
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(seed))
    for ours, theirs in zip(chosen_experts(found, x), chosen_experts(expected, x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_gives_the_tokens_of_one_loaded_so(path, dtype):
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [200, 100]]
    texts = []
    for model in (load_model(path).to(dtype), load_model(path, dtype=dtype)):
        engine = Engine(model, compile=False, num_speculative_tokens=2, max_model_len=64)
        texts.append([completion.token_ids for completion in engine.generate(prompts, max_new_tokens=24)])
    assert texts[0] == texts[1]
