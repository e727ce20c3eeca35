"""Layers of every family are compiled once, and generate the tokens of the stock model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mla_compile import backend
from mla_compile.integrations.transformers import accelerate
from tests.integrations.families import FAMILIES, deep_model, prompts
from tests.integrations.stock import left_padded

FEW = ("glm4_moe_lite", "deepseek_v32", "kimi_linear")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """For each graph's number of nodes, those of its parts that are compiled: by Inductor on a GPU."""
    found: dict[int, list[int]] = {}
    divide, lower = backend.lower_layers_once, backend.lower_with_inductor

    def divided(gm: torch.fx.GraphModule, *args: Any, **options: Any) -> Callable[..., Any]:
        found[len(gm.graph.nodes)] = []
        return divide(gm, *args, **options)

    def counted(gm: torch.fx.GraphModule, *args: Any) -> Callable[..., Any]:
        list(found.values())[-1].append(len(gm.graph.nodes))
        return lower(gm, *args) if torch.cuda.is_available() else gm.forward

    monkeypatch.setattr(backend, "lower_layers_once", divided)
    monkeypatch.setattr(backend, "lower_with_inductor", counted)
    torch.compiler.reset()
    return found


@pytest.mark.parametrize(
    ("family", "device"),
    [
        *(pytest.param(family, "cpu", marks=pytest.mark.long) for family in FEW),
        *(pytest.param(family, "cpu", marks=pytest.mark.slow) for family in FAMILIES if family not in FEW),
        *(pytest.param(family, "cuda", marks=pytest.mark.gpu) for family in FEW),
    ],
)
def test_layers_are_compiled_once_and_generate_the_tokens_of_stock(
    family: str, device: str, parts: dict[int, list[int]]
) -> None:
    def generated() -> list[list[int]]:
        ids, mask = (tensor.to(device) for tensor in left_padded(prompts()[:2]))
        tokens = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
        return tokens.tolist()  # type: ignore[no-any-return]

    model: Any = deep_model(family).to(device)
    expected = generated()
    accelerate(model, max_rows=2, compile=True)
    assert generated() == expected
    whole = max(parts)
    assert len(parts[whole]) == 3 and sum(parts[whole]) < 0.75 * whole
