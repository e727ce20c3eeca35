"""Weights of an accelerated model are packed adjacent; it is saved and restored as a stock one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from transformers import PreTrainedModel

from mla_compile.integrations.transformers import accelerate, restore
from mla_compile.models.layout import ADJACENT
from mla_compile.ops.adjacent import lies_before
from tests.integrations.families import prompts, stock_model
from tests.integrations.mtp import with_mtp
from tests.integrations.stock import greedy


def laid(model: Any) -> list[bool]:
    """For each pair of weights in the table, in all layers: whether they are adjacent."""
    return [
        lies_before(getattr(module, first).weight, getattr(module, second).weight)
        for module in model.modules()
        for first, second in ADJACENT
        if hasattr(module, first) and hasattr(module, second)
    ]


@pytest.fixture
def model() -> PreTrainedModel:
    return stock_model("glm4_moe_lite", num_hidden_layers=2)


def assert_same(model: Any, before: dict[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_saved_and_loaded_again_it_has_the_same_weights(model: Any, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate(model, compile=False)
    assert laid(model) == [True] * 4
    model.save_pretrained(tmp_path)
    assert_same(stock_model("glm4_moe_lite", num_hidden_layers=2).from_pretrained(tmp_path), before)
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert files < 1.1 * sum(value.nbytes for value in before.values())
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert_same(model, before)
    assert laid(model) == [True] * 4


def test_restored_its_weights_have_memory_of_their_own(model: Any, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate(accelerate(model, compile=False), compile=False)
    assert laid(model) == [True] * 4, "again"
    restore(model)
    assert laid(model) == [False] * 4
    assert_same(model, before)
    save_model(model, str(tmp_path / "model.safetensors"))  # which refuses memory that is shared
    load_model(model, tmp_path / "model.safetensors")
    assert_same(model, before)


def test_weights_of_the_mtp_layer_too() -> None:
    model, mtp, _ = with_mtp("glm4_moe_lite")
    accelerate(model, num_speculative_tokens=1, mtp=mtp, compile=False)
    assert laid(mtp) and all(laid(mtp)) and all(laid(model))
    restore(model)
    assert not any(laid(mtp)) and not any(laid(model))


def test_an_mtp_layer_that_is_no_longer_used_gets_its_memory_back() -> None:
    model, mtp, _ = with_mtp("glm4_moe_lite")
    accelerate(model, num_speculative_tokens=1, mtp=mtp, compile=False)
    accelerate(model, compile=False)
    assert all(laid(model)) and not any(laid(mtp))
    restore(model)
    assert not any(laid(model))


def test_a_converted_model_is_packed_again_and_its_tokens_are_those_of_stock(model: Any) -> None:
    accelerate(model.half(), compile=False, max_rows=len(prompts()))
    model.float()
    assert laid(model) == [False] * 4
    tokens = greedy(model, prompts(), 4)
    assert laid(model) == [True] * 4
    restore(model)
    assert tokens == greedy(model, prompts(), 4)
