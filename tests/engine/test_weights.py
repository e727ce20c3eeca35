"""Weights may change under an engine: what it cached before is not what they make."""

import copy
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

from mla_compile.engine import Engine
from mla_compile.engine.weights import Weights
from mla_compile.models import MLAForCausalLM
from tests.engine.engines import engine, finish, pool_of, texts
from tests.models.small import randomize
from tests.models_for_tests import caches_of, one_layer_model


def drawn(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Other weights for the model."""
    other = copy.deepcopy(model)
    randomize(other, seed)
    return {name: tensor.clone() for name, tensor in other.state_dict().items()}


def by_optimizer(model: nn.Module, seed: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = drawn(model, seed)[name]
    torch.optim.SGD(model.parameters(), lr=0.5, foreach=bool(seed % 2)).step()
    for parameter in model.parameters():
        parameter.grad = None


def in_place(model: nn.Module, seed: int) -> None:
    state = model.state_dict(keep_vars=True)
    for name, tensor in drawn(model, seed).items():
        state[name].copy_(tensor)


def swapped(model: nn.Module, seed: int) -> None:
    for name, tensor in drawn(model, seed).items():
        model.state_dict(keep_vars=True)[name].data = tensor


def replaced(model: nn.Module, seed: int) -> None:
    state = drawn(model, seed)
    for path, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(state[f"{path}.{name}".lstrip(".")], requires_grad=False))


def module_replaced(model: nn.Module, seed: int) -> None:
    draw = random.Random(seed)
    path = draw.choice([name for name, each in model.named_modules() if isinstance(each, nn.Linear)])
    other = copy.deepcopy(model.get_submodule(path))
    for parameter in other.parameters():
        parameter.mul_(-0.5)
    model.set_submodule(path, other)


def swapped_twice(model: nn.Module, seed: int) -> None:
    """The allocator may give the memory of the first ones again."""
    swapped(model, seed + 1)
    swapped(model, seed)


def one_tensor(model: nn.Module, seed: int) -> None:
    draw = random.Random(seed)
    tensor = draw.choice([each for each in model.parameters() if each.dim() > 1])
    tensor.view(-1)[draw.randrange(tensor.numel()) :].mul_(-1)


def in_inference_mode(model: nn.Module, seed: int) -> None:
    with torch.inference_mode():
        in_place(model, seed)


WAYS: list[Callable[[nn.Module, int], object]] = [
    by_optimizer,
    in_place,
    swapped,
    swapped_twice,
    replaced,
    module_replaced,
    one_tensor,
    in_inference_mode,
    lambda model, seed: model.load_state_dict(drawn(model, seed)),
    lambda model, seed: model.load_state_dict(drawn(model, seed), assign=True),
    lambda model, seed: torch._foreach_mul_(list(model.parameters()), 0.9),
]


def fresh(model: MLAForCausalLM, prompts: list[list[int]], k: int) -> list[list[int]]:
    return [c.token_ids for c in engine(k, copy.deepcopy(model)).generate(prompts, max_new_tokens=6)]


@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_tokens_are_those_of_a_fresh_engine(seed: int) -> None:
    draw = random.Random(seed)
    model, k = one_layer_model(), draw.choice([0, 2])
    mine = engine(k, model, max_rows=draw.choice([1, 2, 4]))
    start = [draw.randrange(40) for _ in range(16)]
    for round_ in range(3):
        prompts = [[*start[: draw.randrange(9, 17)], *range(draw.randrange(4))] for _ in range(2)]
        assert [c.token_ids for c in mine.generate(prompts, max_new_tokens=6)] == fresh(model, prompts, k)
        if draw.random() < 0.7:
            draw.choice(WAYS)(model, 100 * seed + round_)


@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_what_runs_meanwhile_leaves_nothing_behind_that_later_ones_share(seed: int) -> None:
    draw = random.Random(seed)
    model = one_layer_model()
    mine = engine(2, model, max_rows=2)
    prompt = [draw.randrange(40) for _ in range(16)]
    running = mine.add(prompt, max_new_tokens=16)
    waiting = [mine.add(prompt, max_new_tokens=16) for _ in range(2)]
    for _ in range(draw.randrange(1, 6)):
        mine.step()
    draw.choice(WAYS)(model, seed)
    later = mine.add(prompt, max_new_tokens=6)
    finish(mine)
    assert all(request.completion.finish_reason == "length" for request in [running, *waiting, later])
    assert texts([later]) == fresh(model, [prompt], 2)
    again = mine.add(running.completion.token_ids, max_new_tokens=6)
    finish(mine)
    assert texts([again]) == fresh(model, [running.completion.token_ids], 2)
    assert pool_of(mine).num_free == pool_of(mine).num_pages - 1


@torch.no_grad()
def test_pages_are_shared_while_weights_stay() -> None:
    mine = engine(2)
    first, second = (mine.add(list(range(16)), max_new_tokens=4) for _ in range(2))
    finish(mine)
    third = mine.add(list(range(16)), max_new_tokens=4)
    finish(mine)
    assert third.num_reused_tokens > 0 and texts([first]) == texts([second]) == texts([third])


def test_a_reset_serves_for_what_torch_does_not_count() -> None:
    model = one_layer_model()
    mine, prompt = engine(2, model), list(range(16))
    mine.generate([prompt], max_new_tokens=4)
    for name, tensor in drawn(model, 1).items():
        model.state_dict()[name].data.copy_(tensor)
    mine.reset_prefix_cache()
    assert [c.token_ids for c in mine.generate([prompt], max_new_tokens=6)] == fresh(model, [prompt], 2)


class OfOurOwn(nn.Parameter):
    """As a library may have one."""


KINDS: dict[str, Callable[[], nn.Parameter]] = {
    "plain": lambda: nn.Parameter(torch.ones(4), requires_grad=False),
    "subclass": lambda: OfOurOwn(torch.ones(4), requires_grad=False),
    "made of tensors": lambda: nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)), requires_grad=False),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_each_way_to_change_a_tensor_is_noticed_once(kind: str) -> None:
    module = nn.Sequential(nn.Module())
    module[0].w = KINDS[kind]()
    weights = Weights(module)

    def write() -> None:
        module[0].w.mul_(2)

    def replace() -> None:
        module[0].w = KINDS[kind]()

    def swap_data() -> None:
        module[0].w.data = KINDS[kind]().data

    def swap_tensors() -> None:
        torch.utils.swap_tensors(module[0].w, KINDS[kind]())

    def replace_module() -> None:
        module[0] = nn.Module()
        module[0].w = KINDS[kind]()

    for change in (write, replace, swap_data, swap_tensors, replace_module):
        for times in (1, 2, 3):  # the next one may get the memory of the one before
            for _ in range(times):
                change()
            assert weights.have_changed(), change
            assert not weights.have_changed()


def test_memory_of_swapped_weights_is_freed() -> None:
    model = nn.Linear(8, 8)
    weights = Weights(model)
    alive = weakref.ref(model.weight)
    memory = StorageWeakRef(model.weight.untyped_storage())
    model.weight = nn.Parameter(torch.ones(8, 8))
    assert alive() is None
    assert memory.expired()
    assert weights.have_changed()


def test_caches_and_what_no_module_has_are_no_weights() -> None:
    model = one_layer_model()
    Engine(model, compile=False, max_model_len=32)
    weights = Weights(model)
    for cache in caches_of(model):
        cache.add_(1)
    assert not weights.have_changed()
    assert not Weights(object()).have_changed()


def test_caches_that_a_module_saves_are_no_weights() -> None:
    model = one_layer_model()
    Engine(model, compile=False, max_model_len=32)
    for spec in model.cache_specs():
        spec.layer.register_buffer("kv_cache", spec.cache)
    weights, all_saved = Weights(model, caches_of(model)), Weights(model)
    for each in (weights, copy.deepcopy(weights)):
        for cache in caches_of(each._model):
            cache.add_(1)
        each.have_changed()  # a copy's first look is a change
        for cache in caches_of(each._model):
            cache.add_(1)
        assert not each.have_changed()
    assert all_saved.have_changed()


@torch.no_grad()
def test_a_copy_looks_at_its_own_weights() -> None:
    weights = Weights(one_layer_model())
    copied = copy.deepcopy(weights)
    assert not weights.have_changed()
    assert copied.have_changed(), "the pages of the first one's weights are not the copy's"
    assert not copied.have_changed()
