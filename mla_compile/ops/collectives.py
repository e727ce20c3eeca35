"""`all_reduce` and `all_gather` among the processes that share a model, as ops that a graph keeps whole and in order.

They run in torch.distributed's default group: gloo for tensors on the CPU, NCCL on GPUs. Every process gets the same
bits. They return new tensors, as ops that write to an argument would be copied around.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mla_compile.ops import validate
from mla_compile.ops.library import define_op, empty


def _run_all_reduce(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _run_all_gather(x: Tensor, num_parts: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(num_parts)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=1)


@define_op(run=_run_all_reduce)
def all_reduce(x: Tensor) -> Tensor:
    """The sum of all processes' `x` `[tokens, columns]`, in its dtype, contiguous.

    Raises:
        MLAError: x is not so, named.
    """
    validate.Layouts().floats(x=(x, "tokens, columns"))
    return empty(x, x.shape)


@define_op(run=_run_all_gather, static="num_parts")
def all_gather(x: Tensor, num_parts: int) -> Tensor:
    """All processes' `x` `[tokens, columns]`, one beside the other: `[tokens, num_parts * columns]`, contiguous.

    num_parts: the number of processes.

    Raises:
        MLAError: x is not so, named.
    """
    validate.Layouts().floats(x=(x, "tokens, columns"))
    return empty(x, (x.shape[0], num_parts * x.shape[1]))


all_reduce_op = torch.ops.mla_compile.all_reduce.default
all_gather_op = torch.ops.mla_compile.all_gather.default
