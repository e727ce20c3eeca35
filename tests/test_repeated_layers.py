"""Layers that repeat are compiled once, and compute what the whole graph computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mla_compile.torch_internals import lower_with_inductor

LAYERS, WIDTH = 6, 8


class Layer(nn.Module):
    """Writes its input to a buffer, and changes it by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[: x.shape[0]].copy_(x)
        return x + torch.tanh(self.linear(x)) * self.seen[: x.shape[0]].mean(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x * 2
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.cos(), hidden


@pytest.fixture
def num_nodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes of each graph that Inductor compiles."""
    found: list[int] = []

    def counted(gm: torch.fx.GraphModule, *args: Any) -> Callable[..., Any]:
        found.append(sum(node.op not in ("placeholder", "output") for node in gm.graph.nodes))
        return lower_with_inductor(gm, *args)

    monkeypatch.setattr("mla_compile.backend.lower_with_inductor", counted)
    return found


def compiled(model: nn.Module, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend="mla", fullgraph=True, options=options)


@torch.no_grad()
def test_a_layer_is_compiled_once_and_runs_with_the_weights_and_buffers_of_each(num_nodes: list[int]) -> None:
    model, x = Model(), torch.randn(4, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    call = compiled(model)
    for rows in (x, torch.randn(7, WIDTH)):
        result = call(rows)
        buffers = [layer.seen.clone() for layer in model.layers]
        torch.testing.assert_close(result, model(rows))
        torch.testing.assert_close(buffers, [layer.seen for layer in model.layers])
    before, layer, after = num_nodes
    assert before + after < layer < before + after + 2 * layer


def apart(layer: nn.Module) -> nn.Module:
    layer.linear = nn.Linear(WIDTH, WIDTH, bias=False)
    return layer


class OfTwo(nn.Module):
    """Its result is a tuple, which Dynamo's graph splits where the next layer begins."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(x.tanh().split(WIDTH // 2, dim=-1)[::-1], dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["default", "CUDA graphs"])
@pytest.mark.parametrize("kind", ["equal", "none is like another", "tuples"])
def test_what_is_compiled_whole(kind: str, options: dict[str, Any], num_nodes: list[int]) -> None:
    model, x = Model(OfTwo if kind == "tuples" else Layer), torch.randn(4, WIDTH)
    if kind == "none is like another":
        for layer in model.layers[::2]:
            apart(layer)
        del model.layers[5]
    torch.testing.assert_close(compiled(model, **options)(x), model(x))
    is_whole = kind == "none is like another" or bool(options)
    assert (len(num_nodes) == 1) == is_whole


def test_gradients_flow_through_all_layers(num_nodes: list[int]) -> None:
    model, x = Model(nn.Tanh), torch.randn(4, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x)[0].sum(), x)
    (found,) = torch.autograd.grad(compiled(model)(x)[0].sum(), x)
    torch.testing.assert_close(found, expected)
    assert len(num_nodes) == 1


class SharedBuffer(nn.Module):
    """All layers write to parts of one buffer, which the compiled code of one layer would not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.seen.split(2):
            part.add_(x[:2])
            x = x + self.seen.mean(0)
        return x


@torch.no_grad()
def test_writes_to_shared_memory_keep_their_order() -> None:
    model, x = SharedBuffer(), torch.randn(4, WIDTH)
    expected, seen = model(x), model.seen.clone()
    model.seen.zero_()
    torch.testing.assert_close(compiled(model)(x), expected)
    torch.testing.assert_close(model.seen, seen)


@torch.no_grad()
def test_autocast_in_the_middle_holds_for_all_layers() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(LAYERS):
                    x = self.linear(x)
            return x

    model, x = Cast(), torch.randn(4, WIDTH)
    result = compiled(model)(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, model(x), rtol=0.1, atol=0.1)
