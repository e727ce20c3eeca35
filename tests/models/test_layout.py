"""`pack_adjacent`: whose weights move, and that nothing but their place in memory changes."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mla_compile.models import load_model
from mla_compile.models.layout import ADJACENT, pack_adjacent, unpack_adjacent
from mla_compile.ops.adjacent import lies_before
from tests.models_for_tests import tiny_model


def pairs_of(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The weights of all layers that the table names."""
    return [
        (getattr(module, first).weight, getattr(module, second).weight)
        for module in model.modules()
        for first, second in ADJACENT
        if hasattr(module, first) and hasattr(module, second)
    ]


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def mlp(**options: object) -> nn.Module:
    module = nn.Module()
    for name, size in (("gate_proj", 8), ("up_proj", 12)):
        setattr(module, name, nn.Linear(16, size, **({"bias": False} | options)))
    return module


def is_laid(module: nn.Module) -> bool:
    ((first, second),) = pairs_of(module)
    return lies_before(first, second)


def test_a_model_stays_as_it_is_but_for_where_weights_lie() -> None:
    model = tiny_model(torch.float32)
    model.lm_head.weight.requires_grad_(False)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    before = [(name, id(p), p.requires_grad, p.stride()) for name, p in model.named_parameters()]
    moving = {name for names in ADJACENT for name in names}
    others = {k: v for k, v in addresses(model).items() if moving.isdisjoint(k.split("."))}
    pack_adjacent(model)
    # Attention of two layers and the MTP layer; a dense MLP, and the shared experts of the other two layers.
    assert len(pairs_of(model)) == 6 and all(lies_before(*pair) for pair in pairs_of(model))
    assert [(name, id(p), p.requires_grad, p.stride()) for name, p in model.named_parameters()] == before
    after = model.state_dict()
    assert list(after) == list(values) and all(torch.equal(after[name], values[name]) for name in values)
    assert others.items() <= addresses(model).items()
    assert all(first.is_leaf and not first._is_view() for first, _ in pairs_of(model))


def test_a_second_call_moves_nothing_and_weights_that_a_conversion_parts_are_laid_again() -> None:
    model = tiny_model(torch.float32)
    pack_adjacent(model)
    laid = addresses(model)
    pack_adjacent(model)
    assert addresses(model) == laid
    model.double()
    assert not any(lies_before(*pair) for pair in pairs_of(model))
    pack_adjacent(model)
    assert all(lies_before(*pair) for pair in pairs_of(model))


def test_apart_they_have_memory_of_their_own() -> None:
    model = tiny_model(torch.float32)
    values = copy.deepcopy(model.state_dict())
    pack_adjacent(model)
    unpack_adjacent(model)
    parameters = list(model.parameters())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in parameters)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    where = addresses(model)
    unpack_adjacent(model)
    assert addresses(model) == where


def test_weights_that_were_laid_are_trained() -> None:
    with torch.inference_mode():
        module = copy.deepcopy(mlp())
        pack_adjacent(module)
    assert not is_laid(module), "parameters of inference mode stay"
    module = mlp()
    with torch.inference_mode():
        pack_adjacent(module)
    assert is_laid(module)
    (module.gate_proj(torch.ones(2, 16)).sum() + module.up_proj(torch.ones(2, 16)).sum()).backward()
    before = module.up_proj.weight.detach().clone()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    torch.testing.assert_close(module.up_proj.weight.detach(), before - 2)
    assert is_laid(module)


def with_bias() -> nn.Module:
    return mlp(bias=True)


def without_values() -> nn.Module:
    return mlp(device="meta")


def of_two_dtypes() -> nn.Module:
    module = mlp()
    module.up_proj.double()
    return module


def of_two_inputs() -> nn.Module:
    module = mlp()
    module.up_proj = nn.Linear(20, 12, bias=False)
    return module


def of_a_subclass() -> nn.Module:
    class Mine(nn.Linear):
        pass

    module = mlp()
    module.up_proj = Mine(16, 12, bias=False)
    return module


def parametrised() -> nn.Module:
    module = mlp()
    nn.utils.parametrizations.weight_norm(module.up_proj)
    return module


def of_a_tensor_subclass() -> nn.Module:
    class Mine(Tensor):
        pass

    module = mlp()
    module.up_proj.weight = nn.Parameter(module.up_proj.weight.detach().as_subclass(Mine))
    return module


def used_twice() -> nn.Module:
    module = mlp()
    module.head = nn.Linear(16, 8, bias=False)
    module.head.weight = module.gate_proj.weight
    return module


def the_same_layer() -> nn.Module:
    module = mlp()
    module.up_proj = module.gate_proj
    return module


def sharing_memory() -> nn.Module:
    module = mlp()
    module.register_buffer("view", module.up_proj.weight.data[2:])
    return module


def parts_of_something() -> nn.Module:
    module = mlp()
    module.up_proj.weight.data = torch.randn(20, 16)[8:]
    return module


def transposed() -> nn.Module:
    module = mlp()
    module.up_proj.weight.data = torch.randn(16, 12).T
    return module


def of_integers() -> nn.Module:
    module = mlp()
    module.up_proj.weight = nn.Parameter(torch.ones(12, 16, dtype=torch.int8), requires_grad=False)
    module.gate_proj.weight = nn.Parameter(torch.ones(8, 16, dtype=torch.int8), requires_grad=False)
    return module


def unaligned() -> nn.Module:
    module = nn.Module()
    module.gate_proj, module.up_proj = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    return module


@pytest.mark.parametrize(
    "make",
    [
        with_bias,
        without_values,
        of_two_dtypes,
        of_two_inputs,
        of_a_subclass,
        parametrised,
        of_a_tensor_subclass,
        used_twice,
        the_same_layer,
        sharing_memory,
        parts_of_something,
        transposed,
        of_integers,
        unaligned,
    ],
)
def test_what_is_left(make: Callable[[], nn.Module]) -> None:
    module = make()
    before = addresses(module)
    pack_adjacent(module)
    unpack_adjacent(module)
    assert addresses(module) == before


def test_layers_that_are_registered_twice_are_laid_once() -> None:
    module = mlp()
    pack_adjacent(nn.ModuleList([module, module, nn.Sequential(module)]))
    assert is_laid(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_a_checkpoint_are_loaded_adjacent(checkpoint, dtype: torch.dtype) -> None:
    model = load_model(checkpoint, dtype=dtype)
    assert pairs_of(model) and all(lies_before(*pair) for pair in pairs_of(model))
    assert sum(p.nbytes for p in model.parameters()) == sum(
        {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}.values()
    )
