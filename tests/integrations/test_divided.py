"""A model that is divided among processes is refused by name; one that only has a plan is not."""

import copy
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed import DistributedConfig

from mla_compile.errors import MLAError
from mla_compile.integrations.transformers import accelerate, restore
from tests.integrations.families import stock_model

REFUSED = r"expected a model that is whole in this process, got \w+ divided"


@pytest.fixture(autouse=True)
def two_processes() -> Iterator[None]:
    """This process is the first of two; nothing comes from the other."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["tp_size", "fsdp_size", "pp_size"])
def test_a_model_that_transformers_has_divided_is_refused(way: str) -> None:
    model = stock_model("deepseek_v3")
    # What `from_pretrained(distributed_config=...)` calls, and with a tp_plan too.
    config, _, mesh = model.prepare_distribute_model(DistributedConfig(**{way: 2}))
    divided = type(model).maybe_distribute_model(copy.deepcopy(model), config, mesh)
    with pytest.raises(MLAError, match=f"{REFUSED} among processes; load it on one GPU, without tp_plan"):
        accelerate(divided, compile=False)
    assert not hasattr(divided, "mla")


def test_a_model_that_others_have_divided_is_refused() -> None:
    divided = copy.deepcopy(stock_model("deepseek_v3"))
    weight = distribute_tensor(divided.lm_head.weight.detach(), dist.init_device_mesh("cpu", (2,)))
    divided.lm_head.weight = nn.Parameter(weight)
    with pytest.raises(MLAError, match=REFUSED):
        accelerate(divided, compile=False)


def test_a_plan_divides_nothing_by_itself() -> None:
    model = stock_model("deepseek_v3")
    assert model.tp_plan
    restore(accelerate(model, compile=False))
