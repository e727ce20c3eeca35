"""Layers that repeat are compiled once, and compute what the whole graph computes."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from mla_compile import MLABatch, pack_batch
from mla_compile.ops.norm.rms_norm import rms_norm_op
from mla_compile.repeated_layers import lower_layers_once
from mla_compile.torch_internals import lower_with_inductor
from tests.passes.capture import HIDDEN, PAGE_SIZE, Stack

LAYERS, WIDTH = 9, 8


def norm(x: Tensor) -> Tensor:
    """By an op of the package, as all layers have one that are compiled once."""
    return rms_norm_op(x, None, 1e-6)


class Layer(nn.Module):
    """Writes its input to a buffer, and changes it by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[: x.shape[0]].copy_(x)
        return x + torch.tanh(self.linear(norm(x))) * self.seen[: x.shape[0]].mean(-1, keepdim=True)


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
@pytest.mark.parametrize("captured", [False, True])
def test_a_layer_is_compiled_once_and_runs_with_the_weights_and_buffers_of_each(
    captured: bool, num_nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Model(), torch.randn(4, WIDTH)
    compiled(model, **{"triton.cudagraphs": True})(x)
    whole = num_nodes.pop()
    torch._dynamo.mark_dynamic(x, 0)
    own = partial(lower_layers_once, captured=captured)
    monkeypatch.setattr("mla_compile.backend.lower_layers_once", lambda *args, **_: own(*args))
    call = compiled(model)
    for rows in (x, torch.randn(7, WIDTH)):
        result = call(rows)
        buffers = [layer.seen.clone() for layer in model.layers]
        torch.testing.assert_close(result, model(rows))
        torch.testing.assert_close(buffers, [layer.seen for layer in model.layers])
    assert len(num_nodes) == 3 and sum(num_nodes) < whole / (4 if captured else 2)


def apart(layer: nn.Module) -> nn.Module:
    layer.linear = nn.Linear(WIDTH, WIDTH, bias=False)
    return layer


class OfTwo(nn.Module):
    """Its result is a tuple, which Dynamo's graph splits where the next layer begins."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(norm(x).tanh().split(WIDTH // 2, dim=-1)[::-1], dim=-1)


class Short(nn.Module):
    """The call of a compiled part would cost more than it does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * 0.9 + 1)


class Resizing(Layer):
    """Its input has other sizes afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x.unsqueeze_(0)
        return norm(self.linear(x).sum(0)).clone()


class Wrapped(Layer):
    """Its weight is of two tensors, as of quantised ones; the first layer's input is not."""

    def __init__(self) -> None:
        super().__init__()
        weight = apart(self).linear.weight.detach()
        self.linear.weight = nn.Parameter(TwoTensor(weight, weight * 2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return norm(self.linear(x)).tanh()


def plain(results: tuple[Tensor, ...]) -> list[Tensor]:
    return [part for x in results for part in ((x.a, x.b) if isinstance(x, TwoTensor) else (x,))]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"triton.cudagraphs": True}], ids=["default", "CUDA graphs"])
@pytest.mark.parametrize(
    ("layer", "is_whole"),
    [
        (Layer, False),
        (OfTwo, False),
        ("none is like another", True),
        (Short, True),
        (Resizing, True),
        (Wrapped, True),
    ],
    ids=str,
)
def test_what_is_compiled_whole(
    layer: Any, is_whole: bool, options: dict[str, Any], num_nodes: list[int]
) -> None:
    model, x = Model(Layer if isinstance(layer, str) else layer), torch.randn(4, WIDTH)
    if isinstance(layer, str):
        for one in model.layers[::2]:
            apart(one)
        del model.layers[5]  # so that no four pairs of layers are equal
    torch.testing.assert_close(plain(compiled(model, **options)(x)), plain(model(x)))
    assert (len(num_nodes) == 1) == (is_whole or bool(options))


class OfView(Model):
    """Its layers read a view that is made before them."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view
        self.register_buffer("base", torch.randn(4, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        factor = self.view(self.base)
        for layer in self.layers:
            x = layer(x) * factor.real
        return x


@torch.no_grad()
@pytest.mark.parametrize(
    "view",
    [
        lambda base: torch._neg_view(base)[:, :WIDTH],
        lambda base: torch.view_as_complex(base.view(4, WIDTH, 2)).conj().imag,
        lambda base: torch.view_as_complex(base.view(4, WIDTH, 2)),
    ],
    ids=["negated", "conjugated", "complex"],
)
def test_a_view_that_compiled_code_cannot_take_as_an_input(
    view: Callable[[Tensor], Tensor], num_nodes: list[int]
) -> None:
    model, x = OfView(view), torch.randn(4, WIDTH)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert len(num_nodes) == 1


class Differentiable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() + norm(x.detach())


def test_gradients_flow_through_all_layers(num_nodes: list[int]) -> None:
    model, x = Model(Differentiable), torch.randn(4, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x)[0].sum(), x)
    (found,) = torch.autograd.grad(compiled(model)(x)[0].sum(), x)
    torch.testing.assert_close(found, expected)
    assert len(num_nodes) == 1


class Seen(Layer):
    """Its buffer gets a gradient by the write."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x)) + norm(x.detach())
        self.seen.copy_(x)
        return x


def test_gradients_flow_through_what_is_written() -> None:
    class Chosen(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0].argmax(-1)

    models, x = [Chosen(Seen) for _ in range(2)], torch.randn(16, WIDTH)
    models[1].load_state_dict(models[0].state_dict())
    found = []
    for model, call in zip(models, [models[0], compiled(models[1])]):
        call(x)
        model.layers[3].seen.sum().backward()
        found.append(model.layers[0].linear.weight.grad)
    torch.testing.assert_close(found[1], found[0])


class SharedBuffer(nn.Module):
    """All layers write to parts of one buffer, which the compiled code of one layer would not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.seen.split(2):
            part.add_(x[:2])
            x = norm(x) + self.seen.mean(0)
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
                    x = norm(self.linear(x))
            return x

    model, x = Cast(), torch.randn(4, WIDTH)
    result = compiled(model)(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, model(x), rtol=0.1, atol=0.1)


class Enabling(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            for layer in self.layers:
                x = layer(x)
        return x * 2


@pytest.mark.parametrize("enabled", [False, True])
def test_gradients_are_enabled_afterwards_as_before(enabled: bool, num_nodes: list[int]) -> None:
    model, x = Enabling().requires_grad_(False), torch.randn(4, WIDTH)
    with torch.set_grad_enabled(enabled):
        torch.testing.assert_close(compiled(model)(x), model(x))
        assert torch.is_grad_enabled() == enabled
    assert len(num_nodes) > 1


class Writing(Model):
    """All layers write to one buffer, and read it through a view that was made before them."""

    def __init__(self) -> None:
        super().__init__(partial(nn.Linear, WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(16, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        view = self.seen[2:6]
        for layer in self.layers:
            self.seen.add_(x.mean())
            x = norm(layer(x)) + view
        return x, view


@torch.no_grad()
def test_layers_that_write_to_the_memory_of_a_view(num_nodes: list[int]) -> None:
    model, x = Writing(), torch.randn(4, WIDTH)
    other = copy.deepcopy(model)
    call = compiled(model)
    for _ in range(2):
        torch.testing.assert_close((*call(x), model.seen), (*other(x), other.seen))
    assert len(num_nodes) == 1


class Scaled(Stack):
    def forward(self, x: Tensor, scale: Tensor, batch: MLABatch) -> Tensor:
        for layer in self.layers:
            x = layer(x * scale[:, None], batch)
        return x


@torch.no_grad()
@pytest.mark.parametrize(
    "steps",
    [
        [([1], [9], [True], 3), ([1], [9], [True], 1)],  # only a check has the symbol of the number of drafts
        [([5], [0], [False], 3), ([4], [5], [True], 3)],
    ],
    ids=["drafts", "prompt"],
)
@pytest.mark.parametrize("is_marked", [True, False])
def test_batches_of_other_kinds(steps: list[tuple[Any, ...]], is_marked: bool, num_nodes: list[int]) -> None:
    """Without marks two inputs have equal symbols, one of which torch replaces by the other."""
    model, table = Scaled(8), torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    call = compiled(model)
    for lens, cached, has_sampled, drafts in steps:
        packed = pack_batch(
            *(lens, cached, table, torch.randn(lens[0], HIDDEN), torch.randn(lens[0])),
            has_sampled=has_sampled,
            page_size=PAGE_SIZE,
            num_speculative_tokens=drafts,
        )
        tensors = packed.tensors if is_marked else [x.clone() for x in packed.tensors]
        expected = copy.deepcopy(model)(*tensors, packed.batch)
        torch.testing.assert_close(call(*tensors, packed.batch)[packed.order], expected[packed.order])
    assert len(num_nodes) > 2
