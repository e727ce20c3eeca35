"""`fuse_all_reduce`: which sums over processes become one op with the norm after them, and which do not."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_compile.ops.attention.norm_rope import rms_norm
from mla_compile.ops.collectives.collectives import all_reduce
from mla_compile.passes.fuse_all_reduce import fuse_all_reduce
from mla_compile.passes.fuse_rms_norm import fuse_rms_norm
from mla_compile.passes.pipeline import passes_for
from tests.passes.capture import checked, nodes_of, ops, without_kernel

K = 24
WEIGHT = torch.randn(K, generator=torch.Generator().manual_seed(0))
PASSES = [without_kernel(fuse_rms_norm), fuse_all_reduce]
Call = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]]


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one process."""
    meeting: Path = tmp_path_factory.mktemp("group") / "meeting"
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def norm(x: Tensor) -> Tensor:
    return rms_norm(x, WEIGHT, 1e-5)


def layers(x: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    for _ in range(3):
        hidden = hidden + all_reduce(norm(hidden) * 0.5)
        hidden = hidden + all_reduce(x * norm(hidden))
    return hidden, norm(hidden)


def residual_first(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = all_reduce(x) + y
    return total, norm(total)


def both_sums(x: Tensor, y: Tensor) -> Tensor:
    return norm(all_reduce(x) + all_reduce(y))


def read_by_others(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = all_reduce(x)
    return norm(y + total), total * 2


def without_a_norm(x: Tensor, y: Tensor) -> Tensor:
    return y + all_reduce(x)


def without_a_residual(x: Tensor, y: Tensor) -> Tensor:
    return norm(all_reduce(x))


def with_itself(x: Tensor, y: Tensor) -> Tensor:
    total = all_reduce(x)
    return norm(total + total)


def written_to_in_between(x: Tensor, y: Tensor) -> Tensor:
    total = all_reduce(x)
    x.mul_(2)
    return norm(y + total) + x


@pytest.mark.parametrize(
    ("call", "fused", "left"),
    [
        (layers, 6, 0),
        (residual_first, 1, 0),
        (both_sums, 1, 1),
        (read_by_others, 0, 1),
        (without_a_norm, 0, 1),
        (without_a_residual, 0, 1),
        (with_itself, 0, 1),
        (written_to_in_between, 0, 1),
    ],
)
def test_a_sum_that_a_norm_alone_reads_is_computed_with_it(call: Call, fused: int, left: int) -> None:
    found = ops(checked(call, PASSES, torch.randn(5, K), torch.randn(5, K)))
    assert found.count("all_reduce_add_rms_norm") == fused
    assert found.count("all_reduce") == left


def test_batch_invariant_graphs_ask_both_ops_for_one_order() -> None:
    def call(x: Tensor, y: Tensor) -> Tensor:
        total = y + all_reduce(x)
        return all_reduce(norm(total))

    passes = passes_for(torch.fx.symbolic_trace(lambda x: x), [], batch_invariant=True)
    gm = checked(call, passes, torch.randn(5, K), torch.randn(5, K))
    for name in ("all_reduce", "all_reduce_add_rms_norm"):
        (node,) = nodes_of(gm, name)
        assert node.args[-1] is True
