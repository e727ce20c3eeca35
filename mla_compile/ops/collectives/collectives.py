"""`all_reduce` and `all_gather` over the ranks of a model, as ops that a graph keeps whole and in order.

They use torch.distributed's default group: gloo for tensors on the CPU; on GPUs, shared memory for small messages
(`peers.py`) and NCCL for others. Every rank gets the same bits. They return new tensors, because an op that writes to
an argument would cause copies.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mla_compile.ops.collectives.peers import SMALL, facts_of
from mla_compile.ops.dispatch import Candidate, reference, triton
from mla_compile.ops.dtypes import accumulate_dtype
from mla_compile.ops.library import define_op, empty

GATHERED = 2**25
"""Bytes, over all ranks, that an in-order all-reduce gathers at once."""

ALL_REDUCE = (
    triton(
        "reads the memory of all GPUs, in the order of ranks",
        "mla_compile.ops.collectives.kernels.collectives:all_reduce_triton",
        constraints=SMALL,
        batch_invariant=True,
    ),
    Candidate(
        "nccl",
        "NCCL, whose order of addition depends on the size",
        "mla_compile.ops.collectives.collectives:all_reduce_nccl",
        ("cuda",),
    ),
    Candidate(
        "in_order",
        "any device: an all-gather, then a sum in the order of ranks",
        "mla_compile.ops.collectives.collectives:all_reduce_in_order",
        batch_invariant=True,
    ),
)
ALL_GATHER = (
    triton(
        "reads the memory of all GPUs",
        "mla_compile.ops.collectives.kernels.collectives:all_gather_triton",
        constraints=SMALL,
    ),
    reference("mla_compile.ops.collectives.collectives:all_gather_torch"),
)


@define_op(table=ALL_REDUCE, layouts={"x": "tokens, columns"}, facts=facts_of)
def all_reduce(x: Tensor, batch_invariant: bool = False) -> Tensor:
    """The sum of all ranks' `x` `[tokens, columns]`, in its dtype, contiguous.

    batch_invariant: whether the addition must be in the order of ranks, so that a token's bits depend on that token
    only. Otherwise the order may differ for many tokens.
    """
    return empty(x, x.shape)


@define_op(table=ALL_GATHER, layouts={"x": "tokens, columns"}, facts=facts_of, static="num_parts")
def all_gather(x: Tensor, num_parts: int) -> Tensor:
    """All ranks' `x` `[tokens, columns]`, concatenated along columns: `[tokens, num_parts * columns]`, contiguous.

    num_parts: the number of ranks.
    """
    return empty(x, (x.shape[0], num_parts * x.shape[1]))


all_reduce_op = torch.ops.mla_compile.all_reduce.default
all_gather_op = torch.ops.mla_compile.all_gather.default


def all_reduce_nccl(x: Tensor) -> Tensor:
    """`all_reduce` by NCCL."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def all_reduce_in_order(x: Tensor) -> Tensor:
    """`all_reduce`, added in the order of ranks in float32 at least, and rounded once."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = dist.get_world_size()
    at_once = max(1, GATHERED // max(1, size * x.shape[1] * x.itemsize))
    for part, sum_of in zip(x.split(at_once), total.split(at_once), strict=True):
        if part.numel():
            first, *others = _gathered(part, size)
            wide = first.to(accumulate_dtype(x.dtype))
            for other in others:
                wide = wide + other
            sum_of.copy_(wide)
    return total


def all_gather_torch(x: Tensor, num_parts: int) -> Tensor:
    """`all_gather` by the group's backend."""
    return torch.cat(_gathered(x, num_parts).unbind(), dim=1)


def _gathered(x: Tensor, size: int) -> Tensor:
    """All ranks' `x`, stacked: `[size, tokens, columns]`."""
    parts = x.new_empty(size, *x.shape)
    gather = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # its name before torch 2.13
    gather(parts.flatten(0, 1), x.contiguous())
    return parts
