"""The op that breaks batch invariance is found and named."""

from collections.abc import Callable

import pytest
import torch

from mla_compile.caches import allocate
from mla_compile.ops import implementations, moe
from mla_compile.ops.operands import ExpertOperands
from mla_compile.testing.first_op import first_different_op
from tests.models_for_tests import tiny_model

PROMPTS = [[1 + (7 * i + 3 * j * j) % 20 for j in range(n)] for i, n in enumerate((9, 30, 17, 5))]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    model = tiny_model(torch.float32)
    allocate(model.cache_specs(), 64, 4)
    return model


def by_number_of_tokens(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Its result depends on how many tokens there are, a little."""

    def run(operands: ExpertOperands) -> torch.Tensor:
        return call(operands) * (1 + operands.x.shape[0] * 1e-4)

    return run


@pytest.mark.long
def test_none_is_named_where_none_differs(model: torch.nn.Module) -> None:
    found = first_different_op(model, PROMPTS, 4)
    assert found == "none by itself: look at what the compiler fuses"


@pytest.mark.long
def test_experts_that_depend_on_the_batch_are_named_with_their_layer(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"mla_compile.ops.moe:moe_by_token": by_number_of_tokens(moe.moe_by_token)}
    imported = implementations._imported
    monkeypatch.setattr(implementations, "_imported", lambda name: wrong.get(name) or imported(name))
    found = first_different_op(model, PROMPTS, 4)
    assert found.startswith("`mla_compile.moe_experts.default` in layers.1.mlp")
    assert found.endswith("of prompts")
